//! `[optim.actor]`, `[optim.critic]` and `gradient.order`: from gradients to updates.

use super::limits::FINITE;
use crate::error::{Error, Result};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// The schedule of the learning rate after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Stays at the peak.
    Constant,
    /// Falls in a straight line to the floor.
    Linear,
    /// Falls along half a cosine to the floor. arXiv:1608.03983
    #[default]
    Cosine,
}

/// The order in which gradients are summed over samples and ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GradientOrder {
    /// The fastest order: bit-identical only on the same number of ranks.
    #[default]
    Fast,
    /// A binary tree over global samples: bit-identical on 1, 2, 4, 8 ... ranks.
    Fixed,
}

table! {
    /// AdamW and its schedule for one model.
    pub struct OptimConfig {
        pub lr: f64 = 1e-6 => 0.0..=1000.0,
        pub betas: [f64; 2] = [0.9, 0.95],
        pub eps: f64 = 1e-8 => f64::MIN_POSITIVE..=FINITE,
        pub weight_decay: f64 = 0.0 => 0.0..=FINITE,
        pub decay_vectors: bool = false,
        pub clip_norm: f64 = 1.0 => 0.0..=FINITE,
        pub schedule: Schedule = Schedule::Cosine,
        pub warmup_ratio: f64 = 0.03 => 0.0..=1.0,
        pub floor_ratio: f64 = 0.1 => 0.0..=1.0,
        pub ema_beta: f64 = 0.0 => 0.0..=1.0,
    }
}

impl OptimConfig {
    pub fn with_lr(lr: f64) -> Self {
        Self { lr, ..Self::default() }
    }

    fn critic() -> Self {
        Self::with_lr(9e-6)
    }

    /// Rejects values that AdamW cannot use; `table` is the name of the table, e.g. `optim.actor`.
    pub fn check(&self, table: &str) -> Result<()> {
        let betas = &self.betas;
        Error::need(
            betas.iter().all(|b| (0.0..1.0).contains(b)),
            format!("{table}.betas must be two numbers of at least 0 and below 1 (got {betas:?})"),
        )?;
        Error::need(self.ema_beta < 1.0, format!("{table}.ema_beta must be at least 0 and below 1 (got 1)"))
    }
}

table! {
    /// `[optim]`: one table for each trained role. Jobs with one model use `actor`.
    pub struct OptimRoles {
        pub actor: OptimConfig = OptimConfig::default(),
        #[serde(deserialize_with = "critic")]
        pub critic: OptimConfig = OptimConfig::critic(),
    }
}

/// An `OptimConfig` whose missing keys have the defaults of the critic.
fn critic<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<OptimConfig, D::Error> {
    let mut table = toml::Table::deserialize(from)?;
    table.entry("lr").or_insert_with(|| OptimConfig::critic().lr.into());
    OptimConfig::deserialize(table).map_err(|e| D::Error::custom(e.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_key_gets_the_default_of_its_role() {
        let roles: OptimRoles = toml::from_str("[critic]\nweight_decay = 0.1").expect("parses");
        assert_eq!(roles.actor, OptimConfig::default());
        assert_eq!(roles.critic, OptimConfig { weight_decay: 0.1, ..OptimConfig::with_lr(9e-6) });
        let text = toml::to_string(&roles).expect("serialises");
        assert_eq!(toml::from_str::<OptimRoles>(&text).expect("parses"), roles);
        assert!(toml::from_str::<OptimRoles>("[actor]\nlearning_rate = 1e-3").is_err());
    }
}
