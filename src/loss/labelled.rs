//! Losses of labeled responses: of whole responses, and of each step of one.

use super::preference::sigmoid;
use crate::config::method::labelled::KtoConfig;

/// The loss of a policy for one labeled response (KTO, arXiv:2402.01306), and its derivative by the log-ratio h = sum_t
/// (l - l_ref). That is also its derivative by each token's log-probability l. `kl` is a constant that gets no
/// gradient.
///
/// Desirable: `desirable_weight` (1 - sigmoid(beta (h - kl))).
///
/// Undesirable: `undesirable_weight` (1 - sigmoid(beta (kl - h))).
pub fn kto_loss(config: &KtoConfig, is_desirable: bool, h: f64, kl: f64) -> (f64, f64) {
    let (weight, sign) = if is_desirable { (config.desirable_weight, 1.0) } else { (config.undesirable_weight, -1.0) };
    let (x, rest) = (sign * config.beta * (h - kl), sign * config.beta);
    (weight * sigmoid(-x), -weight * rest * sigmoid(x) * sigmoid(-x))
}

/// The loss of a step from the log-probabilities l of its reward tokens over the whole vocabulary, and their target
/// probabilities y, which sum to 1. Returns the loss, its derivatives by l, and p.
///
/// -sum_k y_k log p_k, p = softmax(l) over the reward tokens alone. The normalizer of l over the vocabulary cancels
/// out.
pub fn step_loss(logprobs: &[f32], wanted: &[f64]) -> (f64, Vec<f64>, Vec<f64>) {
    assert_eq!(logprobs.len(), wanted.len(), "a log-probability for each reward token");
    let l: Vec<f64> = logprobs.iter().map(|l| f64::from(*l)).collect();
    let max = l.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log_sum = max + l.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
    let loss = l.iter().zip(wanted).map(|(l, y)| if *y == 0.0 { 0.0 } else { y * (log_sum - l) }).sum();
    let p: Vec<f64> = l.iter().map(|l| (l - log_sum).exp()).collect();
    (loss, p.iter().zip(wanted).map(|(p, y)| p - y).collect(), p)
}

/// Whether the likeliest token of the probabilities `p` is the likeliest of `wanted` (the first of several), and the
/// lead of its `p` over the others.
pub fn step_margin(p: &[f64], wanted: &[f64]) -> (bool, f64) {
    let likeliest = |of: &[f64]| (1..of.len()).fold(0, |best, i| if of[i] > of[best] { i } else { best });
    let right = likeliest(wanted);
    let others = p.iter().enumerate().filter(|(i, _)| *i != right).map(|(_, p)| *p);
    (likeliest(p) == right, p[right] - others.fold(0.0, f64::max))
}
