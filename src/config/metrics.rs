//! `[metrics]`: what a run records and shows.

table! {
    /// What a run records besides `metrics.jsonl` (which is always written) and how often it shows samples.
    pub struct MetricsConfig {
        /// Every how many steps the experience goes to `rollouts/step-N.h5`, in steps; 0: never.
        pub rollouts_every_steps: u64 = 1,
        /// Recorded steps that are kept: files of older ones, and their links in `rollouts.h5`, go when a newer one is there; 0: all.
        pub rollouts_keep_last: usize = 0,
        /// Every how many steps samples of the rollout are shown, in steps; 0: never. The first step is always shown.
        pub samples_every_steps: u64 = 10,
        /// How many samples are shown then.
        pub samples_count: usize = 2,
        /// Writes `events.out.tfevents.*` for TensorBoard.
        pub tensorboard: bool = true,
    }
}

impl MetricsConfig {
    /// Whether the experience of `step` (from 1) is recorded. Every rank gets the same answer, so that all of them
    /// join in gathering it.
    pub fn rollouts_due(&self, step: u64) -> bool {
        self.rollouts_every_steps > 0 && step.is_multiple_of(self.rollouts_every_steps)
    }

    /// Whether samples of `step` (from 1) are shown: the first step and then every `samples_every_steps`.
    pub fn samples_due(&self, step: u64) -> bool {
        self.samples_every_steps > 0
            && self.samples_count > 0
            && (step == 1 || step.is_multiple_of(self.samples_every_steps))
    }
}
