//! ZeRO stages 0 to 3: every stage, on any number of ranks, trains what one rank trains.

use crate::Test;
use crate::layouts::{Setting, config, samples, whole};
use crate::models::{self, norm};
use crate::tensor_models::{floats, row};
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::job::Recompute;
use rlhf_hpc::config::method::ppo::PolicyLossKind;
use rlhf_hpc::config::optim::{GradientOrder, OptimConfig};
use rlhf_hpc::device::Device;
use rlhf_hpc::experience::Experience;
use rlhf_hpc::learn::Learner;
use rlhf_hpc::learn::Role;
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::load::{ModelFiles, load_base};
use rlhf_hpc::model::params::ParamSpec;
use rlhf_hpc::model::partition::{BLOCK, Shards};
use rlhf_hpc::model::{Arch, Head, ParamId, Reshard, Saved, TensorPart, Transformer, Weights, export, init};
use rlhf_hpc::optim::host_state::Vector;
use rlhf_hpc::tensor::DType;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use tempfile::TempDir;

pub const TESTS: &[Test] = &[
    Test {
        name: "every stage gives the weights of one rank, and recomputation changes no bit",
        ranks: &[3],
        check: trains,
    },
    Test { name: "no rank uses more memory than its stage allows", ranks: &[3], check: promises },
    Test { name: "units are reduced as soon as their backward is done", ranks: &[2], check: early },
    Test { name: "a gradient that is not a number is rejected on all ranks at every stage", ranks: &[3], check: nan },
    Test { name: "a base in nf4 has the bits of one rank in equal shares", ranks: &[2, 3], check: quantized },
    Test {
        name: "a base in nf4 on an expert axis has the bits of one rank, and each rank has its own experts",
        ranks: &[2, 4],
        check: quantized_experts,
    },
    Test { name: "fixed order has the bits of one rank at stages 0 and 1", ranks: &[4], check: fixed },
];

const VOCABULARY: usize = 160;
const LAYERS: usize = 3;
const STAGES: [usize; 4] = [0, 1, 2, 3];
/// Tokens of (prompt, response).
const LENGTHS: [(usize, usize); 11] =
    [(1, 3), (2, 10), (3, 4), (4, 11), (1, 5), (2, 12), (3, 6), (4, 13), (1, 7), (2, 1), (3, 8)];

fn arch(family: &str, tied: bool) -> Arch {
    models::arch(family, &keys(tied))
}

fn keys(tied: bool) -> Value {
    json!({
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": tied,
        "initializer_range": 0.02,
    })
}

fn setting(family: &str, tied: bool) -> Setting {
    let mut config = config(PolicyLossKind::Clip);
    config.ppo.microbatch_tokens_max = 24;
    config.gradient.chunks = 6;
    // A large eps: updates of elements whose gradient is all rounding stay small.
    config.optim.actor =
        OptimConfig { eps: 1e-4, weight_decay: 0.1, clip_norm: 0.5, warmup_ratio: 0.0, ..OptimConfig::with_lr(1e-2) };
    Setting { arch: arch(family, tied), head: Head::LanguageModel, dtype: DType::F32, config }
}

fn learner(setting: &Setting, axes: &Axes, stage: usize) -> Learner {
    setting.learner(7, axes, stage).expect("a learner")
}

/// `rows` samples, different for each update.
fn minibatch(learner: &Learner, rows: usize) -> Vec<Experience> {
    let mut lengths = LENGTHS;
    lengths.rotate_left(learner.zero.updates as usize);
    samples(&lengths[..rows])
}

fn update(setting: &Setting, learner: &mut Learner, axes: &Axes, rows: usize) -> f64 {
    setting.gradient(learner, axes, &minibatch(learner, rows));
    learner.step(axes).expect("finite");
    learner.report.grad_norm
}

/// All weights of a role, gathered.
fn gathered(role: &Role, axes: &Axes) -> Vec<f32> {
    let to = Reshard::new(&role.transformer, &role.weights.table, axes, TensorPart::whole(), None);
    floats(&to.weights(&role.weights).0)
}

/// The result of training: weights, moments, and the norm of every update.
#[derive(Clone, PartialEq)]
struct Outcome {
    vectors: [Vec<f32>; 3],
    norms: Vec<f64>,
}

impl Outcome {
    fn from_learner(learner: &Learner, axes: &Axes, norms: Vec<f64>) -> Self {
        let vector = |what| whole(learner, what, axes).into_iter().flat_map(|(_, values)| values).collect();
        Self { vectors: Vector::ALL.map(vector), norms }
    }

