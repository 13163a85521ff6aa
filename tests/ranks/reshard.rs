//! Weights brought from training's layout into the rollout's, against the same weights made in that layout.

use crate::Test;
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::experience::{Prompt, Response};
use rlhf_hpc::learn::Role;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::metrics::{Phase, Phases};
use rlhf_hpc::model::{Arch, Head, Reshard, Shards, TensorPart, Transformer, Weights, init};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Engine, Hooks, Model, Stop, requests};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::tensor::arena::{self, Buffer};
use rlhf_hpc::train::rollout_weights::RolloutWeights;
use std::path::Path;
use std::sync::Arc;

pub const TESTS: &[Test] = &[
    Test { name: "weights brought into the rollout's layout are those of that layout", ranks: &[2, 4], check: bits },
    Test { name: "resharding follows the weights of the moment and counts what it moves", ranks: &[4], check: moves },
    Test { name: "a rollout in a layout of its own is that of weights loaded there", ranks: &[4], check: generates },
    Test { name: "resharding holds the new part and few units beside it", ranks: &[4], check: frugal },
];

const CONTEXT: usize = 96;

fn arch(family: &str, tied: bool, layers: usize) -> Arch {
    headed(family, tied, layers, (8, 2))
}

/// With such query and key/value heads.
fn headed(family: &str, tied: bool, layers: usize, (heads, kv_heads): (usize, usize)) -> Arch {
    let class = if family == "qwen3" { "Qwen3ForCausalLM" } else { "LlamaForCausalLM" };
    let config = serde_json::json!({
        "model_type": family, "architectures": [class], "hidden_size": 48, "intermediate_size": 100,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 6,
        "vocab_size": 301, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": tied, "attention_bias": tied, "initializer_range": 0.15, "eos_token_id": 2
    });
    Arch::from_config(config.as_object().expect("an object")).expect("a known family")
}

fn models() -> Vec<(Arch, DType)> {
    vec![
        (arch("llama", false, 2), DType::F32),
        (arch("llama", true, 2), DType::Bf16),
        (arch("qwen3", true, 2), DType::F32),
        (arch("qwen3", false, 2), DType::Bf16),
        // Over four ranks each holds three key/value heads, some of them twice.
        (headed("llama", false, 1, (12, 3)), DType::F32),
    ]
}

/// Random weights in which no two elements of a norm or a bias are alike either.
fn weights(arch: &Arch, dtype: DType, seed: u64, part: TensorPart) -> Weights {
    let mut weights = init::init_on(Device::Cpu, arch, Head::LanguageModel, dtype, seed, part);
    let table = weights.table.clone();
    let mut master = weights.to_master(0..table.len());
    for spec in table.specs().iter().filter(|spec| spec.shape.len() == 1) {
        let rows = spec.rows.iter().cloned().flatten();
        let values = master[spec.offset..].iter_mut().zip(rows);
        values.for_each(|(x, row)| *x += 0.3 * (row as f32 * 1.3 + seed as f32).sin());
    }
    weights.store_master(0..table.len(), &master);
    weights
}

fn role((arch, dtype): &(Arch, DType), seed: u64, axes: &Axes, stage: usize) -> Role {
    let weights = weights(arch, *dtype, seed, TensorPart::of(&axes.tensor));
    let shards = Shards::new(&weights.table, axes, stage);
    Role::new("actor", Path::new("none"), arch, weights.shard(&shards), axes)
}

/// The layouts of training that the tests look at: some of each kind, on any world.
fn layouts(world: &World) -> Vec<(Mesh, usize)> {
    let n = world.size;
    let mesh = |sequence: usize, tensor: usize| Mesh { data: n / sequence / tensor, pipeline: 1, sequence, tensor };
    let mut all = vec![(mesh(1, 1), 1), (mesh(1, 1), 3), (mesh(1, n), 0)];
    if n >= 2 {
        all.extend([(mesh(2, 1), 2), (mesh(1, 2), 1), (mesh(1, 2), 3)]);
    }
    if n >= 4 {
        all.extend([(mesh(2, 2), 3), (mesh(n / 2, 1), 3), (mesh(1, n / 2), 3)]);
    }
    all
}

