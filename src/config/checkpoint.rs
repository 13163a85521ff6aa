//! `[checkpoint]`: when a run saves and what it keeps.

use super::limits::COUNT;
use serde::{Deserialize, Serialize};

/// What a resume does where models or data are others than those that the run was saved with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangedInputs {
    #[default]
    Refuse,
    Accept,
}

table! {
    pub struct CheckpointConfig {
        pub every_steps: u64 = 50 => 0.0..=COUNT,
        pub keep_last: usize = 3 => 0.0..=COUNT,
        pub max_hours: f64 = 0.0 => 0.0..=87_600.0,
        pub changed_inputs: ChangedInputs = ChangedInputs::Refuse,
    }
}

impl CheckpointConfig {
    /// Whether a checkpoint is due after `step` (from 1) of `steps`.
    pub fn due(&self, step: u64, steps: u64) -> bool {
        step == steps || (self.every_steps > 0 && step.is_multiple_of(self.every_steps))
    }
}
