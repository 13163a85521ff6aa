//! `[sft]`: supervised fine-tuning.

use super::interface::{MethodConfig, RowKind, Shared, Uses};
use crate::config::limits::{FINITE, SAMPLES, TOKENS};
use serde::{Deserialize, Serialize};

/// The tokens that a supervised loss counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// Every response (assistant) token.
    #[default]
    Response,
    /// The last response of a row of several.
    LastResponse,
    /// All tokens: continued pretraining.
    All,
}

table! {
    pub struct SftConfig {
        pub epochs: f64 = 1.0 => 0.0..=1e6,
        pub minibatch_samples: usize = 64 => 1.0..=SAMPLES,
        #[serde(with = "crate::config::auto")]
        #[schemars(with = "crate::config::mesh::Auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
        pub loss_on: LossOn = LossOn::Response,
        pub pretrain_coef: f32 = 0.0 => 0.0..=FINITE,
    }
}

impl MethodConfig for SftConfig {
    fn title(&self) -> String {
        "SFT".into()
    }

    fn epochs(&self) -> Option<f64> {
        Some(self.epochs)
    }

    fn uses(&self, _shared: &Shared) -> Uses {
        Uses {
            token_loss: true,
            pretrain: Some(("sft.pretrain_coef", self.pretrain_coef)),
            ..Uses::rows(RowKind::Demonstration)
        }
    }
}