    fn bits(&self) -> (Vec<u32>, Vec<u64>) {
        let vectors = self.vectors.iter().flatten().map(|x| x.to_bits());
        (vectors.collect(), self.norms.iter().map(|x| x.to_bits()).collect())
    }
}

fn train(setting: &Setting, axes: &Axes, stage: usize, rows: usize) -> Outcome {
    let mut learner = learner(setting, axes, stage);
    let norms = (0..3).map(|_| update(setting, &mut learner, axes, rows)).collect();
    let outcome = Outcome::from_learner(&learner, axes, norms);
    if setting.dtype == DType::F32 {
        let flat = gathered(&learner.role, axes);
        let specs = learner.role.weights.table.specs().iter();
        let gathered: Vec<f32> = specs.flat_map(|spec| flat[spec.range()].to_vec()).collect();
        assert!(gathered == outcome.vectors[0], "gathered weights are not those of the ranks, stage {stage}");
    }
    outcome
}

fn data_axes(world: &World) -> Axes {
    Axes::split_mesh(&world.group(), &Mesh::data_only(world.size))
}

/// Relative distances of moments to the reference's, and of weights by how far those moved.
fn assert_close(setting: &Setting, got: &Outcome, want: &Outcome, bound: f64, what: &str) {
    let before = Outcome::from_learner(&learner(setting, &Axes::one(), 0), &Axes::one(), Vec::new());
    let distance = |a: &[f32], b: &[f32]| norm(a.iter().zip(b).map(|(a, b)| a - b));
    let moved = distance(&want.vectors[0], &before.vectors[0]);
    assert!(moved > 0.1, "{what}: weights moved by {moved}");
    let length = |x: &[f32]| norm(x.iter().copied());
    let scales = [moved, length(&want.vectors[1]), length(&want.vectors[2])];
    for (i, scale) in scales.into_iter().enumerate() {
        let off = distance(&got.vectors[i], &want.vectors[i]) / scale;
        assert!(off <= bound, "{what}: {} are off by {off:e}", Vector::ALL[i].name());
    }
    for (got, want) in got.norms.iter().zip(&want.norms) {
        assert!((got - want).abs() <= bound * want, "{what}: norms {got} and {want}");
    }
}

/// All stages against stage 0 on one rank, and against each other where the order of sums is the same.
fn check_stages(world: &World, setting: &Setting, rows: usize, bound: f64) {
    let axes = data_axes(world);
    let alone = train(setting, &Axes::one(), 0, rows);
    let outcomes = STAGES.map(|stage| train(setting, &axes, stage, rows));
    for (stage, outcome) in outcomes.iter().enumerate() {
        assert_close(setting, outcome, &alone, bound, &format!("stage {stage}"));
    }
    assert!(outcomes[0].bits() == outcomes[1].bits(), "stages 0 and 1");
    assert!(outcomes[2].bits() == outcomes[3].bits(), "stages 2 and 3");
    let mut recomputing = setting.clone();
    for (stage, recompute) in [(1, Recompute::Block), (2, Recompute::Attention), (3, Recompute::Block)] {
        recomputing.config.gradient.recompute = recompute;
        let is_same = train(&recomputing, &axes, stage, rows).bits() == outcomes[stage].bits();
        assert!(is_same, "stage {stage}, {recompute:?} recomputed");
    }
}

fn settings() -> impl Iterator<Item = Setting> {
    let families = [("llama", false), ("llama", true), ("qwen3", false), ("qwen3", true)];
    families.into_iter().map(|(family, tied)| setting(family, tied))
}

fn trains(world: &World) {
    check_stages(world, &setting("llama", false), 11, 1e-4);
    check_stages(world, &Setting { head: Head::Value, ..setting("llama", false) }, 11, 1e-4);
    // Ranks without rows take part.
    check_stages(world, &setting("llama", true), 1, 1e-4);
    // A difference of one f32 rounding may become one of bf16 in weights, and then in gradients.
    check_stages(world, &Setting { dtype: DType::Bf16, ..setting("qwen3", true) }, 11, 2e-2);
}

