//! `[checkpoint]`: when a run saves and what it keeps.

use super::limits::COUNT;
use super::method::eval::EvalConfig;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The behavior of a resume if models or data differ from the ones that the run was saved with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChangedInputs {
    #[default]
    Refuse,
    Accept,
}

/// The rule for the better one of two evaluations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BestMode {
    /// Lower is better for a loss or a KL, higher for anything else.
    #[default]
    ByMetric,
    Max,
    Min,
}

/// A part of another run's checkpoint that a run can start with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The weights of the models that learn.
    Weights,
    /// AdamW's moments, the averages, and the counts of optimizer steps.
    Optimizer,
    /// The position in the rows, and the ledger.
    Data,
    /// The numbers that the method keeps from step to step.
    State,
}

table! {
    pub struct CheckpointConfig {
        pub every_steps: u64 = 50 => 0.0..=COUNT,
        pub keep_last: usize = 3 => 0.0..=COUNT,
        pub best_metric: String = String::new(),
        pub best_mode: BestMode = BestMode::ByMetric,
        pub export_best: bool = false,
        pub max_hours: f64 = 0.0 => 0.0..=87_600.0,
        pub changed_inputs: ChangedInputs = ChangedInputs::Refuse,
        pub from: PathBuf = PathBuf::new(),
        pub restore: Vec<Part> = vec![Part::Weights],
    }
}

impl CheckpointConfig {
    /// Rejects keys that need the best evaluation if there are no evaluations.
    pub fn check(&self, eval: &EvalConfig) -> Result<()> {
        let asks = [(self.export_best, "checkpoint.export_best = true"), (eval.patience > 0, "eval.patience above 0")];
        if let Some((_, what)) = asks.iter().find(|(asks, _)| *asks && self.best_metric.is_empty()) {
            return Err(Error::usage(format!("{what} needs checkpoint.best_metric"))
                .hint("set it to a metric of the evaluation, e.g. checkpoint.best_metric = \"eval_loss\""));
        }
        if self.restores(Part::Optimizer) && !self.restores(Part::Weights) {
            return Err(Error::usage(
                "checkpoint.restore must have \"weights\" with \"optimizer\", whose state belongs to them",
            )
            .hint("set checkpoint.restore = [\"weights\", \"optimizer\"]"));
        }
        if !self.best_metric.is_empty() && eval.every_steps == 0 {
            let message = format!("checkpoint.best_metric = \"{}\" needs eval.every_steps above 0", self.best_metric);
            return Err(Error::usage(message).hint("set eval.every_steps and data.eval_split"));
        }
        Ok(())
    }

    pub fn restores(&self, part: Part) -> bool {
        self.restore.contains(&part)
    }

    /// Whether a checkpoint is due after `step` (from 1) of `steps`.
    pub fn due(&self, step: u64, steps: u64) -> bool {
        step == steps || (self.every_steps > 0 && step.is_multiple_of(self.every_steps))
    }
}
