//! The actor's loss: policy term, KL term and entropy bonus.
//!
//! l = log-probability under the current policy, o = at sampling, A = advantage, r = exp(clamp(l - o, -20, 20)), w =
//! weight.

use std::ops::AddAssign;

use crate::config::method::ppo::{KlIn, PolicyLossKind, PpoConfig};

/// A range of tokens. All slices have the same length. Some may be empty, as noted.
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyTokens<'a> {
    pub logprobs: &'a [f32],
    /// Log-probabilities at sampling.
    pub old_logprobs: &'a [f32],
    pub advantages: &'a [f32],
    /// Log-probabilities under the reference; empty if there is none.
    pub ref_logprobs: &'a [f32],
    /// Entropy in nats of the distribution that each token was sampled from, under the current policy; empty if it is
    /// not measured.
    pub entropy: &'a [f32],
    /// The factors of `correction::factors`; empty for 1 everywhere.
    pub factors: &'a [f32],
    /// The weights of `aggregation::weights`; 0 for tokens that are not learned from.
    pub weights: &'a [f32],
}

/// Sums of the policy loss over a range of tokens, so that ranges, micro-batches and ranks add up. Divide by `tokens`
/// for means: clip_ratio = clipped / tokens, policy_kl, entropy and kl likewise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicySums {
    /// Weighted: policy term + KL term - entropy bonus, these tokens' part of the minibatch's loss.
    pub loss: f64,
    /// Weighted: the policy term alone.
    pub policy_loss: f64,
    /// Tokens with a weight.
    pub tokens: u64,
    /// Tokens at which the clipped term is the smaller, or that `masked` and `sequence_trust` leave out.
    pub clipped: u64,
    /// Sum of o - l.
    pub policy_kl: f64,
    /// Sum of the entropy.
    pub entropy: f64,
    /// Sum of the KL estimate against the reference.
    pub kl: f64,
}

impl AddAssign for PolicySums {
    fn add_assign(&mut self, other: Self) {
        self.loss += other.loss;
        self.policy_loss += other.policy_loss;
        self.tokens += other.tokens;
        self.clipped += other.clipped;
        self.policy_kl += other.policy_kl;
        self.entropy += other.entropy;
        self.kl += other.kl;
    }
}

/// Loss = sum_t w_t (p_t + [kl_in = loss] beta kl_t - entropy_coef H_t), with p_t by `config.loss`:
///
/// - `clip`: -f_t min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A), for A < 0 and `dual_clip` = c > 0 the max of
///   that min and c A (arXiv:1707.06347, arXiv:1912.09729)
/// - `cispo`: -f_t stopgrad(min(r, 1 + clip_high)) A l (arXiv:2506.13585)
/// - `sapo`: -f_t g(r) A, g(r) = (4 / tau) sigmoid(tau (r - 1)), whose slope is 1 at r = 1 and falls on both sides, tau
///   by the sign of A (arXiv:2511.20347)
/// - `masked`: -f_t stopgrad(m_t r) A l, m_t = 1 if 1 - clip_low <= r <= 1 + clip_high, else 0 (arXiv:2607.07508)
/// - `sequence_trust`: -f_t stopgrad(m r) A l, m = 1 if the mean of d_t over the tokens with a weight is at most
///   `sequence_kl_max`, else 0, with d_t the KL from the Bernoulli distribution of exp(o) to that of exp(l); the range
///   must be exactly one whole sequence (FlashREINFORCE, Hu et al. 2026)
/// - `gspo`: as `clip` with r = exp(mean_t (l - o)) over the tokens with a weight: the range must then be exactly
///   one whole sequence (arXiv:2507.18071)
///
/// With `kl_weighted`, kl_t is the estimate times r (arXiv:2512.02556). f = correction factors. `kl_beta` is the current
/// coefficient (`kl_coef`, or the controller's value). Writes (does not add) the derivatives of the minibatch's loss by l
/// and H to `dlogprobs` and `dentropy`. `dentropy` is as long as `entropy`.
///
/// # Panics
/// If the lengths differ.
pub fn policy_loss(
    config: &PpoConfig,
    kl_beta: f32,
    tokens: &PolicyTokens,
    dlogprobs: &mut [f32],
    dentropy: &mut [f32],
) -> PolicySums {
    tokens.check(dlogprobs.len(), dentropy.len());
    let mut sums = PolicySums::default();
    match config.loss {
        PolicyLossKind::Clip | PolicyLossKind::Cispo | PolicyLossKind::Sapo | PolicyLossKind::Masked => {
            token_terms(config, tokens, true, dlogprobs, &mut sums);
        }
        PolicyLossKind::SequenceTrust => {
            let is_trusted = config.sequence_kl_max <= 0.0 || sequence_kl(tokens) <= f64::from(config.sequence_kl_max);
            token_terms(config, tokens, is_trusted, dlogprobs, &mut sums);
        }
        PolicyLossKind::Gspo => gspo_terms(config, tokens, dlogprobs, &mut sums),
    }
    sums.loss = sums.policy_loss;
    let beta = if config.kl_in == KlIn::Loss { f64::from(kl_beta) } else { 0.0 };
    kl_terms(config, beta, tokens, dlogprobs, &mut sums);
    entropy_terms(config, tokens, dentropy, &mut sums);
    sums
}

