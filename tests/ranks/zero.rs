//! ZeRO stages 0 to 3: every stage, on any number of ranks, trains what one rank trains.

use crate::Test;
use crate::tensor_models::floats;
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::job::GradientConfig;
use rlhf_hpc::config::optim::{GradientOrder, OptimConfig};
use rlhf_hpc::device::Device;
use rlhf_hpc::error::Result;
use rlhf_hpc::learn::Role;
use rlhf_hpc::learn::learner::{Learner, VECTORS};
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::learn::tree_sum::leaves;
use rlhf_hpc::loss::token::cross_entropy;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::reshard::Reshard;
use rlhf_hpc::model::{Arch, Head, Saved, TensorPart, init};
use rlhf_hpc::optim::BLOCK;
use rlhf_hpc::tensor::DType;
use serde_json::json;
use std::ops::Range;

pub const TESTS: &[Test] = &[
    Test { name: "every stage trains what one rank trains", ranks: &[1, 3], check: trains },
    Test { name: "recomputation changes no bit at any stage", ranks: &[2], check: recompute },
    Test { name: "no rank holds more than its stage promises", ranks: &[3], check: promises },
    Test { name: "units are reduced as soon as their backward is done", ranks: &[2], check: early },
    Test { name: "a gradient that is no number is refused on all ranks alike at every stage", ranks: &[3], check: nan },
    Test { name: "fixed order has the bits of one rank at stages 0 and 1", ranks: &[4], check: fixed },
    Test { name: "weights loaded and gathered at stage 3 are those of the directory", ranks: &[3], check: loaded },
];

const VOCABULARY: usize = 160;
const LAYERS: usize = 3;
const ROWS: usize = 11;
const MICROBATCH_ROWS: usize = 2;
const STAGES: [usize; 4] = [0, 1, 2, 3];

pub fn arch(family: &str, tied: bool) -> Arch {
    let config = json!({
        "architectures": [if family == "qwen3" { "Qwen3ForCausalLM" } else { "LlamaForCausalLM" }],
        "model_type": family, "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": tied,
    });
    Arch::from_config(config.as_object().expect("an object")).expect("a known family")
}

/// What a learner is made of.
#[derive(Clone)]
pub struct Setting {
    pub arch: Arch,
    pub head: Head,
    pub dtype: DType,
    pub recompute: bool,
    pub rows: usize,
    pub order: GradientOrder,
    /// Of a minibatch in fixed order.
    pub chunks: usize,
}

impl Setting {
    pub fn new(arch: Arch) -> Self {
        let (head, order) = (Head::LanguageModel, GradientOrder::Fast);
        Self { arch, head, dtype: DType::F32, recompute: false, rows: ROWS, order, chunks: 6 }
    }

    fn try_learner(&self, axes: &Axes, stage: usize) -> Result<Learner> {
        let role = Role::init(Device::Cpu, "actor", &self.arch, self.head, self.dtype, 7, axes, stage);
        // A large eps: updates of elements whose gradient is all rounding stay small.
        let optim = OptimConfig { eps: 1e-4, weight_decay: 0.1, clip_norm: 0.5, ..OptimConfig::with_lr(1e-2) };
        let gradient = GradientConfig { order: self.order, chunks: self.chunks, ..GradientConfig::default() };
        Learner::new(role, &optim, &gradient, 10, axes, stage)
    }

    pub fn learner(&self, axes: &Axes, stage: usize) -> Learner {
        self.try_learner(axes, stage).expect("a learner")
    }
}

fn tokens(update: usize, row: usize) -> Vec<u32> {
    (0..5 + row * 7 % 13).map(|i| ((i * i * 31 + row * 17 + update * 101 + i) % VOCABULARY) as u32).collect()
}

fn packed(update: usize, rows: &[usize]) -> PackedRow {
    let mut packed = PackedRow::new();
    for &row in rows {
        packed.push(&tokens(update, row), 1);
    }
    packed
}

/// Adds the gradient of one row to the learner's sums. The loss is the mean over `total` tokens.
fn microbatch(learner: &mut Learner, row: &PackedRow, weight: f32, recompute: bool) {
    let Learner { role, sum, .. } = learner;
    let (model, w) = (&role.transformer, &role.weights);
    let mut saved = Saved::new(recompute);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
    let dhidden = if w.table.head() == Head::Value {
        let values = model.values(w, &hidden, &row.rows);
        let dvalues: Vec<f32> = values.iter().zip(&row.targets).map(|(v, &t)| weight * (v - t as f32 / 80.0)).collect();
        model.values_backward(w, &hidden, &row.rows, &dvalues, &mut sum.grads)
    } else {
        let weights = vec![weight; row.rows.len()];
        let mut loss = |r: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]| {
            cross_entropy(l, &weights[r], dlogprobs);
            dentropy.fill(0.0);
        };
        model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut loss, &mut sum.grads).0
    };
    model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
}

