//! Keys of the methods that learn from labeled responses: whole ones (KTO), or each step of one (process rewards).

use super::limits::{FINITE, SAMPLES, TOKENS};
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
        #[serde(with = "super::auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
    }
}

table! {
    /// `[step_reward]`
    pub struct StepRewardConfig {
        pub placeholder: String = "<step>".to_owned(),
        pub reward_tokens: Vec<String> = vec!["+".to_owned(), "-".to_owned()],
        pub epochs: f64 = 1.0 => 0.0..=1e6,
        pub minibatch_samples: usize = 64 => 1.0..=SAMPLES,
        #[serde(with = "super::auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
    }
}

impl StepRewardConfig {
    /// Rejects fewer than two different reward tokens.
    pub fn check(&self) -> Result<()> {
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