fn rollouts(world: &World) -> Vec<Axes> {
    let fitting = [1, 2, 4, 8].into_iter().filter(|t| world.size.is_multiple_of(*t));
    let mesh = |tensor| Mesh { tensor, ..Mesh::data_only(world.size / tensor) };
    fitting.map(|tensor| world.axes(&mesh(tensor)).expect("all ranks")).collect()
}

/// The values bit by bit, and those in f32 that layers read.
fn assert_same(what: &str, got: &Weights, want: &Weights) {
    assert_eq!((got.dtype(), got.is_sharded()), (want.dtype(), false), "{what}");
    assert_eq!(got.table.specs(), want.table.specs(), "{what}");
    for u in 0..want.table.units().len() {
        let (got, want) = (got.local(u), want.local(u));
        let same = match want.dtype() {
            DType::F32 => {
                bytemuck::cast_slice::<f32, u32>(got.slice().f32())
                    == bytemuck::cast_slice::<f32, u32>(want.slice().f32())
            }
            DType::Bf16 => got.slice().bf16() == want.slice().bf16(),
        };
        assert!(same, "{what}: unit {u}");
    }
    let vectors = want.table.specs().iter().filter(|spec| spec.shape.len() == 1);
    for id in vectors.filter_map(|spec| want.table.find(&spec.name)) {
        assert_eq!(got.vector(id).f32(), want.vector(id).f32(), "{what}: {}", want.table.spec(id).name);
    }
}

fn bits(world: &World) {
    let rollouts = rollouts(world);
    for (mesh, stage) in layouts(world) {
        let axes = world.axes(&mesh).expect("all ranks");
        for model in models().iter().filter(|(arch, _)| arch.check_tensor(mesh.tensor).is_ok()) {
            let actor = role(model, 7, &axes, stage);
            let fits = |rollout: &&Axes| model.0.check_tensor(rollout.tensor.size()).is_ok();
            for rollout in rollouts.iter().filter(fits) {
                let to = TensorPart::of(&rollout.tensor);
                let reshard = Reshard::new(&actor.transformer, &actor.weights.table, &axes, to);
                let (got, _) = reshard.weights(&actor.weights);
                let what = format!("{} {:?}, {mesh} stage {stage} to tensor {}", model.0.family.name, model.1, to.size);
                assert_same(&what, &got, &weights(&model.0, model.1, 7, to));
            }
        }
    }
}

/// A second phase brings other weights; where nothing has to move, nothing does.
fn moves(world: &World) {
    let rollouts = rollouts(world);
    let model = &models()[0];
    for (mesh, stage) in layouts(world) {
        let axes = world.axes(&mesh).expect("all ranks");
        let mut actor = role(model, 7, &axes, stage);
        for rollout in &rollouts {
            let (what, to) = (format!("{mesh} stage {stage} to {rollout:?}"), TensorPart::of(&rollout.tensor));
            let sampler = RolloutWeights::new(&actor, &axes, rollout).expect("a legal layout");
            for seed in [8, 9] {
                actor.weights = role(model, seed, &axes, stage).weights;
                let mut phases = Phases::start();
                let gathered = sampler.gather(&actor, &mut phases);
                let policy = sampler.model(&actor, &gathered);
                assert_same(&what, policy.weights, &weights(&model.0, model.1, seed, to));
                let (sharded, cut) = (actor.weights.is_sharded(), to.size != axes.tensor.size());
                let in_place = std::ptr::eq(policy.weights, std::ptr::from_ref(&actor.weights));
                assert_eq!(in_place, !sharded && !cut, "{what}");
                assert_eq!(gathered.moved().is_some(), sharded || cut, "{what}");
                assert_eq!(phases.spent(Phase::Reshard).is_zero(), in_place, "{what}");
                let sent = sharded || (cut && axes.tensor.size() > 1);
                assert_eq!(gathered.moved().is_some_and(|bytes| bytes > 0.0), sent, "{what}");
            }
        }
    }
}