impl PolicyTokens<'_> {
    fn check(&self, dlogprobs_len: usize, dentropy_len: usize) {
        let n = self.logprobs.len();
        let whole = [self.old_logprobs.len(), self.advantages.len(), self.weights.len(), dlogprobs_len];
        assert!(whole.iter().all(|&len| len == n), "per-token slices of {n} tokens have lengths {whole:?}");
        let optional = [self.ref_logprobs.len(), self.entropy.len(), self.factors.len()];
        assert!(optional.iter().all(|&len| len == n || len == 0), "optional slices of {n} tokens: {optional:?}");
        assert_eq!(dentropy_len, self.entropy.len(), "dentropy is as long as entropy");
    }

    /// Tokens that are learned from. Other tokens may hold any value, infinities included.
    fn learned(&self) -> impl Iterator<Item = usize> {
        (0..self.weights.len()).filter(|&t| self.weights[t] != 0.0)
    }

    fn log_ratio(&self, t: usize) -> f64 {
        f64::from(self.logprobs[t]) - f64::from(self.old_logprobs[t])
    }

    fn factor(&self, t: usize) -> f64 {
        self.factors.get(t).map_or(1.0, |&f| f64::from(f))
    }
}

/// The ratio and its derivative by l - o, which is 0 if the clamp is active.
fn ratio(log_ratio: f64) -> (f64, f64) {
    let r = log_ratio.clamp(-20.0, 20.0).exp();
    (r, if log_ratio.abs() > 20.0 { 0.0 } else { r })
}

/// The surrogate of one token: its value, its derivative by the ratio, and whether the clipped term is the smaller.
fn surrogate(config: &PpoConfig, r: f64, advantage: f64) -> (f64, f64, bool) {
    let (low, high) = (1.0 - f64::from(config.clip_low), 1.0 + f64::from(config.clip_high));
    let (plain, clipped) = (r * advantage, r.clamp(low, high) * advantage);
    let (mut value, mut slope) = if clipped < plain { (clipped, 0.0) } else { (plain, advantage) };
    let bound = f64::from(config.dual_clip) * advantage;
    if config.dual_clip > 0.0 && advantage < 0.0 && bound > value {
        (value, slope) = (bound, 0.0);
    }
    (value, slope, clipped < plain)
}

/// SAPO's gate times the advantage, and its derivative by the ratio: 4 s (1 - s) A, s = sigmoid(tau (r - 1)).
fn gate(config: &PpoConfig, r: f64, advantage: f64) -> (f64, f64) {
    let tau = f64::from(if advantage > 0.0 { config.sapo_tau_positive } else { config.sapo_tau_negative });
    let s = 1.0 / (1.0 + (-tau * (r - 1.0)).exp());
    (4.0 / tau * s * advantage, 4.0 * s * (1.0 - s) * advantage)
}

/// The mean over the learned tokens of p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)), with p = exp(o) and q = exp(l),
/// both kept 1e-6 away from 0 and 1.
fn sequence_kl(tokens: &PolicyTokens) -> f64 {
    let probability = |logprob: f32| f64::from(logprob).exp().clamp(1e-6, 1.0 - 1e-6);
    let (sum, count) = tokens.learned().fold((0.0, 0usize), |(sum, count), t| {
        let (p, q) = (probability(tokens.old_logprobs[t]), probability(tokens.logprobs[t]));
        (sum + p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln(), count + 1)
    });
    sum / count.max(1) as f64
}

