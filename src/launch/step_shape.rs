//! The shape of a job's step, the only part of its method that start-up and the plan know.

use crate::config::Config;
use crate::data::RowKind;

/// The number of rows to read in advance, unless a step has more.
const AHEAD: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// The kind of the rows; a rollout turns prompts into samples.
    pub kind: RowKind,
    /// The rows of a step over all ranks, and the samples of each.
    pub rows: usize,
    pub samples_per_row: usize,
    /// Samples of an optimizer step over all ranks, and how often a step trains on its samples.
    pub minibatch: usize,
    pub epochs: usize,
    /// The most tokens of a micro-batch, on each rank of a sequence group.
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
        self.kind == RowKind::Prompt
    }

    /// The number of rows to read before the job runs: the rows of whole steps, but not more steps than the job has.
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
