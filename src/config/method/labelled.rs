//! Keys of the methods that learn from labeled responses: whole ones (KTO), or each step of one (process rewards).

use super::interface::{MethodConfig, RowKind, Shared, Uses};
use crate::config::limits::{FINITE, SAMPLES, TOKENS};
use crate::config::metric::{Key, Unit};
use crate::error::{Error, Result};

table! {
    /// `[kto]`
    pub struct KtoConfig {
        pub beta: f64 = 0.1 => 1e-9..=FINITE,
        pub desirable_weight: f64 = 1.0 => 0.0..=FINITE,
        pub undesirable_weight: f64 = 1.0 => 0.0..=FINITE,
        pub epochs: f64 = 1.0 => 0.0..=1e6,
        // The KL is computed on prompts with the responses of other rows.
        pub minibatch_samples: usize = 64 => 2.0..=SAMPLES,
        #[serde(with = "crate::config::auto")]
        #[schemars(with = "crate::config::mesh::Auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
    }
}

pub const DESIRABLE_REWARD_MEAN: &str = "desirable_reward_mean";
pub const UNDESIRABLE_REWARD_MEAN: &str = "undesirable_reward_mean";

impl MethodConfig for KtoConfig {
    fn title(&self) -> String {
        "KTO".into()
    }

    fn epochs(&self) -> Option<f64> {
        Some(self.epochs)
    }

    fn uses(&self, _shared: &Shared) -> Uses {
        Uses { reference: true, ..Uses::rows(RowKind::Labelled) }
    }

    fn metrics() -> &'static [Key] {
        const OF_KTO: Key = Key { name: "", section: "reward", unit: Unit::One, meaning: "" };
        &[
            Key { name: DESIRABLE_REWARD_MEAN, meaning: "Mean reward of the desirable responses (kto).", ..OF_KTO },
            Key { name: UNDESIRABLE_REWARD_MEAN, meaning: "Mean reward of the undesirable responses (kto).", ..OF_KTO },
        ]
    }
}

table! {
    /// `[step_reward]`
    pub struct StepRewardConfig {
        pub placeholder: String = "<step>".to_owned(),
        pub reward_tokens: Vec<String> = vec!["+".to_owned(), "-".to_owned()],
        pub epochs: f64 = 1.0 => 0.0..=1e6,
        pub minibatch_samples: usize = 64 => 1.0..=SAMPLES,
        #[serde(with = "crate::config::auto")]
        #[schemars(with = "crate::config::mesh::Auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
    }
}

impl MethodConfig for StepRewardConfig {
    fn title(&self) -> String {
        "process reward model".into()
    }

    fn epochs(&self) -> Option<f64> {
        Some(self.epochs)
    }

    fn uses(&self, _shared: &Shared) -> Uses {
        Uses::rows(RowKind::Steps)
    }

    /// Rejects fewer than two different reward tokens.
    fn check(&self, _shared: &Shared) -> Result<()> {
        let tokens = &self.reward_tokens;
        Error::need(
            tokens.len() >= 2,
            format!("step_reward.reward_tokens must have at least 2 tokens (got {tokens:?})"),
        )?;
        let again = tokens.iter().enumerate().find(|(i, token)| tokens[..*i].contains(token));
        match again {
            Some((_, token)) => Err(Error::usage(format!("step_reward.reward_tokens has {token:?} twice"))),
            None => Ok(()),
        }
    }
}
