//! Draws one token per row of logits.

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

/// What one row needs besides its logits.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    pub params: SampleParams,
    /// Uniform in [0, 1), from `rng::Rng::sample_uniform`.
    pub uniform: f32,
    /// Tokens so far, prompt included; only read where the repetition penalty is on.
    pub seen: &'a [u32],
    /// Tokens that must not be drawn (ignore_eos).
    pub banned: &'a [u32],
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    pub token: u32,
    /// Of the plain temperature softmax (temperature 0: of the softmax at temperature 1).
    pub logprob: f32,
    /// Of the filtered distribution that the token was drawn from (greedy: 0).
    pub sample_logprob: f32,
}

/// One token per row of logits (rows, v). The log-sum-exp is the one of `linear_logprob`, in the same order.
pub fn forward(logits: &mut Tensor, rows: &[SampleRow]) -> Vec<Sampled> {
    let _ = (logits, rows);
    todo!()
}