/// The micro-batches of the rows that one of `chunks` chunks has; as many for every chunk.
fn microbatches(setting: &Setting, chunk: usize, chunks: usize) -> Vec<Vec<usize>> {
    let own: Vec<usize> = (0..setting.rows).filter(|row| row % chunks == chunk).collect();
    let mut parts: Vec<Vec<usize>> = own.chunks(MICROBATCH_ROWS).map(<[usize]>::to_vec).collect();
    parts.resize(setting.rows.div_ceil(chunks).div_ceil(MICROBATCH_ROWS), Vec::new());
    parts
}

/// One minibatch up to the step.
fn gradient(learner: &mut Learner, axes: &Axes, setting: &Setting, weight: impl Fn(usize) -> f32) {
    let update = learner.zero.updates as usize;
    let (rank, ranks) = (axes.data.rank(), axes.data.size());
    let (chunks, own) = match learner.sum.order {
        GradientOrder::Fast => (ranks, vec![(rank, rank)]),
        GradientOrder::Fixed => (learner.sum.fixed_chunks, leaves(learner.sum.fixed_chunks, rank, ranks)),
    };
    for (i, (leaf, chunk)) in own.iter().enumerate() {
        learner.sum.begin_chunk();
        let parts = microbatches(setting, *chunk, chunks);
        for (j, part) in parts.iter().enumerate() {
            learner.sum.begin_microbatch(i + 1 == own.len() && j + 1 == parts.len());
            microbatch(learner, &packed(update, part), weight(update), setting.recompute);
        }
        learner.sum.end_chunk(*leaf);
    }
}

/// 1 / tokens that the minibatch predicts.
fn weight(setting: &Setting, update: usize) -> f32 {
    1.0 / (0..setting.rows).map(|row| tokens(update, row).len() - 1).sum::<usize>() as f32
}

pub fn update(learner: &mut Learner, axes: &Axes, setting: &Setting) -> f64 {
    gradient(learner, axes, setting, |update| weight(setting, update));
    learner.step(axes).expect("finite");
    learner.report.grad_norm
}

/// A whole vector of a learner, put together from what its ranks save.
pub fn vector(learner: &Learner, axes: &Axes, what: &str) -> Vec<f32> {
    let mut all = vec![f32::NAN; learner.role.weights.table.len()];
    let mut mine = Vec::new();
    for (start, values) in learner.stretches(what) {
        let values = values.to_host();
        mine.extend_from_slice(bytemuck::cast_slice(&[start as u64, values.len() as u64]));
        mine.extend_from_slice(bytemuck::cast_slice(&values));
    }
    for bytes in axes.zero.all_gather_bytes(&mine) {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let number = |at: usize| u64::from_ne_bytes(rest[at..at + 8].try_into().expect("8 bytes")) as usize;
            let (start, len) = (number(0), number(8));
            for (x, bytes) in all[start..start + len].iter_mut().zip(rest[16..].chunks_exact(4)) {
                assert!(x.is_nan(), "{what} is saved twice at {start}");
                *x = f32::from_ne_bytes(bytes.try_into().expect("4 bytes"));
            }
            rest = &rest[16 + 4 * len..];
        }
    }
    assert!(all.iter().all(|x| !x.is_nan()), "{what} is not saved whole");
    all
}

/// All weights of a role, gathered.
fn whole(role: &Role, axes: &Axes) -> Vec<f32> {
    let to = Reshard::new(&role.transformer, &role.weights.table, axes, TensorPart::whole());
    floats(&to.weights(&role.weights).0)
}

/// What training came to: weights, moments, and the norm of every update.
#[derive(Clone, PartialEq)]
struct Outcome {
    vectors: [Vec<f32>; 3],
    norms: Vec<f64>,
}

impl Outcome {
    fn of(learner: &Learner, axes: &Axes, norms: Vec<f64>) -> Self {
        Self { vectors: VECTORS.map(|what| vector(learner, axes, what)), norms }
    }

    fn bits(&self) -> (Vec<u32>, Vec<u64>) {
        let vectors = self.vectors.iter().flatten().map(|x| x.to_bits());
        (vectors.collect(), self.norms.iter().map(|x| x.to_bits()).collect())
    }
}

