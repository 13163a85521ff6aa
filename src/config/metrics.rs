//! `[metrics]`: the records and the terminal output of a run.

use super::limits::COUNT;

table! {
    /// The records of a run in addition to `metrics.jsonl` (which is always written), and how often it shows samples.
    pub struct MetricsConfig {
        pub print_every: u64 = 1 => 0.0..=COUNT,
        pub rollouts_every_steps: u64 = 1 => 0.0..=COUNT,
        pub rollouts_keep_last: usize = 100 => 0.0..=COUNT,
        pub eval_rows_max: usize = 32 => 0.0..=COUNT,
        pub samples_every_steps: u64 = 10 => 0.0..=COUNT,
        pub samples_count: usize = 2 => 0.0..=COUNT,
        pub tensorboard: bool = true,
        pub trace_steps: Vec<u64> = Vec::new(),
        pub report: bool = true,
    }
}

impl MetricsConfig {
    /// Whether the experience of `step` (from 1) is recorded. Every rank gets the same answer, so that all of them
    /// join in gathering it.
    pub fn rollouts_due(&self, step: u64) -> bool {
        self.rollouts_every_steps > 0 && step.is_multiple_of(self.rollouts_every_steps)
    }

    /// Whether the line of `step` (from 1) of `steps` is shown: the first, the last, and every `print_every`-th.
    pub fn print_due(&self, step: u64, steps: u64) -> bool {
        self.print_every > 0 && (step == 1 || step == steps || step.is_multiple_of(self.print_every))
    }

    /// The steps of `trace_steps` that a run of `steps` steps does not have.
    pub fn untraced(&self, steps: u64) -> Vec<u64> {
        self.trace_steps.iter().copied().filter(|step| !(1..=steps).contains(step)).collect()
    }

    /// Whether samples of `step` (from 1) are shown: the first step and then every `samples_every_steps`.
    pub fn samples_due(&self, step: u64) -> bool {
        self.samples_every_steps > 0
            && self.samples_count > 0
            && (step == 1 || step.is_multiple_of(self.samples_every_steps))
    }
}
