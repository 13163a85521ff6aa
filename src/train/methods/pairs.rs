//! Code shared by methods that learn from pairs: counting pairs, and recording held-out ones.

use crate::data::PairRow;
use crate::error::Result;
use crate::learn::sums::Sums;
use crate::loss::preference::Pair;
use crate::metrics::eval_rows::EvalResponses;
use crate::metrics::keys;
use crate::train::supervised::{ExampleSums, Method, Minibatch, Numbers};

/// The number of pairs.
const PAIRS: &str = "pairs";
/// The number of pairs with a margin of 0, which a policy that equals its reference has.
pub const TIES: &str = "ties";

/// The pair metrics of a step: keys, and the counts that divide their sums.
pub const REPORTED: &[(&str, &str)] = &[
    (keys::ACCURACY, PAIRS),
    (keys::CHOSEN_REWARD_MEAN, PAIRS),
    (keys::REJECTED_REWARD_MEAN, PAIRS),
    (keys::MARGIN_MEAN, PAIRS),
    (keys::LOSS, ""),
];

/// Sums of one pair, whose loss has this weight.
pub fn counted(pair: &Pair, weight: f64) -> Sums {
    let margin = pair.chosen_reward - pair.rejected_reward;
    Sums::from_list([
        (keys::LOSS, weight * pair.loss),
        (PAIRS, 1.0),
        (TIES, f64::from(u8::from(margin == 0.0))),
        (keys::ACCURACY, f64::from(u8::from(margin > 0.0))),
        (keys::CHOSEN_REWARD_MEAN, pair.chosen_reward),
        (keys::REJECTED_REWARD_MEAN, pair.rejected_reward),
        (keys::MARGIN_MEAN, margin),
    ])
}

/// The metrics of an evaluation of `pairs` pairs, each of whose losses had weight 1. If all margins are 0, there is no
/// accuracy.
pub fn evaluated(sums: &Sums, pairs: usize) -> Numbers {
    let of = |key| sums.get(key) / pairs.max(1) as f64;
    let mut all = vec![(keys::EVAL_LOSS, of(keys::LOSS)), (keys::EVAL_MARGIN_MEAN, of(keys::MARGIN_MEAN))];
    all.extend((of(TIES) < 1.0).then(|| (keys::EVAL_ACCURACY, of(keys::ACCURACY))));
    all
}

/// Implements `ExampleLoss::read`.
pub fn read<M: Method<Row = PairRow>>(
    Minibatch { rows, tokenizer, .. }: &Minibatch<M>,
    examples: &[&ExampleSums],
) -> Result<(u64, String, EvalResponses)> {
    let (i, _, pair) = examples[0];
    let row = &rows[*i];
    let response = |side: &[u32]| tokenizer.decode(&side[row.prompt_tokens..], true);
    let responses = EvalResponses::Pair {
        chosen: response(&row.chosen)?,
        rejected: response(&row.rejected)?,
        chosen_reward: pair.get(keys::CHOSEN_REWARD_MEAN),
        rejected_reward: pair.get(keys::REJECTED_REWARD_MEAN),
    };
    Ok((row.id, tokenizer.decode_prompt(&row.chosen[..row.prompt_tokens])?, responses))
}
