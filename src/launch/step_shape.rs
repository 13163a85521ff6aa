//! How a step of a job is cut: all that start-up and the plan know of its method.

use crate::config::Config;
use crate::data::Part;

/// Rows that are looked at ahead, where a step has no more.
const AHEAD: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// How much of a row is read: of prompts a rollout makes samples.
    pub part: Part,
    /// Rows that a step draws over all ranks, and the samples of each.
    pub rows: usize,
    pub samples_per_row: usize,
    /// Samples of an optimizer step over all ranks, and how often a step trains on its samples.
    pub minibatch: usize,
    pub epochs: usize,
    /// Tokens of a micro-batch at most, on each rank of a sequence group.
    pub microbatch_tokens_max: usize,
    /// Models that are trained, and forwards that only score a step's samples.
    pub trained: usize,
    pub scored: usize,
}

impl StepShape {
    /// Samples of a step, over all ranks.
    pub fn samples(&self) -> usize {
        self.rows * self.samples_per_row
    }

    /// Optimizer steps of a step.
    pub fn updates(&self) -> usize {
        self.epochs * self.samples().div_ceil(self.minibatch.max(1))
    }

    pub fn has_rollout(&self) -> bool {
        self.part == Part::Prompt
    }

    /// How many rows to look at before the job runs: those of whole steps, of no more than the job does.
    pub fn rows_ahead(&self, config: &Config) -> usize {
        if self.trained == 0 {
            return 0;
        }
        let step = self.rows.max(1);
        let steps = (AHEAD / step).max(1);
        let all = if config.job.steps > 0 { config.job.steps as usize } else { steps };
        steps.min(all) * step
    }
}