fn train(setting: &Setting, axes: &Axes, stage: usize) -> Outcome {
    let mut learner = setting.learner(axes, stage);
    let norms = (0..3).map(|_| update(&mut learner, axes, setting)).collect();
    let outcome = Outcome::of(&learner, axes, norms);
    if setting.dtype == DType::F32 {
        let whole = whole(&learner.role, axes);
        assert!(whole[..] == outcome.vectors[0][..], "gathered weights are not those of the ranks, stage {stage}");
    }
    outcome
}

pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
}

fn data_axes(world: &World) -> Axes {
    world.axes(&Mesh::data_only(world.size)).expect("a mesh of these ranks")
}

/// Relative distances of moments to the reference's, and of weights by how far those moved.
fn assert_close(setting: &Setting, got: &Outcome, want: &Outcome, bound: f64, what: &str) {
    let before = floats(&init::init(&setting.arch, setting.head, setting.dtype, 7));
    let moved = distance(&want.vectors[0], &before);
    assert!(moved > 0.1, "{what}: weights moved by {moved}");
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let scales = [moved, norm(&want.vectors[1]), norm(&want.vectors[2])];
    for (i, scale) in scales.into_iter().enumerate() {
        let off = distance(&got.vectors[i], &want.vectors[i]) / scale;
        assert!(off <= bound, "{what}: {} are off by {off:e}", VECTORS[i]);
    }
    for (got, want) in got.norms.iter().zip(&want.norms) {
        assert!((got - want).abs() <= bound * want, "{what}: norms {got} and {want}");
    }
}

/// All stages against stage 0 on one rank, and against each other where the order of sums is the same.
fn check_stages(world: &World, setting: &Setting, bound: f64) {
    let axes = data_axes(world);
    let alone = train(setting, &Axes::one(), 0);
    let outcomes = STAGES.map(|stage| train(setting, &axes, stage));
    for (stage, outcome) in outcomes.iter().enumerate() {
        assert_close(setting, outcome, &alone, bound, &format!("stage {stage}"));
    }
    assert!(outcomes[0].bits() == outcomes[1].bits(), "stages 0 and 1");
    assert!(outcomes[2].bits() == outcomes[3].bits(), "stages 2 and 3");
    assert!(train(setting, &axes, 3).bits() == outcomes[3].bits(), "stage 3, again");
    assert!(train(setting, &axes, 1).bits() == outcomes[1].bits(), "stage 1, again");
}

fn shapes() -> impl Iterator<Item = Setting> {
    [("llama", false), ("llama", true), ("qwen3", false), ("qwen3", true)]
        .into_iter()
        .map(|(family, tied)| Setting::new(arch(family, tied)))
}

fn trains(world: &World) {
    let of = |family, tied| Setting::new(arch(family, tied));
    check_stages(world, &of("llama", false), 1e-4);
    check_stages(world, &Setting { head: Head::Value, ..of("llama", false) }, 1e-4);
    // Ranks without rows go along.
    check_stages(world, &Setting { rows: 1, ..of("llama", true) }, 1e-4);
    // Weights whose f32 values part by a rounding may part by one of bf16, and gradients after them.
    check_stages(world, &Setting { dtype: DType::Bf16, ..of("qwen3", true) }, 2e-2);
}

fn recompute(world: &World) {
    let axes = data_axes(world);
    for stage in STAGES {
        let setting = Setting::new(arch("qwen3", true));
        let kept = train(&setting, &axes, stage);
        assert!(train(&Setting { recompute: true, ..setting }, &axes, stage).bits() == kept.bits(), "stage {stage}");
    }
}

fn promises(world: &World) {
    let axes = data_axes(world);
    for setting in shapes().chain([Setting { dtype: DType::Bf16, ..Setting::new(arch("llama", false)) }]) {
        let bf16 = setting.dtype == DType::Bf16;
        for stage in STAGES {
            let mut learner = setting.learner(&axes, stage);
            update(&mut learner, &axes, &setting);
            let table = &learner.role.weights.table;
            let len = table.len();
            let blocks: usize = table.units().iter().map(|unit| unit.len().div_ceil(BLOCK)).sum();
            let share = blocks.div_ceil(world.size) * BLOCK;
            let state = if stage >= 1 { share } else { len };
            assert!(learner.zero.bytes() <= (if bf16 { 12 } else { 8 }) * state, "stage {stage}: optimizer");
            let (grads, weights) = (&learner.sum.grads, &learner.role.weights);
            let sums = if stage >= 2 { share } else { len };
            assert!(grads.bytes() <= 4 * sums, "stage {stage}: gradients take {}", grads.bytes());
            // Norms and a row-layout embedding have f32 copies where weights are whole.
            let copies = if bf16 && stage < 3 { 4 * (VOCABULARY + 20) * setting.arch.width } else { 0 };
            let held = if stage == 3 { share } else { len };
            let most = held * setting.dtype.bytes() + copies;
            assert!(weights.bytes() <= most, "stage {stage}: weights take {} of {most}", weights.bytes());
        }
    }
}

