//! The time of a step by phase, and tokens per second.

use std::time::{Duration, Instant};

use super::keys;
use crate::sys::trace::{self, Category};
use crate::tensor::arena;

/// The phases of a step, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Reshard,
    Rollout,
    Reward,
    Score,
    OldLogprobs,
    Train,
}

impl Phase {
    pub const ALL: [Self; 6] =
        [Self::Reshard, Self::Rollout, Self::Reward, Self::Score, Self::OldLogprobs, Self::Train];

    /// The keys of metrics, and the names on bars and lines.
    const NAMES: [(&str, &str); 6] = [
        (keys::TIME_RESHARD_S, "reshard"),
        (keys::TIME_ROLLOUT_S, "rollout"),
        (keys::TIME_REWARD_S, "reward"),
        (keys::TIME_SCORE_S, "score"),
        (keys::TIME_OLD_LOGPROBS_S, "logprobs"),
        (keys::TIME_TRAIN_S, "train"),
    ];

    pub fn key(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }
}

/// Seconds by phase of one step. A phase that never ran is not logged.
#[derive(Clone, Debug)]
pub struct Phases {
    start: Instant,
    spent: [Option<Duration>; Phase::ALL.len()],
    /// `arena::moving_s` at the start.
    moved_s: f64,
}

impl Phases {
    /// Starts the timer of a step.
    pub fn start() -> Self {
        Self { start: Instant::now(), spent: [None; Phase::ALL.len()], moved_s: arena::moving_s() }
    }

    pub fn time<T>(&mut self, phase: Phase, work: impl FnOnce() -> T) -> T {
        let _span = trace::span(Category::Phase, phase.name(), "", || []);
        let start = Instant::now();
        let result = work();
        self.add(phase, start.elapsed());
        result
    }

    pub fn add(&mut self, phase: Phase, spent: Duration) {
        *self.spent[phase as usize].get_or_insert_default() += spent;
    }

    pub fn spent(&self, phase: Phase) -> Duration {
        self.spent[phase as usize].unwrap_or_default()
    }

    /// The keys of a finished step: the phases that ran, `time_step_s`, and `tokens_per_s` for `tokens`, the prompt and
    /// response tokens of all ranks.
    pub fn values(&self, tokens: u64) -> Vec<(&'static str, f64)> {
        let step = self.start.elapsed();
        let ran = Phase::ALL.into_iter().filter_map(|p| Some((p.key(), self.spent[p as usize]?.as_secs_f64())));
        let mut values: Vec<_> = ran.collect();
        let moved = arena::moving_s() - self.moved_s;
        values.extend((moved > 0.0).then_some((keys::TIME_OFFLOAD_S, moved)));
        values.push((keys::TIME_STEP_S, step.as_secs_f64()));
        let rate = if step.is_zero() { 0.0 } else { tokens as f64 / step.as_secs_f64() };
        values.push((keys::TOKENS_PER_S, rate));
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_add_up_and_absent_ones_are_not_logged() {
        let mut phases = Phases::start();
        phases.add(Phase::Rollout, Duration::from_millis(1500));
        phases.add(Phase::Train, Duration::from_millis(250));
        phases.add(Phase::Train, Duration::from_millis(250));
        let values = phases.values(1000);
        assert_eq!(values[..2], [("time_rollout_s", 1.5), ("time_train_s", 0.5)]);
        assert_eq!(values[2].0, "time_step_s");
    }
}
