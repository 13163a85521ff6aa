//! Draws one token per row of logits.
//!
//! Filters act in the order repetition penalty, temperature, top-k, top-p, min-p and mean what they mean in Hugging
//! Face `generate`: top-k keeps ties with the k-th value, top-p keeps the smallest set of most likely tokens whose mass
//! reaches p (the crossing token included, equal probabilities lowest token first; arXiv:1904.09751), min-p keeps
//! tokens of at least `min_p` times the largest probability (arXiv:2407.01082), and the repetition penalty divides
//! positive and multiplies negative logits of tokens that occurred (arXiv:1909.05858, section 4.1).

use crate::device::{Device, cpu};
use crate::tensor::Tensor;

/// Order of the filters: repetition penalty, temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0: off.
    pub top_k: usize,
    /// 1: off.
    pub top_p: f32,
    /// 0: off.
    pub min_p: f32,
    /// 1: off.
    pub repetition_penalty: f32,
}

impl SampleParams {
    /// Plain sampling at `temperature`, no filter.
    pub fn plain(temperature: f32) -> Self {
        Self { temperature, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }

    pub fn greedy() -> Self {
        Self::plain(0.0)
    }

    /// Whether the distribution drawn from may differ from the plain temperature softmax.
    pub fn filters(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0 || self.repetition_penalty != 1.0
    }
}

/// What one row needs besides its logits.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    pub params: SampleParams,
    /// Uniform in [0, 1), from `rng::Rng::sample_uniform`.
    pub uniform: f32,
    /// Tokens so far, prompt included; only read where the repetition penalty is on.
    pub seen: &'a [u32],
    /// Tokens that must not be drawn (end tokens before the least response length).
    pub banned: &'a [u32],
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampled {
    pub token: u32,
    /// Of the plain temperature softmax (temperature 0: of the softmax at temperature 1). Not a number where the
    /// row's logits are not finite.
    pub logprob: f32,
    /// Of the filtered distribution that the token was drawn from (greedy: 0).
    pub sample_logprob: f32,
}

/// One token per row of logits (rows, v), written to `out`. The log-sum-exp is the one of `linear_logprob`, in the
/// same order, so `logprob` is bitwise what the training forward computes.
///
/// # Panics
/// If the numbers of rows differ, the vocabulary is empty, or a seen or banned token lies outside of it.
pub fn forward(logits: &Tensor, rows: &[SampleRow], out: &mut [Sampled]) {
    assert_eq!(logits.rows(), rows.len(), "sample: {} rows of logits for {} rows", logits.rows(), rows.len());
    assert_eq!(out.len(), rows.len(), "sample: room for {} results of {} rows", out.len(), rows.len());
    assert!(logits.width() > 0 || rows.is_empty(), "sample: an empty vocabulary");
    match logits.device() {
        Device::Cpu => cpu::sample::forward(logits, rows, out),
    }
}
