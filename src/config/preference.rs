//! Keys of the methods that learn from pairs of a chosen and a rejected response.

use super::limits::{FINITE, SAMPLES, TOKENS};
use serde::{Deserialize, Serialize};

/// The loss of a reward model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PairLoss {
    /// -log sigmoid(r_c - r_r - margin) (Bradley-Terry).
    #[default]
    Sigmoid,
    /// log(1 + exp(r_r - r_c)).
    Logexp,
}

table! {
    /// `[reward_model]`
    pub struct RewardModelConfig {
        pub loss: PairLoss = PairLoss::Sigmoid,
        pub epochs: f64 = 1.0 => 0.0..=1e6,
        pub minibatch_samples: usize = 64 => 1.0..=SAMPLES,
        #[serde(with = "super::auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
    }
}

/// The loss of a policy on pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreferenceLoss {
    /// DPO, with `label_smoothing` cDPO.
    #[default]
    Sigmoid,
    Ipo,
    Simpo,
    Orpo,
}

table! {
    /// `[dpo]`
    pub struct DpoConfig {
        pub loss: PreferenceLoss = PreferenceLoss::Sigmoid,
        pub beta: f64 = 0.1 => 1e-9..=FINITE,
        pub label_smoothing: f64 = 0.0 => 0.0..=0.5,
        pub nll_coef: f64 = 0.0 => 0.0..=FINITE,
        pub simpo_margin: f64 = 0.5 => -FINITE..=FINITE,
        pub orpo_coef: f64 = 0.1 => 0.0..=FINITE,
        pub epochs: f64 = 1.0 => 0.0..=1e6,
        pub minibatch_samples: usize = 64 => 1.0..=SAMPLES,
        #[serde(with = "super::auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
    }
}

impl DpoConfig {
    /// Whether the loss compares with a reference model.
    pub fn has_reference(&self) -> bool {
        matches!(self.loss, PreferenceLoss::Sigmoid | PreferenceLoss::Ipo)
    }
}
