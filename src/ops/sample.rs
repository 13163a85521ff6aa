//! Draws one token per row of logits.
//!
//! Filters act in the order bias, repetition penalty, temperature, top-k, top-p, min-p and mean what they mean in Hugging
//! Face `generate`: top-k keeps ties with the k-th value, top-p keeps the smallest set of most likely tokens whose mass
//! reaches p (the crossing token included, equal probabilities lowest token first; arXiv:1904.09751), min-p keeps
//! tokens of at least `min_p` times the largest probability (arXiv:2407.01082), and the repetition penalty divides
//! positive and multiplies negative logits of tokens that occurred (arXiv:1909.05858, section 4.1).

use crate::device::cuda::Memory;
use crate::device::cuda::sample::{Rows, SAMPLED, unpacked};
use crate::device::{Device, cpu, cuda, null};
use crate::experience::SamplingMask;
use crate::tensor::Tensor;

pub use crate::device::cpu::sample::{SampleParams, SampleRow, Sampled};

/// One token per row of logits (rows, v), written to `out`. The log-sum-exp is the one of `linear_logprob`, in the
/// same order, so `logprob` is bitwise what the training forward computes.
pub fn forward(logits: &Tensor, rows: &[SampleRow], out: &mut [Sampled]) {
    forward_parts(logits, &[logits.width()], rows, out);
}

/// `forward` where the vocabulary is cut into parts that end at `ends`: the log-sum-exp is that of a head cut so
/// (`linear_logprob::HeadPart`).
pub fn forward_parts(logits: &Tensor, ends: &[usize], rows: &[SampleRow], out: &mut [Sampled]) {
    check_shapes(logits, ends, rows);
    assert_eq!(out.len(), rows.len(), "sample: room for {} results of {} rows", out.len(), rows.len());
    if let Some(drawn) = drawn(logits, ends, rows) {
        let words: Vec<f32> = drawn.read(SAMPLED * rows.len());
        return out.iter_mut().zip(unpacked(&words)).for_each(|(out, sampled)| *out = sampled);
    }
    note(logits);
    match logits.device() {
        Device::Cpu => cpu::sample::forward(logits.data(), ends, rows, out),
        Device::Cuda => cpu::sample::forward(&logits.to_host(), ends, rows, out),
    }
}

/// As `forward_parts` on a CPU, with each row's sampling mask: the tokens that could be drawn. `logprob` is of the plain temperature
/// softmax over them, bitwise what `linear_logprob` computes with that mask. A greedy row has none.
pub fn forward_masked(logits: &Tensor, ends: &[usize], rows: &[SampleRow], out: &mut [Sampled]) -> Vec<SamplingMask> {
    check_shapes(logits, ends, rows);
    note(logits);
    let mut drawn = vec![Default::default(); rows.len()];
    cpu::sample::forward_masked(logits.data(), ends, rows, &mut drawn);
    let (sampled, masks): (Vec<_>, Vec<_>) = drawn.into_iter().unzip();
    out.copy_from_slice(&sampled);
    masks
}

/// The `n` best tokens of each row of logits (rows, v) whose parts end at `ends`, best first, equal ones lowest token first, written to
/// `out` (rows, n). A token is as good as its log-probability under the plain temperature softmax (temperature 0: at temperature 1)
/// after bias, repetition penalty and ban, which Hugging Face's beam search puts on log-probabilities instead of logits; that is its
/// `sample_logprob`, `logprob` the one before. Logits on a GPU are copied to the host for it.
pub fn top_parts(logits: &Tensor, ends: &[usize], rows: &[SampleRow], n: usize, out: &mut [Sampled]) {
    check_shapes(logits, ends, rows);
    assert!((1..=logits.width()).contains(&n), "top: {n} of {} tokens", logits.width());
    assert_eq!(out.len(), n * rows.len(), "top: room for {} results of {n} x {} rows", out.len(), rows.len());
    note(logits);
    match logits.device() {
        Device::Cpu => cpu::sample::top(logits.data(), ends, rows, n, out),
        Device::Cuda => cpu::sample::top(&logits.to_host(), ends, rows, n, out),
    }
}

fn check_shapes(logits: &Tensor, ends: &[usize], rows: &[SampleRow]) {
    assert_eq!(logits.rows(), rows.len(), "sample: {} rows of logits for {} rows", logits.rows(), rows.len());
    assert!(logits.width() > 0 || rows.is_empty(), "sample: an empty vocabulary");
    let ascending = ends.is_sorted() && ends.last() == Some(&logits.width());
    assert!(ascending, "sample: parts that end at {ends:?} of a vocabulary of {}", logits.width());
}

/// For a plan: two passes over the logits.
fn note(logits: &Tensor) {
    null::note(null::SAMPLING, 0.0, (8 * logits.rows() * logits.width()) as f64);
}

/// Whether no kernel draws these rows, so that the host does, from a copy of their logits: those with biases.
pub fn need_host(rows: &[SampleRow]) -> bool {
    rows.iter().any(|row| !row.bias.is_empty())
}

/// As `forward_parts`, where the results stay on a GPU (`unpacked`); none where they are drawn on the host, which has them at once.
pub fn drawn(logits: &Tensor, ends: &[usize], rows: &[SampleRow]) -> Option<Memory> {
    if logits.device() == Device::Cpu || need_host(rows) {
        return None;
    }
    note(logits);
    let (rows, v) = (Rows::of(rows), logits.width());
    let ends = Memory::of(&ends.iter().map(|&end| end as i32).collect::<Vec<_>>());
    Some(cuda::sample::forward(logits.cuda(), [v, v], &ends, &rows))
}