fn early(world: &World) {
    let axes = data_axes(world);
    for setting in shapes() {
        for stage in STAGES {
            let mut learner = setting.learner(&axes, stage);
            learner.sum.begin_chunk();
            for last in [false, true] {
                learner.sum.begin_microbatch(last);
                microbatch(&mut learner, &packed(0, &[world.rank]), 0.1, false);
                let (units, under_way) = (LAYERS + 2, learner.sum.grads.under_way());
                match stage {
                    0 | 1 if last => assert_eq!(under_way, units, "stage {stage}: the backward is over"),
                    0 | 1 => assert_eq!(under_way, 0, "stage {stage}: more is to be added"),
                    _ => assert_eq!(under_way, 1, "stage {stage}: all but the last two have landed"),
                }
            }
            learner.sum.end_chunk(world.rank);
            learner.step(&axes).expect("finite");
            assert_eq!(learner.sum.grads.under_way(), 0);
        }
    }
}

fn nan(world: &World) {
    let axes = data_axes(world);
    let setting = Setting::new(arch("qwen3", false));
    for stage in STAGES {
        let mut learner = setting.learner(&axes, stage);
        update(&mut learner, &axes, &setting);
        let before = Outcome::of(&learner, &axes, Vec::new());
        let poison = if world.rank + 1 == world.size { f32::NAN } else { 1.0 };
        gradient(&mut learner, &axes, &setting, |update| poison * weight(&setting, update));
        let error = learner.step(&axes).expect_err("one rank's gradient is no number");
        assert!(error.message.contains("the gradient of update 2 is not finite"), "{error}");
        assert!(Outcome::of(&learner, &axes, Vec::new()).bits() == before.bits(), "stage {stage}");
        assert_eq!(learner.zero.updates, 1);
        // The next minibatch is as if nothing had been.
        let norm = update(&mut learner, &axes, &setting);
        assert!(norm.is_finite() && norm > 0.0);
    }
}

fn fixed(world: &World) {
    let axes = data_axes(world);
    // The last one leaves ranks without a chunk.
    for setting in shapes().chain([Setting { chunks: 1, ..Setting::new(arch("llama", false)) }]) {
        let setting = Setting { order: GradientOrder::Fixed, ..setting };
        let alone = train(&setting, &Axes::one(), 0);
        for stage in [0, 1] {
            assert!(train(&setting, &axes, stage).bits() == alone.bits(), "stage {stage} on {} ranks", world.size);
        }
        for stage in [2, 3] {
            let error = setting.try_learner(&axes, stage).err().expect("gradients are not summed in fixed order");
            assert!(error.message.contains(&format!("mesh.zero = {stage}")) && error.hint.is_some(), "{error}");
        }
    }
}

fn loaded(world: &World) {
    let axes = data_axes(world);
    let arch = arch("llama", false);
    for dtype in [DType::F32, DType::Bf16] {
        let dir = tempfile::tempdir().expect("a directory");
        let made = init::init(&arch, Head::LanguageModel, DType::F32, 3);
        rlhf_hpc::model::export::export(dir.path().join("model").as_path(), &arch, &made, DType::F32, None)
            .expect("exports");
        let load = |head, axes: &Axes, stage| {
            Role::load(Device::Cpu, "actor", &dir.path().join("model"), head, dtype, 5, axes, stage).expect("loads")
        };
        for head in [Head::LanguageModel, Head::Value] {
            let (whole, sharded) = (load(head, &Axes::one(), 0), load(head, &axes, 3));
            assert!(sharded.weights.is_sharded() && !whole.weights.is_sharded());
            assert!(self::whole(&sharded, &axes)[..] == floats(&whole.weights)[..]);
            let row = packed(0, &[0, 3]);
            let hidden = [&whole, &sharded]
                .map(|role| role.transformer.forward(&role.weights, &row.tokens, &row.positions, row.keys(), None));
            assert_eq!(hidden[0].data(), hidden[1].data());
        }
    }
}
