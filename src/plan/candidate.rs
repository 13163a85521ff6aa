//! A layout with the memory and the time of its ranks.

use super::job::Job;
use super::memory::Memory;
use super::time::{Stage, Time};
use crate::config::mesh::RoleName;
use crate::launch::layout::Layout;
use std::ops::Range;

/// Roles on some ranks, with their memory and time.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    pub roles: Vec<RoleName>,
    pub ranks: Range<usize>,
    /// The layout; its mesh has these ranks.
    pub layout: Layout,
    pub memory: Memory,
    pub time: Time,
}

/// A layout with its memory and time.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// One entry if every role is on every rank, else one for each part of the placement.
    pub placed: Vec<Placed>,
    /// Whether the rollout's ranks sample for later steps while the others learn.
    pub runs_ahead: bool,
}

impl Candidate {
    /// The ranks that have the actor.
    pub fn main(&self) -> &Placed {
        let with_actor = self.placed.iter().find(|placed| placed.roles.contains(&RoleName::Actor));
        with_actor.expect("some rank has the actor")
    }

    pub fn layout(&self) -> &Layout {
        &self.main().layout
    }

    /// Whether it does not fit, or decodes fewer samples at once than possible.
    pub(super) fn is_short(&self, job: &Job) -> bool {
        let batch_max = job.config.rollout.batch_max;
        !self.fits() || self.main().memory.kv_of_time().is_some_and(|kv| kv.at_once < kv.samples.min(batch_max))
    }

    /// Whether it fits and `other` does not, or it is faster.
    pub(super) fn is_better(&self, other: &Self) -> bool {
        self.fits() && (!other.fits() || self.step_s() < other.step_s())
    }

    pub fn fits(&self) -> bool {
        self.placed.iter().all(|placed| placed.memory.fits)
    }

    /// The fullest ranks.
    pub fn fullest(&self) -> &Placed {
        let most = self.placed.iter().max_by_key(|placed| placed.memory.peak().1.bytes);
        most.expect("some rank has a role")
    }

    /// The seconds of a stage. Parts of the placement run at the same time.
    pub fn seconds_of(&self, stage: Stage) -> f64 {
        longest(&self.placed, |time| time.of_stage(stage))
    }

    pub fn floor_of(&self, stage: Stage) -> f64 {
        longest(&self.placed, |time| time.floor_of(stage))
    }

    pub fn step_s(&self) -> f64 {
        self.sides(Time::of_stage).map_or_else(|| all_stages(&self.placed, Time::of_stage), |[a, b]| a.max(b))
    }

    pub fn floor_s(&self) -> f64 {
        self.sides(Time::floor_of).map_or_else(|| all_stages(&self.placed, Time::floor_of), |[a, b]| a.max(b))
    }

    /// The seconds of the rollout's ranks and of the others, which work at the same time, if the rollout runs ahead.
    /// `of` returns the seconds of a stage.
    pub fn sides(&self, of: fn(&Time, Stage) -> f64) -> Option<[f64; 2]> {
        let side = |samples: bool| {
            let placed = self.placed.iter().filter(|placed| placed.roles.contains(&RoleName::Rollout) == samples);
            all_stages(placed, of)
        };
        self.runs_ahead.then(|| [side(true), side(false)])
    }

    /// The seconds of an evaluation, and of one more round of dynamic sampling. Ranks with other roles wait for the
    /// rollout.
    pub fn evaluation_s(&self) -> f64 {
        self.placed.iter().map(|placed| placed.time.evaluation_s).sum()
    }

    pub fn round_s(&self) -> f64 {
        self.placed.iter().map(|placed| placed.time.round_s).sum()
    }
}

fn longest<'a>(placed: impl IntoIterator<Item = &'a Placed>, of: impl Fn(&Time) -> f64) -> f64 {
    placed.into_iter().map(|placed| of(&placed.time)).fold(0.0, f64::max)
}

/// The seconds of all stages, one after the other.
fn all_stages<'a>(placed: impl IntoIterator<Item = &'a Placed, IntoIter: Clone>, of: fn(&Time, Stage) -> f64) -> f64 {
    let placed = placed.into_iter();
    Stage::ALL.into_iter().map(|stage| longest(placed.clone(), |time| of(time, stage))).sum()
}
