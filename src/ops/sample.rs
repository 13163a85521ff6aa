//! Samples one token per row of logits.
//!
//! Filters apply in the order bias, repetition penalty, temperature, top-k, top-p, min-p. They have the meaning of
//! Hugging Face `generate`:
//!
//! - top-k keeps ties with the k-th value.
//! - top-p keeps the smallest set of most likely tokens whose mass reaches p, including the token that crosses p. Among
//!   equal probabilities the lowest token comes first (arXiv:1904.09751).
//! - min-p keeps tokens of at least `min_p` times the largest probability (arXiv:2407.01082).
//! - The repetition penalty divides positive and multiplies negative logits of tokens that occurred (arXiv:1909.05858,
//!   section 4.1).

use crate::device::cuda::Memory;
use crate::device::cuda::sample::{Rows, SAMPLED, unpacked};
use crate::device::{Device, cpu, cuda, null};
use crate::experience::SamplingMask;
use crate::sys::trace;
use crate::tensor::Tensor;

pub use crate::device::cpu::sample::{SampleParams, SampleRow, Sampled};

/// Samples one token per row of logits (rows, v) into `out`. The log-sum-exp is that of `linear_logprob`, in the
/// same order, so `logprob` is bitwise that of the training forward.
pub fn forward(logits: &Tensor, rows: &[SampleRow], out: &mut [Sampled]) {
    forward_parts(logits, &[logits.width()], rows, out);
}

/// `forward` for a vocabulary in parts that end at `ends`. The log-sum-exp is that of a head with the same parts
/// (`linear_logprob::HeadPart`).
pub fn forward_parts(logits: &Tensor, ends: &[usize], rows: &[SampleRow], out: &mut [Sampled]) {
    check_shapes(logits, ends, rows);
    assert_eq!(out.len(), rows.len(), "sample: room for {} results, but {} rows", out.len(), rows.len());
    if let Some(drawn) = drawn(logits, ends, rows) {
        let words: Vec<f32> = drawn.read(SAMPLED * rows.len());
        return out.iter_mut().zip(unpacked(&words)).for_each(|(out, sampled)| *out = sampled);
    }
    note(logits);
    let _span = span(logits);
    match logits.device() {
        Device::Cpu => cpu::sample::forward(logits.data(), ends, rows, out),
        Device::Cuda => cpu::sample::forward(&logits.to_host(), ends, rows, out),
    }
}

/// Does the same as `forward_parts` on a CPU, and returns each row's sampling mask: the tokens that could be sampled.
/// `logprob` refers to the plain temperature softmax over them, bitwise as in `linear_logprob` with that mask. A greedy
/// row has no mask.
pub fn forward_masked(logits: &Tensor, ends: &[usize], rows: &[SampleRow], out: &mut [Sampled]) -> Vec<SamplingMask> {
    check_shapes(logits, ends, rows);
    note(logits);
    let _span = span(logits);
    let mut drawn = vec![Default::default(); rows.len()];
    cpu::sample::forward_masked(logits.data(), ends, rows, &mut drawn);
    let (sampled, masks): (Vec<_>, Vec<_>) = drawn.into_iter().unzip();
    out.copy_from_slice(&sampled);
    masks
}

/// Writes the `n` best tokens of each row of logits (rows, v) to `out` (rows, n), best first. Among equals the lowest
/// token comes first. The parts of the logits end at `ends`. Tokens are ranked by `sample_logprob`: the log-probability
/// under the plain temperature softmax (temperature 0: at temperature 1) after bias, repetition penalty and ban.
/// Hugging Face's beam search applies these to log-probabilities instead of logits. `logprob` is the log-probability
/// without them. Logits on a GPU are copied to the host.
pub fn top_parts(logits: &Tensor, ends: &[usize], rows: &[SampleRow], n: usize, out: &mut [Sampled]) {
    check_shapes(logits, ends, rows);
    assert!((1..=logits.width()).contains(&n), "top: n must be from 1 to {}, got {n}", logits.width());
    assert_eq!(out.len(), n * rows.len(), "top: room for {} results, but {n} x {} rows", out.len(), rows.len());
    note(logits);
    let _span = span(logits);
    match logits.device() {
        Device::Cpu => cpu::sample::top(logits.data(), ends, rows, n, out),
        Device::Cuda => cpu::sample::top(&logits.to_host(), ends, rows, n, out),
    }
}

fn check_shapes(logits: &Tensor, ends: &[usize], rows: &[SampleRow]) {
    assert_eq!(logits.rows(), rows.len(), "sample: {} rows of logits, but {} rows", logits.rows(), rows.len());
    assert!(logits.width() > 0 || rows.is_empty(), "sample: the vocabulary is empty");
    let ascending = ends.is_sorted() && ends.last() == Some(&logits.width());
    assert!(ascending, "sample: the parts must ascend to the vocabulary's end, got {ends:?} of {}", logits.width());
}

/// Notes two reads of the logits for a plan.
fn note(logits: &Tensor) {
    null::note(null::SAMPLING, 0.0, (8 * logits.rows() * logits.width()) as f64);
}

fn span(logits: &Tensor) -> trace::Open {
    trace::operation(null::SAMPLING, "rows vocabulary", || [logits.rows(), logits.width()])
}

/// Whether the host must sample these rows from a copy of their logits. No kernel supports biases.
pub fn need_host(rows: &[SampleRow]) -> bool {
    rows.iter().any(|row| !row.bias.is_empty())
}

/// Samples as `forward_parts` does, but leaves the results on a GPU (`unpacked`). `None` if the host must sample.
pub fn drawn(logits: &Tensor, ends: &[usize], rows: &[SampleRow]) -> Option<Memory> {
    if logits.device() == Device::Cpu || need_host(rows) {
        return None;
    }
    note(logits);
    let _span = span(logits);
    let (rows, v) = (Rows::from_rows(rows), logits.width());
    let ends = Memory::from_values(&ends.iter().map(|&end| end as i32).collect::<Vec<_>>());
    Some(cuda::sample::forward(logits.cuda(), [v, v], &ends, &rows))
}
