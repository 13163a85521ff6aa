//! Losses of pairs: for a reward model from two scores, and for a policy from the log-probabilities of two responses.

use crate::config::method::preference::{DpoConfig, PairLoss, PreferenceLoss};

/// The result of a pair: its loss, and the rewards of both sides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pair {
    pub loss: f64,
    pub chosen_reward: f64,
    pub rejected_reward: f64,
}

/// log(1 + exp(x)), without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The loss of a reward model for the scores r_c and r_r of a pair, and its derivatives by them. `Sigmoid`: -log
/// sigmoid(r_c - r_r - margin) (Bradley-Terry; arXiv:2203.02155, arXiv:2307.09288 for the margin). `Logexp`: log(1 +
/// exp(r_r - r_c)), without a margin.
pub fn pair_loss(kind: PairLoss, chosen: f64, rejected: f64, margin: f64) -> (Pair, [f64; 2]) {
    let margin = if kind == PairLoss::Logexp { 0.0 } else { margin };
    let x = chosen - rejected - margin;
    let slope = -sigmoid(-x);
    (Pair { loss: softplus(-x), chosen_reward: chosen, rejected_reward: rejected }, [slope, -slope])
}

/// The log-probabilities of a pair's response tokens, and the sums of the reference model, which only some losses use.
#[derive(Clone, Copy, Debug)]
pub struct PairLogprobs<'a> {
    pub chosen: &'a [f32],
    pub rejected: &'a [f32],
    pub reference: [f64; 2],
}

/// The loss of a policy for one pair, and its derivatives by every token's log-probability of the chosen and of the
/// rejected response. Within a response all derivatives are equal.
///
/// With s the sum and m the mean of a response's log-probabilities, and h = (s_c - s_r) - (ref_c - ref_r):
/// - `Sigmoid` (DPO, arXiv:2305.18290): -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), e = `label_smoothing`
///   (cDPO).
/// - `Ipo` (arXiv:2310.12036): (h - 1 / (2 beta))^2.
/// - `Simpo` (arXiv:2405.14734): -log sigmoid(beta (m_c - m_r) - `simpo_margin`).
/// - `Orpo` (arXiv:2403.07691): -m_c - `orpo_coef` log sigmoid(o_c - o_r), o = m - log(1 - exp(m)).
///
/// Each plus `nll_coef` (-m_c). Rewards are beta (s - ref), or beta m without a reference.
///
/// # Panics
/// If a response has no token.
pub fn preference_loss(config: &DpoConfig, pair: PairLogprobs) -> (Pair, [f64; 2]) {
    let PairLogprobs { chosen, rejected, reference } = pair;
    assert!(!chosen.is_empty() && !rejected.is_empty(), "a response without a token");
    let sum = |x: &[f32]| x.iter().map(|x| f64::from(*x)).sum::<f64>();
    let (sums, tokens) = ([sum(chosen), sum(rejected)], [chosen.len() as f64, rejected.len() as f64]);
    let means = [sums[0] / tokens[0], sums[1] / tokens[1]];
    let beta = config.beta;
    let h = (sums[0] - sums[1]) - (reference[0] - reference[1]);
    // The loss, and its derivatives by both sums.
    let (loss, mut by_sum) = match config.loss {
        PreferenceLoss::Sigmoid => {
            let (e, x) = (config.label_smoothing, beta * h);
            let slope = beta * (e * sigmoid(x) - (1.0 - e) * sigmoid(-x));
            ((1.0 - e) * softplus(-x) + e * softplus(x), [slope, -slope])
        }
        PreferenceLoss::Ipo => {
            let x = h - 1.0 / (2.0 * beta);
            (x * x, [2.0 * x, -2.0 * x])
        }
        PreferenceLoss::Simpo => {
            let x = beta * (means[0] - means[1]) - config.simpo_margin;
            let slope = -beta * sigmoid(-x);
            (softplus(-x), [slope / tokens[0], -slope / tokens[1]])
        }
        PreferenceLoss::Orpo => {
            // A response with probability 1 has infinite odds.
            let rest = means.map(|m| -(m.min(-1e-12).exp_m1()));
            let x = (means[0] - rest[0].ln()) - (means[1] - rest[1].ln());
            let slope = -config.orpo_coef * sigmoid(-x);
            let by_mean = [slope / rest[0] - 1.0, -slope / rest[1]];
            (config.orpo_coef * softplus(-x) - means[0], [by_mean[0] / tokens[0], by_mean[1] / tokens[1]])
        }
    };
    by_sum[0] -= config.nll_coef / tokens[0];
    let rewards = if config.has_reference() {
        [beta * (sums[0] - reference[0]), beta * (sums[1] - reference[1])]
    } else {
        means.map(|mean| beta * mean)
    };
    let loss = loss - config.nll_coef * means[0];
    (Pair { loss, chosen_reward: rewards[0], rejected_reward: rewards[1] }, by_sum)
}
