//! The time for which this rank computed in a step, and the time for which it waited for others.

use crate::comm;
use crate::config::mesh::RoleName;
use crate::launch::ranks::Ranks;
use crate::metrics::keys;
use std::time::Instant;

#[derive(Clone, Copy, Debug)]
pub struct Timers {
    start: Instant,
    /// Exposed communication seconds of the process at the start of the step: over all groups, and over the group of
    /// all ranks.
    exposed_before: f64,
    apart_before: f64,
    /// Seconds of training in which this rank computed.
    computed: f64,
}

impl Timers {
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
            exposed_before: comm::exposed_seconds(),
            apart_before: exposed_to_placements(),
            computed: 0.0,
        }
    }

    /// The seconds since the start of the step.
    pub fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Runs training work and counts the seconds in which this rank computed.
    pub fn train<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let (start, exposed) = (Instant::now(), comm::exposed_seconds());
        let result = work();
        self.computed += start.elapsed().as_secs_f64() - (comm::exposed_seconds() - exposed);
        result
    }

    /// Metrics of a step: the longest wait, the slowest rank's time divided by the mean of its placement, and each
    /// placement's share of the step in which it waited for others. All ranks call this.
    pub fn values(&self, ranks: &Ranks) -> Vec<(&'static str, f64)> {
        let exposed = comm::exposed_seconds() - self.exposed_before;
        let idle = (exposed_to_placements() - self.apart_before) / self.start.elapsed().as_secs_f64();
        let all = ranks.all.all_gather_numbers(&[exposed, self.computed, idle]);
        let mut values = vec![(keys::TIME_COMM_EXPOSED_S, all.iter().map(|rank| rank[0]).fold(0.0, f64::max))];
        let mut slowest: f64 = 0.0;
        for placement in &ranks.placements {
            let here = &all[placement.ranks.clone()];
            let mean = |i: usize| here.iter().map(|rank| rank[i]).sum::<f64>() / here.len() as f64;
            if mean(1) > 0.0 {
                slowest = slowest.max(here.iter().map(|rank| rank[1]).fold(0.0, f64::max) / mean(1));
            }
            if ranks.placements.len() > 1 {
                values.push((idle_key(placement.roles[0]), mean(2)));
            }
        }
        if slowest > 0.0 {
            values.push((keys::TIME_TRAIN_SLOWEST_RATIO, slowest));
        }
        values
    }
}

/// Seconds for which this rank waited for ranks of any placement: in collectives of all ranks, and for a batch of
/// responses.
fn exposed_to_placements() -> f64 {
    let accounts = comm::accounting();
    accounts.iter().filter(|((axis, _), _)| *axis == "world").map(|(_, totals)| totals.exposed).sum()
}

/// The key of a placement, which is named by its first role.
fn idle_key(role: RoleName) -> &'static str {
    match role {
        RoleName::Actor => keys::IDLE_RATIO_ACTOR,
        RoleName::Critic => keys::IDLE_RATIO_CRITIC,
        RoleName::Reference | RoleName::Teacher => keys::IDLE_RATIO_REFERENCE,
        RoleName::Reward => keys::IDLE_RATIO_REWARD,
        RoleName::Rollout => keys::IDLE_RATIO_ROLLOUT,
    }
}
