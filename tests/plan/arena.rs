//! The memory of an update as planned, compared with the arena's count.

use super::models::{arch, job, small};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::Config;
use rlhf_hpc::config::job::{GradientConfig, Recompute};
use rlhf_hpc::config::mesh::RoleName;
use rlhf_hpc::config::method::JobKind;
use rlhf_hpc::config::model::DTypeName;
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::data::RowTokens;
use rlhf_hpc::data::balance::{self, Cost};
use rlhf_hpc::device::cpu::pool;
use rlhf_hpc::launch::layout::{Layout, Swap};
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::learn::{Learner, Role};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head, Saved, init};
use rlhf_hpc::plan::{self, Device, Job, Rows};
use rlhf_hpc::tensor::{DType, arena};
use rlhf_hpc::train::{self, Archs};
use std::path::Path;

const THREADS: usize = 2;

/// A supervised job of `rows` rows of 128 tokens, 64 of them learned, in one micro-batch.
fn sft(dtype: DType, recompute: Recompute, rows: usize) -> Config {
    let mut config = job(&[]);
    config.job.kind = JobKind::Sft;
    config.model.dtype = if dtype == DType::F32 { DTypeName::F32 } else { DTypeName::Bf16 };
    config.gradient.recompute = recompute;
    config.sft.minibatch_samples = rows;
    config.sft.microbatch_tokens_max = 128 * rows;
    config
}

fn planned(config: &Config, arch: &Arch, rows: Rows) -> usize {
    let archs = Archs(vec![(RoleName::Actor, Head::LanguageModel, arch.clone())]);
    let job = Job::new(config, &archs, Some(rows));
    let mesh = Mesh::data_only(1);
    let layout = Layout { mesh, zero: 1, chunks: 1, rollout_tensor: 1, swap: Swap::default() };
    let device = Device { threads: THREADS, ..Device::cpu(1 << 40, 1) };
    plan::count(&job, &layout, &device, &[RoleName::Actor]).0.arena
}

/// Loads nothing: random weights, one update over micro-batches of rows of these lengths, of which the second half is
/// learned, and the arena's peak since the process began.
fn counted(config: &Config, arch: &Arch, microbatches: &[Vec<usize>]) -> usize {
    let axes = Axes::one();
    let weights = init::init(arch, Head::LanguageModel, config.model.dtype(), 1);
    let role = Role::new("actor", Path::new(""), arch, weights, &axes);
    let (optim, gradient) = (OptimConfig::with_lr(1e-4), GradientConfig::default());
    let mut learner = Learner::new(role.weights.device(), role, &optim, &gradient, 10, &axes, 1)
        .and_then(Learner::with_masters)
        .expect("a learner");
    let tokens: Vec<u32> = (0..512).map(|i| i * 13 % 2000).collect();
    learner.sum.begin_chunk();
    for (i, lengths) in microbatches.iter().enumerate() {
        let mut row = PackedRow::new();
        for &length in lengths {
            row.push(&tokens[..length], length / 2);
        }
        learner.sum.begin_microbatch(i + 1 == microbatches.len());
        let Learner { role, sum, .. } = &mut learner;
        let (model, w) = (&role.transformer, &role.weights);
        let mut saved = Saved::new(config.gradient.recompute);
        let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
        let mut loss = |_: std::ops::Range<usize>, _: &[f32], _: &[f32], d: &mut [f32], _: &mut [f32]| d.fill(-1e-3);
        let head = model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut loss, &mut sum.grads);
        model.backward(w, saved, &row.cu_seqlens, head.0, &mut sum.grads);
    }
    learner.sum.end_chunk(0);
    learner.step(&axes).expect("finite");
    arena::usage().peak
}

/// Rows of 20 to 300 tokens, as many as in three micro-batches of 4096.
fn mixed() -> Vec<RowTokens> {
    let lengths = (0..72).map(|i: usize| 20 + i * i * 31 % 280);
    lengths.map(|all| RowTokens { prompt: all / 2, response: all - all / 2, ..RowTokens::default() }).collect()
}

/// The peak only grows, so the cases are in order of their sizes. Nothing else in these tests has tensors.
#[test]
fn the_plan_agrees_with_the_arena_within_half_a_percent() {
    pool::set_threads(THREADS);
    let arch = arch(&small());
    let cases = [
        (DType::Bf16, Recompute::Block, 8),
        (DType::F32, Recompute::Block, 12),
        (DType::Bf16, Recompute::Attention, 18),
        (DType::Bf16, Recompute::None, 18),
        (DType::F32, Recompute::None, 24),
    ];
    let mut before = 0;
    let mut check = |config: &Config, rows: Rows, microbatches: &[Vec<usize>], what: &str| {
        let planned = planned(config, &arch, rows);
        assert!(planned > before, "{what} is larger than the case before");
        let counted = counted(config, &arch, microbatches);
        let off = planned as f64 / counted as f64 - 1.0;
        assert!(off.abs() < 0.005, "{what}: planned {planned}, counted {counted}");
        before = counted;
    };
    for (dtype, recompute, rows) in cases {
        let config = sft(dtype, recompute, rows);
        let what = format!("{dtype:?} recompute {recompute:?} x {rows}");
        check(
            &config,
            Rows::longest(&config, &train::shape(&config), arch.context, "").with(Some(64), Some(64)),
            &[vec![128; rows]],
            &what,
        );
    }
    let rows = mixed();
    let mut config = sft(DType::F32, Recompute::None, rows.len());
    config.sft.microbatch_tokens_max = 4096;
    let lengths: Vec<usize> = rows.iter().map(|row| row.all()).collect();
    let cut = balance::plan(&lengths, 1, 4096, &Cost::from_arch(&arch)).swap_remove(0);
    assert!(cut.len() > 2, "several micro-batches");
    let cut: Vec<Vec<usize>> = cut.into_iter().map(|rows| rows.into_iter().map(|i| lengths[i]).collect()).collect();
    check(&config, Rows::from_tokens(&config, &train::shape(&config), arch.context, &rows, &[]), &cut, "mixed lengths");
}
