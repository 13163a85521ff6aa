//! What methods that learn from pairs share: how pairs are cut into micro-batches, counted and evaluated.

use super::job::Step;
use crate::comm::records;
use crate::data::balance::{self, Cost};
use crate::data::{PairRow, Part, RowSource};
use crate::error::Result;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::preference::Pair;
use crate::metrics::keys::{self, Metrics, named};

/// Pairs that were counted.
const PAIRS: &str = "pairs";

/// What a step reports of its pairs: keys, and what their sums are divided by.
const REPORTED: [(&str, &str); 4] = [
    (keys::ACCURACY, PAIRS),
    (keys::CHOSEN_REWARD_MEAN, PAIRS),
    (keys::REJECTED_REWARD_MEAN, PAIRS),
    (keys::MARGIN_MEAN, PAIRS),
];

/// The shape of a step of `samples` pairs, of `trained` models and others that score.
pub fn shape(samples: usize, microbatch_tokens_max: usize, scored: usize) -> StepShape {
    let part = Part::Pair;
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

/// Tokens of each pair, both sides.
pub fn lengths(pairs: &[PairRow]) -> Vec<usize> {
    pairs.iter().map(PairRow::length).collect()
}

/// Adds a pair, whose loss has this weight.
pub fn count(sums: &mut Sums, pair: Pair, weight: f64) {
    let margin = pair.chosen_reward - pair.rejected_reward;
    sums.add(&Sums::of([
        (keys::LOSS, weight * pair.loss),
        (PAIRS, 1.0),
        (keys::ACCURACY, f64::from(u8::from(margin > 0.0))),
        (keys::CHOSEN_REWARD_MEAN, pair.chosen_reward),
        (keys::REJECTED_REWARD_MEAN, pair.rejected_reward),
        (keys::MARGIN_MEAN, margin),
    ]));
}

/// Ends a step that learned from `pairs`: its numbers.
pub fn learned(
    run: &mut Run,
    step: &mut Step,
    learner: &Learner,
    sums: &Sums,
    pairs: &[PairRow],
    source: &RowSource<PairRow>,
) -> Metrics {
    run.has_learned = true;
    step.lengths = pairs.iter().flat_map(|pair| [pair.chosen.len(), pair.rejected.len()]).collect();
    let report = learner.report;
    let tokens: usize = step.lengths.iter().sum();
    let mut all = named(sums.means(&REPORTED));
    all.extend(named([
        (keys::LOSS, sums.get(keys::LOSS)),
        (keys::GRAD_NORM, report.grad_norm),
        (keys::LR, report.lr),
        (keys::SAMPLES, pairs.len() as f64),
        (keys::TOKENS, tokens as f64),
        (keys::EPOCH, (step.number * pairs.len() as u64) as f64 / source.epoch_rows() as f64),
    ]));
    all
}

/// Sums over held-out rows of `lengths` tokens, of which `measure` takes a micro-batch at a time: those of all ranks; none where the run was asked to stop.
/// All ranks call this.
pub fn evaluate(
    run: &Run,
    role: &Role,
    lengths: &[usize],
    tokens_max: usize,
    mut measure: impl FnMut(&[usize]) -> Sums,
) -> Result<Option<Sums>> {
    let axes = &run.ranks.axes;
    let tokens_max = tokens_max * axes.sequence.size();
    let plan = balance::plan(lengths, axes.data.size(), tokens_max, &Cost::of(role.arch()));
    let mut mine = Sums::default();
    for chosen in &plan[axes.data.rank()] {
        if run.stop_requested() {
            return Ok(None);
        }
        mine.add(&measure(chosen));
    }
    let mut all = Sums::default();
    for sums in records::gather(&axes.zero, &[mine])? {
        all.add(&sums);
    }
    Ok(Some(all))
}

/// The numbers of an evaluation that took so many seconds.
pub fn eval_metrics(sums: &Sums, pairs: usize, seconds: f64) -> Metrics {
    let of = |key| sums.get(key) / pairs.max(1) as f64;
    named([
        (keys::EVAL_LOSS, of(keys::LOSS)),
        (keys::EVAL_ACCURACY, of(keys::ACCURACY)),
        (keys::EVAL_MARGIN_MEAN, of(keys::MARGIN_MEAN)),
        (keys::EVAL_SAMPLES, pairs as f64),
        (keys::EVAL_TIME_S, seconds),
    ])
}