/// The terms of all losses but `gspo`: each token has its own ratio. `is_trusted`: whether `sequence_trust` keeps the
/// sequence.
fn token_terms(
    config: &PpoConfig,
    tokens: &PolicyTokens,
    is_trusted: bool,
    dlogprobs: &mut [f32],
    sums: &mut PolicySums,
) {
    dlogprobs.fill(0.0);
    let (low, high) = (1.0 - f64::from(config.clip_low), 1.0 + f64::from(config.clip_high));
    for t in tokens.learned() {
        let log_ratio = tokens.log_ratio(t);
        let (r, dr) = ratio(log_ratio);
        let (advantage, weight) = (f64::from(tokens.advantages[t]), f64::from(tokens.weights[t]) * tokens.factor(t));
        let (loss, slope, clipped) = match config.loss {
            PolicyLossKind::Cispo => {
                let slope = -weight * r.min(high) * advantage;
                (slope * f64::from(tokens.logprobs[t]), slope, r > high)
            }
            PolicyLossKind::Masked | PolicyLossKind::SequenceTrust => {
                let is_kept = if config.loss == PolicyLossKind::Masked { r >= low && r <= high } else { is_trusted };
                let slope = if is_kept { -weight * r * advantage } else { 0.0 };
                (slope * f64::from(tokens.logprobs[t]), slope, !is_kept)
            }
            PolicyLossKind::Sapo => {
                let (value, slope) = gate(config, r, advantage);
                (-(weight * value), -weight * slope * dr, false)
            }
            _ => {
                let (value, slope, clipped) = surrogate(config, r, advantage);
                (-(weight * value), -weight * slope * dr, clipped)
            }
        };
        sums.tokens += 1;
        sums.clipped += u64::from(clipped);
        sums.policy_kl -= log_ratio;
        sums.policy_loss += loss;
        dlogprobs[t] = slope as f32;
    }
}

/// The terms of `gspo`. dr/dl_t = r / n for each of the n learned tokens, so each of them gets the sum of all
/// surrogates' slopes.
fn gspo_terms(config: &PpoConfig, tokens: &PolicyTokens, dlogprobs: &mut [f32], sums: &mut PolicySums) {
    dlogprobs.fill(0.0);
    let n = tokens.learned().count();
    if n == 0 {
        return;
    }
    let log_ratio_sum: f64 = tokens.learned().map(|t| tokens.log_ratio(t)).sum();
    let (r, dr) = ratio(log_ratio_sum / n as f64);
    let mut slopes = 0.0;
    for t in tokens.learned() {
        let (value, slope, clipped) = surrogate(config, r, f64::from(tokens.advantages[t]));
        let weight = f64::from(tokens.weights[t]) * tokens.factor(t);
        sums.clipped += u64::from(clipped);
        sums.policy_loss -= weight * value;
        slopes -= weight * slope;
    }
    sums.tokens += n as u64;
    sums.policy_kl -= log_ratio_sum;
    for t in tokens.learned() {
        dlogprobs[t] = (slopes * dr / n as f64) as f32;
    }
}

/// The KL estimate of a token times its ratio, and the derivative by l.
fn weighted(log_ratio: f64, kl: f64, slope: f64) -> (f64, f64) {
    let (r, dr) = ratio(log_ratio);
    (r * kl, r * slope + dr * kl)
}

fn kl_terms(config: &PpoConfig, beta: f64, tokens: &PolicyTokens, dlogprobs: &mut [f32], sums: &mut PolicySums) {
    if tokens.ref_logprobs.is_empty() {
        return;
    }
    for t in tokens.learned() {
        let d = f64::from(tokens.logprobs[t]) - f64::from(tokens.ref_logprobs[t]);
        let (kl, slope) = config.kl_estimator.estimate(d);
        sums.kl += kl;
        if beta != 0.0 {
            let weight = beta * f64::from(tokens.weights[t]);
            let (kl, slope) = if config.kl_weighted { weighted(tokens.log_ratio(t), kl, slope) } else { (kl, slope) };
            sums.loss += weight * kl;
            dlogprobs[t] += (weight * slope) as f32;
        }
    }
}

fn entropy_terms(config: &PpoConfig, tokens: &PolicyTokens, dentropy: &mut [f32], sums: &mut PolicySums) {
    if tokens.entropy.is_empty() {
        return;
    }
    dentropy.fill(0.0);
    for t in tokens.learned() {
        let weight = f64::from(config.entropy_coef) * f64::from(tokens.weights[t]);
        sums.entropy += f64::from(tokens.entropy[t]);
        sums.loss -= weight * f64::from(tokens.entropy[t]);
        dentropy[t] = -weight as f32;
    }
}
