//! How long this rank computed in a step, and how long it stood still for others.

use crate::comm::{self, Group};
use crate::metrics::keys;
use std::time::Instant;

/// Of one step.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Exposed seconds of the process when the step began.
    exposed_before: f64,
    /// Seconds of training in which this rank worked.
    computed: f64,
}

impl Clock {
    pub fn start() -> Self {
        Self { exposed_before: comm::exposed_seconds(), computed: 0.0 }
    }

    /// Runs training work and counts what of its time this rank worked.
    pub fn train<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let (start, exposed) = (Instant::now(), comm::exposed_seconds());
        let result = work();
        self.computed += start.elapsed().as_secs_f64() - (comm::exposed_seconds() - exposed);
        result
    }

    /// What the step says of its ranks: the longest wait, and how much more the slowest worked than the mean. All ranks
    /// of the group call this.
    pub fn values(&self, group: &Group) -> Vec<(&'static str, f64)> {
        let exposed = comm::exposed_seconds() - self.exposed_before;
        let all = group.all_gather_f64(&[exposed, self.computed]);
        let max = |i: usize| all.iter().map(|rank| rank[i]).fold(0.0, f64::max);
        let mean = all.iter().map(|rank| rank[1]).sum::<f64>() / all.len() as f64;
        let mut values = vec![(keys::TIME_COMM_EXPOSED_S, max(0))];
        if mean > 0.0 {
            values.push((keys::TIME_TRAIN_SLOWEST_RATIO, max(1) / mean));
        }
        values
    }
}
