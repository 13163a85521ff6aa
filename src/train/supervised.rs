//! What methods share that learn from rows as they are: how rows are cut into micro-batches, counted and evaluated.

use super::job::Step;
use crate::comm::records;
use crate::data::balance::{self, Cost};
use crate::data::{Part, Rows};
use crate::error::Result;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::{Learner, Role};
use crate::metrics::keys::{self, Metrics, named};
use serde::{Serialize, de::DeserializeOwned};

/// The shape of a step of `samples` rows, which `scored` forwards look at before one model learns from them.
pub fn shape(part: Part, samples: usize, microbatch_tokens_max: usize, scored: usize) -> StepShape {
    StepShape {
        part,
        rows: samples,
        samples_per_row: 1,
        minibatch: samples,
        epochs: 1,
        microbatch_tokens_max,
        trained: 1,
        scored,
    }
}

/// Ends a step that learned from `samples` rows, of sequences of `lengths` tokens: `numbers`, and those of every method.
pub fn learned(
    run: &mut Run,
    step: &mut Step,
    learner: &Learner,
    numbers: Vec<(&'static str, f64)>,
    samples: usize,
    lengths: Vec<usize>,
    rows: &Rows,
) -> Metrics {
    run.has_learned = true;
    let tokens: usize = lengths.iter().sum();
    step.lengths = lengths;
    let report = learner.report;
    let mut all = named(numbers);
    all.extend(named([
        (keys::GRAD_NORM, report.grad_norm),
        (keys::LR, report.lr),
        (keys::SAMPLES, samples as f64),
        (keys::TOKENS, tokens as f64),
        (keys::EPOCH, (step.number * samples as u64) as f64 / rows.epoch_rows() as f64),
    ]));
    all
}

/// What `measure` finds in held-out rows of `lengths` tokens, of which it takes a micro-batch at a time: on all ranks, in their order;
/// none where the run was asked to stop. All ranks call this.
pub fn evaluate<T: Serialize + DeserializeOwned>(
    run: &Run,
    role: &Role,
    lengths: &[usize],
    tokens_max: usize,
    mut measure: impl FnMut(&[usize]) -> Vec<T>,
) -> Result<Option<Vec<T>>> {
    let axes = &run.ranks.axes;
    let tokens_max = tokens_max * axes.sequence.size();
    let plan = balance::plan(lengths, axes.data.size(), tokens_max, &Cost::of(role.arch()));
    let mut mine = Vec::new();
    for chosen in &plan[axes.data.rank()] {
        if run.stop_requested() {
            return Ok(None);
        }
        mine.extend(measure(chosen));
    }
    records::gather(&axes.zero, &mine).map(Some)
}
