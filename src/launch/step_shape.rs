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
    /// Samples of an optimizer step over all ranks, and how often a step trains the first model on its samples.
    pub minibatch: usize,
    pub epochs: usize,
    /// How often a step trains the critic on its samples. 0 without a critic.
    pub critic_epochs: usize,
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

    /// Passes over the samples of a step, in which the first model, the critic or both train.
    pub fn passes(&self) -> usize {
        self.epochs.max(self.critic_epochs)
    }

    /// Passes of all models together.
    pub fn trained_passes(&self) -> usize {
        if self.trained == 0 { 0 } else { self.epochs + self.critic_epochs }
    }

    /// Minibatches of a step, each an optimizer step of at least one model.
    pub fn updates(&self) -> usize {
        self.updates_in(self.passes())
    }

    /// Optimizer steps of a model that trains in `epochs` passes.
    pub fn updates_in(&self, epochs: usize) -> usize {
        epochs * self.samples().div_ceil(self.minibatch.max(1))
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
