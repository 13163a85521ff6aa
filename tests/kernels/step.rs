//! Training on the GPU beside the f32 run on the CPU: the same rows, the same optimizer, the same code.

use crate::device;
use crate::model::{VOCABULARY, apart, llama, rows as rows_of};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::job::GradientConfig;
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::learn::Role;
use rlhf_hpc::learn::learner::{Learner, StateLocation};
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::loss::token::cross_entropy;
use rlhf_hpc::model::{Head, Saved, export, init};
use rlhf_hpc::tensor::DType;
use std::ops::Range;

/// As many as are promised to stay close.
const UPDATES: usize = 50;
/// How far apart the losses of one update may be, by the f32 run's or by half a nat where that is less: weights and activations
/// of bf16 keep 8 bits, and what they round away adds up over two layers and a head.
const LOSS_APART: f64 = 0.03;
/// How far apart the weights may be at the end, by how far the f32 run has moved them: an update of Adam follows the sign of small
/// gradients, which rounding turns.
const WEIGHTS_APART: f64 = 0.1;

fn learner(device: Device, axes: &Axes) -> Learner {
    let dtype = if device == Device::Cuda { DType::Bf16 } else { DType::F32 };
    let role = Role::init_on(device, "actor", &llama(), Head::LanguageModel, dtype, 5, axes, 0);
    let optim = OptimConfig { weight_decay: 0.1, clip_norm: 0.5, ..OptimConfig::with_lr(5e-3) };
    Learner::new(role, &optim, &GradientConfig::default(), 50, axes, 0).expect("a learner")
}

/// Sentences that can be learned: each token follows from the one before.
fn rows(update: usize) -> PackedRow {
    let mut packed = PackedRow::new();
    for row in 0..3 {
        let start = update * 13 + row * 29;
        let tokens: Vec<u32> = (0..6 + 5 * row).map(|i| ((start + 7 * i) % VOCABULARY) as u32).collect();
        packed.push(&tokens, 1);
    }
    packed
}

/// The mean loss before the update, and the gradient's norm.
fn update(learner: &mut Learner, axes: &Axes, row: &PackedRow) -> (f64, f64) {
    learner.sum.begin_chunk();
    learner.sum.begin_microbatch(true);
    let Learner { role, sum, .. } = learner;
    let (model, w) = (&role.transformer, &role.weights);
    let mut saved = Saved::new(false);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
    let weights = vec![1.0 / row.rows.len() as f32; row.rows.len()];
    let mut total = 0.0;
    let mut loss = |r: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]| {
        total += cross_entropy(l, &weights[r], dlogprobs);
        dentropy.fill(0.0);
    };
    let (dhidden, ..) = model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut loss, &mut sum.grads);
    model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
    learner.sum.end_chunk(0);
    learner.step(axes).expect("finite");
    (total, learner.report.grad_norm)
}

/// The f32 weights, parameter by parameter and row by row, however they lie on the device.
fn master(learner: &Learner) -> Vec<f32> {
    let flat: Vec<f32> = learner.slices("weights").into_iter().flat_map(|(_, values)| values.into_owned()).collect();
    learner.role.weights.table.specs().iter().flat_map(|spec| rows_of(spec, &flat)).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}

#[test]
fn losses_norms_and_weights_follow_the_f32_run() {
    let (_gpu, _one) = device();
    let axes = Axes::one();
    let (mut on_gpu, mut on_cpu) = (learner(Device::Cuda, &axes), learner(Device::Cpu, &axes));
    let begun = master(&on_cpu);
    let mut losses = Vec::new();
    for i in 0..UPDATES {
        let row = rows(i);
        let ((a, a_norm), (b, b_norm)) = (update(&mut on_gpu, &axes, &row), update(&mut on_cpu, &axes, &row));
        assert!((a - b).abs() < LOSS_APART * b.max(0.5), "update {i}: loss {a} on the GPU, {b} on the CPU");
        assert!((a_norm / b_norm - 1.0).abs() < 0.1, "update {i}: norm {a_norm} on the GPU, {b_norm} on the CPU");
        losses.push(b);
    }
    assert!(losses[UPDATES - 1] < 0.5 * losses[0], "something is learned: {losses:?}");
    let (a, b) = (master(&on_gpu), master(&on_cpu));
    let gap = |a: &[f32], b: &[f32]| apart(a, b) * norm(b);
    let moved = gap(&begun, &b);
    let distance = gap(&a, &b) / moved;
    eprintln!("weights after {UPDATES} updates are apart by {distance:.3} of how far they moved, {moved:.2}");
    assert!(distance < WEIGHTS_APART, "weights are apart by {distance} of how far they moved");
    let moments = |learner: &Learner| {
        let all = learner.slices("m").into_iter().flat_map(|(_, m)| m.into_owned());
        all.map(|m| f64::from(m) * f64::from(m)).sum::<f64>().sqrt()
    };
    let (a, b) = (moments(&on_gpu), moments(&on_cpu));
    assert!((a / b - 1.0).abs() < 0.05, "first moments of norm {a} on the GPU, {b} on the CPU");
}

#[test]
fn masters_on_the_gpu_and_away_from_it_begin_at_the_values_of_the_files() {
    let (_gpu, _one) = device();
    let (axes, arch) = (Axes::one(), llama());
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model");
    let made = init::init(&arch, Head::LanguageModel, DType::F32, 3);
    export::export(&model, &arch, &made, DType::F32, None).expect("exports");
    for head in [Head::LanguageModel, Head::Value] {
        let load = |device, dtype| Role::load_on(device, "critic", &model, head, dtype, 5, &axes, 0).expect("loads");
        let (optim, gradient) = (OptimConfig::with_lr(0.0), GradientConfig::default());
        let cpu = Learner::new(load(Device::Cpu, DType::F32), &optim, &gradient, 1, &axes, 0).expect("a learner");
        let want = master(&cpu);
        assert!(want.iter().any(|x| x.to_bits() & 0xffff != 0), "of more digits than bf16 has");
        for state_location in [StateLocation::Device, StateLocation::Host] {
            let role = load(Device::Cuda, DType::Bf16);
            let learner = Learner::with_state(state_location, role, &optim, &gradient, 1, &axes, 0).expect("a learner");
            assert!(master(&learner) == want, "{head:?}, {state_location:?}");
        }
    }
}