fn responses(transformer: &Transformer, weights: &Weights) -> Vec<Response> {
    let prompt = |i: usize| Prompt {
        id: 50 + i as u64,
        tokens: (0..=7 * i).map(|j| (3 + (i * 31 + j * 17) % 290) as u32).collect(),
        ..Prompt::default()
    };
    let config = RolloutConfig {
        response_tokens_max: 12,
        samples_per_prompt: 2,
        batch_max: 5,
        prefill_tokens_max: 16,
        kv_bytes_max: 1 << 26,
        ..RolloutConfig::default()
    };
    let prompts: Vec<Prompt> = (0..4).map(prompt).collect();
    let stop = Arc::new(Stop::new(&config, &transformer.arch.eos_tokens));
    let requests = requests(&prompts, &config, &stop, CONTEXT).expect("legal prompts");
    let mut hooks = Hooks { stop: &|| false, progress: &mut |_| {}, finished: &mut |_, _| Ok(()) };
    let model = Model { transformer, weights, tokenizer: None };
    let outcome = Engine::new(&config, 0).generate(model, Rng::new(42, Purpose::Sample), 3, &requests, &mut hooks);
    outcome.expect("a rollout").complete().expect("all of them")
}

fn generates(world: &World) {
    let rollouts = rollouts(world);
    for (mesh, stage) in layouts(world) {
        let axes = world.axes(&mesh).expect("all ranks");
        for model in [&models()[0], &models()[3]] {
            let actor = role(model, 7, &axes, stage);
            for rollout in &rollouts {
                let to = TensorPart::of(&rollout.tensor);
                let sampler = RolloutWeights::new(&actor, &axes, rollout).expect("a legal layout");
                let gathered = sampler.gather(&actor, &mut Phases::start());
                let policy = sampler.model(&actor, &gathered);
                let loaded = weights(&model.0, model.1, 7, to);
                let direct = Transformer::over(&model.0, &loaded.table, rollout);
                let (got, want) = (responses(policy.transformer, policy.weights), responses(&direct, &loaded));
                assert_eq!(got, want, "{mesh} stage {stage} to tensor {}", to.size);
            }
        }
    }
}

/// Bytes of live buffers at most, while `work` runs, beside those that live before.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    // The peak only rises: with so much in use that the next buffer raises it, it shows this work alone.
    let usage = arena::usage();
    let _ballast = Buffer::scratch((usage.peak - usage.in_use).div_ceil(size_of::<f32>()));
    let before = arena::usage();
    assert!(before.peak == before.in_use, "the ballast reaches the peak");
    let done = work();
    (done, arena::usage().peak - before.in_use)
}

fn frugal(world: &World) {
    let arch = arch("llama", false, 24);
    for dtype in [DType::F32, DType::Bf16] {
        for (mesh, stage) in layouts(world) {
            let axes = world.axes(&mesh).expect("all ranks");
            let actor = role(&(arch.clone(), dtype), 7, &axes, stage);
            for rollout in &rollouts(world) {
                let to = TensorPart::of(&rollout.tensor);
                let reshard = Reshard::new(&actor.transformer, &actor.weights.table, &axes, to);
                // All ranks allocate; none begins before all have measured what was there.
                world.group().barrier();
                let ((part, _), bytes) = peak(|| reshard.weights(&actor.weights));
                let whole = weights(&arch, dtype, 7, TensorPart::whole());
                let sizes = |weights: &Weights| -> Vec<usize> {
                    let units = 0..weights.table.units().len();
                    // A bf16 unit has a second buffer for what layers read in f32.
                    units.map(|u| arena::size_class(weights.local(u).bytes()) + arena::size_class(1)).collect()
                };
                let (unit, whole) =
                    (sizes(&whole).into_iter().max().expect("units"), sizes(&whole).iter().sum::<usize>());
                assert!(whole > 12 * unit, "the model is many units");
                // The unit that is cut, the next one, and what is joined of one: each with the copies of norms and heads.
                let part: usize = sizes(&part).iter().sum();
                let most = part + 4 * unit;
                let what = format!("{mesh} stage {stage} to tensor {}, {dtype:?}", to.size);
                assert!(bytes <= most, "{what}: {bytes} bytes at most, part {part}, unit {unit}");
            }
        }
    }
}
