//! Weights resharded from training's layout to the rollout's, compared with the same weights created in that layout.

use crate::Test;
use crate::models::arch;
use crate::tensor_models::{eight_experts, sinks};
use crate::weights::{assert_same, layouts, rollouts, sharded, weights};
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::device::Device;
use rlhf_hpc::learn::Role;
use rlhf_hpc::metrics::{Phase, Phases};
use rlhf_hpc::model::{Arch, Head, Reshard, Shards, TensorPart, Weights};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::tensor::arena::{self, Buffer};
use rlhf_hpc::train::sampling::rollout_weights::RolloutWeights;
use serde_json::json;
use std::path::Path;

pub const TESTS: &[Test] = &[
    Test {
        name: "resharded weights equal those created in the rollout's layout, and sent bytes are counted",
        ranks: &[2, 4],
        check: moves,
    },
    Test { name: "resharding needs memory for the new shard and few other units", ranks: &[4], check: frugal },
];

fn models() -> Vec<(Arch, DType)> {
    let tied = |tied: bool| json!({"vocab_size": 301, "tie_word_embeddings": tied, "attention_bias": tied});
    vec![
        (arch("llama", &tied(false)), DType::F32),
        (arch("llama", &tied(true)), DType::Bf16),
        (arch("qwen3", &tied(true)), DType::F32),
        (arch("qwen3", &tied(false)), DType::Bf16),
        (arch("qwen3_moe", &eight_experts()), DType::F32),
        (arch("qwen3_moe", &eight_experts()), DType::Bf16),
        (arch("gpt_oss", &sinks()), DType::F32),
        // Over four ranks each holds three key/value heads, some of them twice.
        (arch("llama", &json!({"num_attention_heads": 12, "num_key_value_heads": 3})), DType::F32),
    ]
}

fn whole(arch: &Arch, dtype: DType, seed: u64, part: TensorPart) -> Weights {
    weights(Device::Cpu, arch, Head::LanguageModel, dtype, seed, part)
}

fn role((arch, dtype): &(Arch, DType), seed: u64, axes: &Axes, stage: usize) -> Role {
    let weights = whole(arch, *dtype, seed, TensorPart::from_group(&axes.tensor));
    let shards = Shards::new(&weights.table, axes, stage);
    Role::new("actor", Path::new("none"), arch, sharded(&weights, &shards), axes)
}

/// A second phase of the first model reshards other weights. If both layouts are equal, nothing is sent.
fn moves(world: &World) {
    let (rollouts, models, layouts) = (rollouts(world), models(), layouts(world));
    let cases = models.iter().enumerate().flat_map(|(i, model)| layouts.iter().map(move |layout| (i, model, layout)));
    for (i, model, &(mesh, stage)) in cases.filter(|(_, model, (mesh, _))| model.0.check_tensor(mesh.tensor).is_ok()) {
        let axes = Axes::split_mesh(&world.group(), &mesh);
        let mut actor = role(model, 7, &axes, stage);
        for rollout in rollouts.iter().filter(|rollout| model.0.check_tensor(rollout.tensor.size()).is_ok()) {
            let to = TensorPart::from_group(&rollout.tensor);
            let what = format!("{} {:?}, {mesh} stage {stage} to tensor {}", model.0.family.name, model.1, to.size);
            let sampler = RolloutWeights::new(&actor, &axes, rollout).expect("a legal layout");
            for seed in if i == 0 { 8..=9 } else { 8..=8 } {
                actor.weights = role(model, seed, &axes, stage).weights;
                let mut phases = Phases::start();
                let gathered = sampler.gather(&actor, &mut phases);
                let policy = gathered.model();
                assert_same(&what, policy.weights, &whole(&model.0, model.1, seed, to));
                let sharded = actor.weights.is_sharded() || mesh.pipeline > 1;
                let cut = to.size != axes.tensor.size();
                let in_place = std::ptr::eq(policy.weights, std::ptr::from_ref(&actor.weights));
                assert_eq!(in_place, !sharded && !cut, "{what}");
                assert_eq!(gathered.moved.is_some(), sharded || cut, "{what}");
                assert_eq!(phases.spent(Phase::Reshard).is_zero(), in_place, "{what}");
                let sent = sharded || (cut && axes.tensor.size() > 1);
                assert_eq!(gathered.moved.is_some_and(|bytes| bytes > 0.0), sent, "{what}");
            }
        }
    }
}

/// The peak bytes of live buffers while `work` runs, without those from before.
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
    let arch = arch("llama", &json!({"vocab_size": 301, "num_hidden_layers": 24}));
    for dtype in [DType::F32, DType::Bf16] {
        for (mesh, stage) in layouts(world) {
            let axes = Axes::split_mesh(&world.group(), &mesh);
            let actor = role(&(arch.clone(), dtype), 7, &axes, stage);
            for rollout in &rollouts(world) {
                let to = TensorPart::from_group(&rollout.tensor);
                let reshard = Reshard::new(&actor.transformer, &actor.weights.table, &axes, to, None);
                // All ranks allocate, and none begins before all have measured the earlier memory.
                world.group().barrier();
                let ((part, _), bytes) = peak(|| reshard.weights(&actor.weights));
                let whole = whole(&arch, dtype, 7, TensorPart::whole());
                let sizes = |weights: &Weights| -> Vec<usize> {
                    let units = 0..weights.table.units().len();
                    // A bf16 unit has a second buffer for what layers read in f32.
                    units.map(|u| arena::size_class(weights.local(u).bytes()) + arena::size_class(1)).collect()
                };
                let (unit, whole) =
                    (sizes(&whole).into_iter().max().expect("units"), sizes(&whole).iter().sum::<usize>());
                assert!(whole > 12 * unit, "the model is many units");
                // The unit that is sent, the next one, and the received parts of one, each with the copies of norms and
                // heads.
                let part: usize = sizes(&part).iter().sum();
                let most = part + 4 * unit;
                let what = format!("{mesh} stage {stage} to tensor {}, {dtype:?}", to.size);
                assert!(bytes <= most, "{what}: {bytes} bytes at most, part {part}, unit {unit}");
            }
        }
    }
}
