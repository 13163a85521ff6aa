//! What methods that learn from pairs share: how pairs are counted.

use super::job::Step;
use super::supervised;
use crate::data::{PairRow, Rows};
use crate::launch::run::Run;
use crate::learn::Learner;
use crate::learn::sums::Sums;
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
    rows: &Rows,
) -> Metrics {
    let mut numbers = sums.means(&REPORTED);
    numbers.push((keys::LOSS, sums.get(keys::LOSS)));
    let lengths = pairs.iter().flat_map(|pair| [pair.chosen.len(), pair.rejected.len()]).collect();
    supervised::learned(run, step, learner, numbers, pairs.len(), lengths, rows)
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
