//! KL against the reference, and the controller of its coefficient.

use serde::{Deserialize, Serialize};

use crate::config::method::ppo::{KlEstimator, PpoConfig};
use crate::experience::Experience;

/// Fills `sample.kl` from `response.logprobs` and `ref_logprobs`. It is 0 without a reference, or if mask is 0.
pub fn fill(estimator: KlEstimator, sample: &mut Experience) {
    sample.kl.clear();
    if sample.ref_logprobs.is_empty() {
        sample.kl.resize(sample.mask.len(), 0.0);
        return;
    }
    let pairs = sample.response.logprobs.iter().zip(&sample.ref_logprobs);
    let estimate = |l: f32, l_ref: f32| estimator.estimate(f64::from(l) - f64::from(l_ref)).0 as f32;
    sample.kl.extend(pairs.zip(&sample.mask).map(|((&l, &l_ref), &m)| if m == 0 { 0.0 } else { estimate(l, l_ref) }));
}

/// Coefficient of the KL penalty: fixed, or adjusted so that the KL approaches a target (arXiv:1909.08593, section
/// 2.2). Part of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KlController {
    /// The current coefficient.
    pub beta: f32,
    /// The same, with the precision that repeated small steps need.
    beta_exact: f64,
    target: f64,
    horizon: f64,
}

impl KlController {
    pub fn new(config: &PpoConfig) -> Self {
        Self {
            beta: config.kl_coef,
            beta_exact: f64::from(config.kl_coef),
            target: f64::from(config.kl_target),
            horizon: f64::from(config.kl_horizon),
        }
    }

    /// Continues with the coefficient that `saved` has reached, if it is adjusted. A fixed one is that of the
    /// configuration, which may have changed.
    pub fn resume(&mut self, saved: &Self) {
        if self.target > 0.0 {
            (self.beta, self.beta_exact) = (saved.beta, saved.beta_exact);
        }
    }

    /// beta <- beta (1 + clamp(kl / target - 1, -0.2, 0.2) samples / horizon); a target of 0 keeps beta.
    /// `kl` is the mean per token of a step with `samples` samples.
    pub fn update(&mut self, kl: f64, samples: usize) {
        if self.target > 0.0 {
            let error = (kl / self.target - 1.0).clamp(-0.2, 0.2);
            // A step with more than 5 horizons of samples must not turn the penalty into a bonus.
            self.beta_exact *= (1.0 + error * samples as f64 / self.horizon).max(0.0);
            self.beta = self.beta_exact as f32;
        }
    }
}