fn promises(world: &World) {
    let axes = data_axes(world);
    for setting in settings().chain([Setting { dtype: DType::Bf16, ..setting("llama", false) }]) {
        let bf16 = setting.dtype == DType::Bf16;
        for stage in STAGES {
            let mut learner = learner(&setting, &axes, stage);
            update(&setting, &mut learner, &axes, 11);
            let table = &learner.role.weights.table;
            let len = table.len();
            // Each unit is divided into equal shards of whole blocks. Padding is added if ranks exchange it.
            let share = |unit: &Range<usize>| unit.len().div_ceil(BLOCK).div_ceil(world.size) * BLOCK;
            let share: usize = table.units().iter().map(share).sum();
            let padded = if world.size == 1 { len } else { share * world.size };
            let state = if stage >= 1 { share } else { len };
            assert!(learner.zero.bytes() <= (if bf16 { 12 } else { 8 }) * state, "stage {stage}: optimizer");
            let (grads, weights) = (&learner.sum.grads, &learner.role.weights);
            let sums = if stage >= 2 { share } else { padded };
            assert!(grads.bytes() <= 4 * sums, "stage {stage}: gradients take {}", grads.bytes());
            // Norms and a row-layout embedding have f32 copies where weights are whole.
            let copies = if bf16 && stage < 3 { 4 * (VOCABULARY + 20) * setting.arch.width } else { 0 };
            let held = [len, padded, padded, share][stage];
            let most = held * setting.dtype.bytes() + copies;
            assert!(weights.bytes() <= most, "stage {stage}: weights take {} of {most}", weights.bytes());
        }
    }
}

/// Adds the gradient of one row to the learner's sums.
fn microbatch(learner: &mut Learner, row: &PackedRow) {
    let Learner { role, sum, .. } = learner;
    let (model, w, mut saved) = (&role.transformer, &role.weights, Saved::new(false));
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
    let mut loss = |_: Range<usize>, _: &[f32], _: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]| {
        dlogprobs.fill(-0.1);
        dentropy.fill(0.0);
    };
    let dhidden = model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut loss, &mut sum.grads).0;
    model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
}

