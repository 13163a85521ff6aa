//! `[checkpoint]`: when a run saves and what it keeps.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Every how many steps a checkpoint is written, in steps; 0: at the end only.
    pub every_steps: u64,
    /// How many committed checkpoints stay; older ones are removed after a newer one is committed. 0: all stay.
    pub keep_last: usize,
    /// Hours after which the run saves and stops by itself (exit 85), in hours; 0: no limit.
    pub max_hours: f64,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: 50, keep_last: 3, max_hours: 0.0 }
    }
}

impl CheckpointConfig {
    /// # Errors
    /// `Usage` for a negative or infinite limit.
    pub fn check(&self) -> Result<()> {
        if self.max_hours >= 0.0 && self.max_hours.is_finite() {
            return Ok(());
        }
        Err(Error::usage(format!("checkpoint.max_hours = {} is no number of hours", self.max_hours))
            .hint("0 means no limit"))
    }

    /// Whether a checkpoint is due after `step` (from 1) of `steps`.
    pub fn due(&self, step: u64, steps: u64) -> bool {
        step == steps || (self.every_steps > 0 && step.is_multiple_of(self.every_steps))
    }
}
