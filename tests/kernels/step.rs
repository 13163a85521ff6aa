//! Training on the GPU beside the f32 run on the CPU: the same rows, the same optimizer, the same code.

use crate::device;
use crate::model::{VOCABULARY, llama};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::job::GradientConfig;
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::gradient::microbatch::PackedRow;
use rlhf_hpc::loss::token::cross_entropy;
use rlhf_hpc::model::{Head, Saved};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::train::role::{Learner, Role};
use std::ops::Range;

/// Updates on the played GPU; a real one does the 50 of the promise.
const UPDATES: usize = 8;

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

#[test]
fn losses_norms_and_weights_follow_the_f32_run() {
    let (gpu, _one) = device();
    let axes = Axes::one();
    let (mut on_gpu, mut on_cpu) = (learner(Device::Cuda, &axes), learner(Device::Cpu, &axes));
    let updates = if gpu.properties().is_some() { 50 } else { UPDATES };
    let mut losses = Vec::new();
    for i in 0..updates {
        let row = rows(i);
        let ((a, a_norm), (b, b_norm)) = (update(&mut on_gpu, &axes, &row), update(&mut on_cpu, &axes, &row));
        assert!((a - b).abs() < 0.03 * b.max(0.5), "update {i}: loss {a} on the GPU, {b} on the CPU");
        assert!((a_norm / b_norm - 1.0).abs() < 0.1, "update {i}: norm {a_norm} on the GPU, {b_norm} on the CPU");
        losses.push(b);
    }
    assert!(losses[updates - 1] < 0.8 * losses[0], "something is learned: {losses:?}");
    // Weights of both start rounded and unrounded: what counts is how far they moved.
    let values = |learner: &Learner| learner.slices("weights").into_iter().map(|(_, v)| v.len()).sum::<usize>();
    assert!(values(&on_gpu) >= on_gpu.role.weights.table.parameters(), "the master is all here");
    let moments = |learner: &Learner| {
        let all = learner.slices("m").into_iter().flat_map(|(_, m)| m.into_owned());
        all.map(|m| f64::from(m) * f64::from(m)).sum::<f64>().sqrt()
    };
    let (a, b) = (moments(&on_gpu), moments(&on_cpu));
    assert!((a / b - 1.0).abs() < 0.05, "first moments of norm {a} on the GPU, {b} on the CPU");
}