fn early(world: &World) {
    let axes = data_axes(world);
    for setting in settings() {
        for stage in STAGES {
            let mut learner = learner(&setting, &axes, stage);
            learner.sum.begin_chunk();
            for last in [false, true] {
                learner.sum.begin_microbatch(last);
                microbatch(&mut learner, &row(&setting.arch, &[9]));
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
    let setting = setting("qwen3", false);
    for stage in STAGES {
        let mut learner = learner(&setting, &axes, stage);
        update(&setting, &mut learner, &axes, 11);
        let before = Outcome::from_learner(&learner, &axes, Vec::new());
        // A minibatch of one sample, which is on one rank.
        let mut samples = minibatch(&learner, 11);
        samples[5].advantages[0] = f32::NAN;
        setting.gradient(&mut learner, &axes, &samples);
        let error = learner.step(&axes).expect_err("one rank's gradient is NaN");
        assert!(error.message.contains("the gradient of update 2 is not finite"), "{error}");
        assert!(Outcome::from_learner(&learner, &axes, Vec::new()).bits() == before.bits(), "stage {stage}");
        assert_eq!(learner.zero.updates, 1);
        // The next minibatch is not affected.
        let norm = update(&setting, &mut learner, &axes, 11);
        assert!(norm.is_finite() && norm > 0.0);
    }
}

/// A random model in a folder.
struct Files {
    dir: TempDir,
    arch: Arch,
    names: BTreeSet<String>,
}

impl Files {
    fn random(arch: &Arch) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let random = init::init(arch, Head::LanguageModel, DType::F32, 3);
        export::export(dir.path(), arch, &random, DType::F32, None).expect("an export");
        let names = random.table.specs().iter().map(|spec| spec.name.clone()).collect();
        Self { arch: Arch::load(dir.path()).expect("a model"), dir, names }
    }

    /// All of it as a base in nf4.
    fn base(&self, dtype: DType, axes: &Axes, stage: usize) -> Rc<Weights> {
        let files = ModelFiles { dir: self.dir.path(), adapter: None, arch: &self.arch, head: Head::LanguageModel };
        load_base(Device::Cpu, &files, &self.names, dtype, axes, stage, true, true).expect("a base")
    }

    /// The weights of a rollout from those of a base, and the bytes received for them.
    fn gathered(&self, base: &Weights, axes: &Axes) -> (Weights, usize) {
        let transformer = Transformer::for_axes(&self.arch, &base.table, axes);
        Reshard::new(&transformer, &base.table, axes, TensorPart::whole(), None).weights(base)
    }
}

/// Asserts that the parameters that a rank `has` equal those of the whole base.
fn assert_bits(weights: &Weights, alone: &Weights, has: impl Fn(usize, &ParamSpec) -> bool, what: &str) {
    for (index, spec) in alone.table.specs().iter().enumerate() {
        let (id, unit) = (ParamId::own(index), alone.table.unit_of(ParamId::own(index)));
        if !has(unit, spec) {
            continue;
        }
        weights.prefetch((unit + 1) % alone.table.units().len());
        let values = |weights: &Weights| {
            let unit = weights.unit(unit);
            let vector = if spec.shape.len() < 2 { unit.vector(id).f32().to_vec() } else { Vec::new() };
            (format!("{:?}", unit.weight(id).values), vector)
        };
        assert!(values(weights) == values(alone), "{what}: {}", spec.name);
    }
}

fn quantized(world: &World) {
    let (axes, files) = (data_axes(world), Files::random(&arch("qwen3", false)));
    for dtype in [DType::F32, DType::Bf16] {
        let [alone, shared] = [files.base(dtype, &Axes::one(), 0), files.base(dtype, &axes, 3)];
        let (whole, received) = files.gathered(&shared, &axes);
        assert!(shared.is_sharded() && !whole.is_sharded() && whole.is_quantized());
        // Embedding and head are cut at whole blocks.
        let (ours, theirs, rest) = (shared.bytes(), alone.bytes(), 2 * BLOCK * dtype.bytes());
        assert!(ours < theirs / world.size + rest, "{ours} of {theirs} bytes");
        assert!(received < theirs - theirs / world.size + rest, "{received} of {theirs} bytes");
        for weights in [&*shared, &whole] {
            assert_bits(weights, &alone, |_, _| true, dtype.name());
        }
        shared.release();
    }
}

fn quantized_experts(world: &World) {
    let mut keys = keys(false);
    for (key, value) in [("num_experts", 8), ("num_experts_per_tok", 2), ("moe_intermediate_size", 40)] {
        keys[key] = value.into();
    }
    let files = Files::random(&models::arch("qwen3_moe", &keys));
    for (expert, stage) in [(2, 1), (2, 3), (world.size, 2), (world.size, 3)] {
        let axes = Axes::split_mesh(&world.group(), &Mesh { expert, ..Mesh::data_only(world.size) });
        let base = |axes: &Axes, stage| files.base(DType::F32, axes, stage);
        let [alone, divided, all] = [base(&Axes::one(), 0), base(&axes, stage), base(&data_axes(world), stage)];
        let partition = Shards::new(&divided.table, &axes, stage).partition;
        let own = |unit: usize, spec: &ParamSpec| {
            let (held, range) = (partition.shared(unit), spec.range());
            held.start <= range.start && range.end <= held.end
        };
        let what = format!("{expert} ranks of experts, stage {stage}");
        let experts: usize =
            alone.table.specs().iter().filter(|spec| spec.name.contains(".experts.")).map(|s| s.len).sum();
        // At stage 3 data ranks share experts without an axis, too.
        let elsewhere = if stage == 3 { 0 } else { (experts - experts / expert) / 2 };
        let [ours, theirs] = [divided.bytes(), all.bytes()];
        assert!(ours + elsewhere < theirs + 1024, "{what}: {ours} of {theirs} bytes");
        assert_bits(&divided, &alone, own, &what);
        let (whole, received) = files.gathered(&divided, &axes);
        assert!(!whole.is_sharded() && received >= (experts - experts / expert) / 2, "{what}: {received} bytes");
        assert_bits(&whole, &alone, |_, _| true, &what);
        divided.release();
    }
}

fn fixed(world: &World) {
    let axes = data_axes(world);
    // The last one leaves ranks without a chunk.
    for (i, mut setting) in settings().chain([setting("llama", false)]).enumerate() {
        setting.config.gradient.order = GradientOrder::Fixed;
        setting.config.gradient.chunks = if i == 4 { 1 } else { 6 };
        let alone = train(&setting, &Axes::one(), 0, 11);
        for stage in [0, 1] {
            assert!(train(&setting, &axes, stage, 11).bits() == alone.bits(), "stage {stage} on {} ranks", world.size);
        }
        for stage in [2, 3] {
            let error = setting.learner(7, &axes, stage).err().expect("gradients are not summed in fixed order");
            assert!(error.message.contains(&format!("mesh.zero = {stage}")) && error.hint.is_some(), "{error}");
        }
    }
}
