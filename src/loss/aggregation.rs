//! Per-token weights, which turn a mean over tokens or sequences into a plain sum.

use crate::config::method::ppo::Aggregation;

/// The totals of a minibatch over all ranks and its whole accumulation window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tokens with mask 1.
    pub tokens: u64,
    /// Sequences with at least one such token.
    pub sequences: u64,
}

impl Totals {
    /// Counts one sequence.
    pub fn add_mask(&mut self, mask: &[u8]) {
        let tokens = mask.iter().filter(|&&m| m != 0).count() as u64;
        self.tokens += tokens;
        self.sequences += u64::from(tokens > 0);
    }
}

/// Appends the weights of one sequence to `weights`: with N = `totals.tokens`, B = `totals.sequences`,
/// n = masked tokens of this sequence and L = `response_tokens_max`, a masked token weighs
///
/// - `token`: 1 / N
/// - `sequence`: 1 / (n B)
/// - `sequence_sum_fixed`: 1 / (B L) (arXiv:2503.20783)
///
/// and any other token 0. The weights of `token` and `sequence` sum to 1 over the minibatch.
pub fn weights(
    aggregation: Aggregation,
    mask: &[u8],
    totals: Totals,
    response_tokens_max: usize,
    weights: &mut Vec<f32>,
) {
    let tokens = mask.iter().filter(|&&m| m != 0).count();
    let denominator = match aggregation {
        Aggregation::Token => totals.tokens as f64,
        Aggregation::Sequence => tokens as f64 * totals.sequences as f64,
        Aggregation::SequenceSumFixed => totals.sequences as f64 * response_tokens_max as f64,
    };
    let weight = if tokens == 0 { 0.0 } else { (1.0 / denominator) as f32 };
    weights.extend(mask.iter().map(|&m| if m == 0 { 0.0 } else { weight }));
}
