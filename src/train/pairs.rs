//! What methods that learn from pairs share: how pairs are counted, and recorded where they are held out.

use super::supervised::{Method, Minibatch, Numbers};
use crate::data::PairRow;
use crate::error::Result;
use crate::launch::run::Run;
use crate::learn::sums::Sums;
use crate::loss::preference::Pair;
use crate::metrics::eval_rows::{EvalResponses, EvalRow};
use crate::metrics::keys;

/// Pairs that were counted.
const PAIRS: &str = "pairs";

/// What a step reports of its pairs: keys, and what their sums are divided by.
const REPORTED: [(&str, &str); 4] = [
    (keys::ACCURACY, PAIRS),
    (keys::CHOSEN_REWARD_MEAN, PAIRS),
    (keys::REJECTED_REWARD_MEAN, PAIRS),
    (keys::MARGIN_MEAN, PAIRS),
];

/// A pair by its place among the rows of a step or an evaluation.
pub type Judged = (usize, Pair);

/// Sums over pairs, whose losses have this weight.
pub fn sums(pairs: &[Judged], weight: f64) -> Sums {
    let mut sums = Sums::default();
    for (_, pair) in pairs {
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
    sums
}

/// What a step that learned from pairs reports of them.
pub fn means(sums: &Sums) -> Numbers {
    let mut numbers = sums.means(&REPORTED);
    numbers.push((keys::LOSS, sums.get(keys::LOSS)));
    numbers
}

/// Ends an evaluation that judged pairs: records the first of them; its numbers. All ranks call this.
pub fn evaluated<M: Method<Row = PairRow>>(
    run: &mut Run,
    Minibatch { step, rows, tokenizer, .. }: &Minibatch<M>,
    mut judged: Vec<Judged>,
) -> Result<Numbers> {
    judged.sort_by_key(|(i, _)| *i);
    let record = |(i, pair): &Judged| {
        let (row, margin) = (&rows[*i], pair.chosen_reward - pair.rejected_reward);
        let response = |side: &[u32]| tokenizer.decode(&side[row.prompt_tokens..], true);
        Ok(EvalRow {
            step: *step,
            row: row.id,
            prompt: tokenizer.decode_prompt(&row.chosen[..row.prompt_tokens])?,
            responses: EvalResponses::Pair {
                chosen: response(&row.chosen)?,
                rejected: response(&row.rejected)?,
                chosen_reward: pair.chosen_reward,
                rejected_reward: pair.rejected_reward,
            },
            margin,
            correct: margin > 0.0,
        })
    };
    let recorded = run.recorder.eval_rows(*step, judged.iter().map(record));
    run.ranks.all.agree(recorded)?;
    let sums = sums(&judged, 1.0);
    let of = |key| sums.get(key) / rows.len().max(1) as f64;
    Ok(vec![
        (keys::EVAL_LOSS, of(keys::LOSS)),
        (keys::EVAL_ACCURACY, of(keys::ACCURACY)),
        (keys::EVAL_MARGIN_MEAN, of(keys::MARGIN_MEAN)),
    ])
}
