//! The frozen reference model of a policy that learns from given responses. It scores each of them once.

use crate::device::null;
use crate::launch::run::Run;
use crate::learn::Role;
use crate::learn::packed::Tokens;
use crate::learn::score;
use crate::metrics::{Phase, Phases};
use std::collections::HashMap;

pub struct Reference<const SIDES: usize> {
    role: Role,
    /// Sums by row id. They never change.
    known: HashMap<u64, [f64; SIDES]>,
}

impl<const SIDES: usize> Reference<SIDES> {
    pub fn new(role: Role) -> Self {
        Self { role, known: HashMap::new() }
    }

    /// Sums of the log-probabilities of each row's responses, by the row's id and `sides`. All ranks call this.
    pub fn of_rows<'a, T>(
        &mut self,
        run: &Run,
        rows: &'a [T],
        sides: impl Fn(&'a T) -> (u64, [Tokens<'a>; SIDES]),
        tokens_max: usize,
        phases: &mut Phases,
    ) -> Vec<[f64; SIDES]> {
        // The ids of a plan's rows mean nothing, so all rows count as new.
        let is_new = |id: u64| null::is_active() || !self.known.contains_key(&id);
        let (new, responses): (Vec<u64>, Vec<_>) = rows.iter().map(&sides).filter(|(id, _)| is_new(*id)).unzip();
        if !new.is_empty() {
            let responses: Vec<Tokens> = responses.into_iter().flatten().collect();
            let sums = self.sums(run, &responses, tokens_max, phases);
            for (id, sums) in new.into_iter().zip(sums.chunks(SIDES)) {
                self.known.insert(id, sums.try_into().expect("a sum for each side"));
            }
        }
        rows.iter().map(|row| self.known[&sides(row).0]).collect()
    }

    /// Sums of the log-probabilities of responses. All ranks call this.
    pub fn sums(&mut self, run: &Run, responses: &[Tokens], tokens_max: usize, phases: &mut Phases) -> Vec<f64> {
        phases.time(Phase::Score, || {
            run.onload(&mut self.role);
            let found = sums(&self.role, run, responses, tokens_max);
            run.offload_weights(&mut self.role);
            found
        })
    }
}

/// The same for any model.
pub fn sums(role: &Role, run: &Run, responses: &[Tokens], tokens_max: usize) -> Vec<f64> {
    let found = score::logprobs(role, &run.ranks.axes, responses, 1.0, tokens_max);
    found.iter().map(|logprobs| logprobs.iter().map(|l| f64::from(*l)).sum()).collect()
}
