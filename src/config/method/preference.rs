//! Keys of the methods that learn from pairs of a chosen and a rejected response.

use super::interface::{MethodConfig, Need, RowKind, Shared, Uses};
use crate::config::limits::{FINITE, SAMPLES, TOKENS};
use serde::{Deserialize, Serialize};

/// The loss of a reward model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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
        #[serde(with = "crate::config::auto")]
        #[schemars(with = "crate::config::mesh::Auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
    }
}

impl MethodConfig for RewardModelConfig {
    fn title(&self) -> String {
        "reward model".into()
    }

    fn epochs(&self) -> Option<f64> {
        Some(self.epochs)
    }

    fn uses(&self, _shared: &Shared) -> Uses {
        Uses::rows(RowKind::Pair)
    }

    fn needs() -> &'static [Need<Self>] {
        &[("data.margin_key", "job.kind = \"reward_model\" and reward_model.loss = \"sigmoid\"", |reward_model, _| {
            reward_model.loss == PairLoss::Sigmoid
        })]
    }
}

/// The loss of a policy on pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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
        #[serde(with = "crate::config::auto")]
        #[schemars(with = "crate::config::mesh::Auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
    }
}

impl DpoConfig {
    /// Whether the loss compares with a reference model.
    pub fn has_reference(&self) -> bool {
        matches!(self.loss, PreferenceLoss::Sigmoid | PreferenceLoss::Ipo)
    }
}

impl MethodConfig for DpoConfig {
    fn title(&self) -> String {
        match self.loss {
            PreferenceLoss::Sigmoid if self.label_smoothing > 0.0 => "cDPO",
            PreferenceLoss::Sigmoid => "DPO",
            PreferenceLoss::Ipo => "IPO",
            PreferenceLoss::Simpo => "SimPO",
            PreferenceLoss::Orpo => "ORPO",
        }
        .into()
    }

    fn epochs(&self) -> Option<f64> {
        Some(self.epochs)
    }

    fn uses(&self, _shared: &Shared) -> Uses {
        Uses { reference: self.has_reference(), ..Uses::rows(RowKind::Pair) }
    }

    fn needs() -> &'static [Need<Self>] {
        &[
            ("dpo.beta", "a dpo.loss other than \"orpo\", whose weight is dpo.orpo_coef", |dpo, _| {
                dpo.loss != PreferenceLoss::Orpo
            }),
            ("dpo.label_smoothing", "dpo.loss = \"sigmoid\"", |dpo, _| dpo.loss == PreferenceLoss::Sigmoid),
            ("dpo.simpo_margin", "dpo.loss = \"simpo\"", |dpo, _| dpo.loss == PreferenceLoss::Simpo),
            ("dpo.orpo_coef", "dpo.loss = \"orpo\"", |dpo, _| dpo.loss == PreferenceLoss::Orpo),
        ]
    }
}
