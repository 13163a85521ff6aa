//! Supervised fine-tuning on one page: rows -> loss -> gradient -> step.

use super::supervised::{Method, Minibatch, Numbers, evaluate_share, lengths};
use crate::config::Config;
use crate::config::job::LossOn;
use crate::data::SftRow;
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::learn::accumulation::accumulate;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::token::cross_entropy;
use crate::metrics::Phases;
use crate::metrics::keys;
use crate::ops::linear_logprob::Extra;
use crate::text::Tokenizer;
use std::ops::Range;

pub struct Sft;

impl Method for Sft {
    type Row = SftRow;
    type Precomputed = ();

    fn shape(Config { sft, .. }: &Config) -> [usize; 3] {
        [sft.minibatch_samples, sft.microbatch_tokens_max, 0]
    }

    fn new(_config: &Config, _frozen: Vec<Role>, _tokenizer: &Tokenizer) -> Result<Self> {
        Ok(Self)
    }

    /// Marks the tokens that are learned.
    fn precompute(&mut self, run: &Run, _: &Role, rows: &mut [SftRow], _: &mut Phases) -> Result<()> {
        choose(rows, run.config.sft.loss_on);
        Ok(())
    }

    /// One optimizer step on the loss
    ///
    /// mean over the learned tokens of rows of -l + pretrain_coef * mean over the tokens of texts of -l.
    fn update(&mut self, run: &Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let Minibatch { rows, texts, .. } = *batch;
        let (axes, sft) = (&run.ranks.axes, &run.config.sft);
        let learned = |row: &SftRow| (1..row.tokens.len()).filter(|&i| row.mask[i] != 0).count();
        let [tokens, of_texts] = [rows, texts].map(|rows| rows.iter().map(learned).sum::<usize>());
        if tokens == 0 {
            return Err(
                Error::data("a minibatch has no tokens to learn").hint("check that its responses are not empty")
            );
        }
        let weights = [1.0 / tokens as f32, sft.pretrain_coef / of_texts.max(1) as f32];
        let all = [rows, texts].concat();
        let sums = accumulate(learner, axes, &lengths(&all), sft.microbatch_tokens_max, 1, |learner, chosen, _| {
            let whole = pack(&all, chosen);
            let row = whole.shard(&axes.sequence);
            // One weight for each predicted token, depending on the source of its row.
            let by_row = chosen.iter().zip(whole.row_offsets.windows(2));
            let spread = |of: [f32; 2]| -> Vec<f32> {
                let each = |(&i, ends): (&usize, &[usize])| {
                    std::iter::repeat_n(of[usize::from(i >= rows.len())], ends[1] - ends[0])
                };
                row.select(&by_row.clone().flat_map(each).collect::<Vec<_>>())
            };
            microbatch(learner, &row, &spread(weights), &spread([0.0, 1.0 / of_texts.max(1) as f32]))
        });
        let part = |chosen: &[usize]| pack(&all, chosen).shard(&axes.sequence);
        learner.step_if_finite(axes, sums.get(keys::LOSS), part)?;
        let of_texts = (!texts.is_empty()).then(|| (keys::PTX_LOSS, sums.get(keys::PTX_LOSS)));
        Ok(of_texts.into_iter().chain([(keys::LOSS, sums.get(keys::LOSS))]).collect())
    }

    /// Loss and accuracy of next tokens.
    fn evaluate(&mut self, run: &mut Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let (axes, role, tokens_max) = (&run.ranks.axes, &learner.role, run.config.sft.microbatch_tokens_max);
        let measure = |chosen: &[usize]| vec![evaluate_row(role, &pack(batch.rows, chosen).shard(&axes.sequence))];
        let found = evaluate_share(run, role, &lengths(batch.rows), tokens_max, measure)?;
        let mut sums = [0.0; 3];
        for of_row in found {
            sums.iter_mut().zip(of_row).for_each(|(sum, x)| *sum += x);
        }
        axes.zero.all_reduce_sum_f64(&mut sums);
        let [loss, right, tokens] = sums;
        Ok(vec![(keys::EVAL_LOSS, loss / tokens), (keys::EVAL_ACCURACY, right / tokens)])
    }
}

/// Marks the tokens of `rows` that are learned.
fn choose(rows: &mut [SftRow], on: LossOn) {
    for SftRow { mask, .. } in rows {
        match on {
            LossOn::Response => {}
            LossOn::All => mask.fill(1),
            LossOn::LastResponse => {
                let end = mask.iter().rposition(|m| *m != 0).unwrap_or(0);
                let begin = mask[..end].iter().rposition(|m| *m == 0).map_or(0, |before| before + 1);
                mask[..begin].fill(0);
            }
        }
    }
}

/// Packs the rows `rows[chosen]`, one after the other.
pub(super) fn pack(rows: &[SftRow], chosen: &[usize]) -> PackedRow {
    let mut packed = PackedRow::new();
    for row in chosen.iter().map(|&i| &rows[i]) {
        packed.push_where(&row.tokens, |i| row.mask[i] != 0);
    }
    packed
}

/// Accumulates the gradient of one packed row, whose predicted tokens have `weights`. Returns its share of the
/// minibatch's loss and of the mean loss of texts, in which the tokens have the weights `of_texts`.
pub(super) fn microbatch(learner: &mut Learner, row: &PackedRow, weights: &[f32], of_texts: &[f32]) -> Sums {
    let (mut found, mut on_texts) = (0.0, 0.0);
    let mut loss = |range: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], _: &mut [f32]| {
        on_texts += cross_entropy(l, &of_texts[range.clone()], dlogprobs);
        found += cross_entropy(l, &weights[range], dlogprobs);
    };
    learner.backward(row, |model, w, hidden, grads| {
        (model.logprobs_backward(w, hidden, &row.rows, &row.targets, 1.0, &mut loss, grads).0, ())
    });
    Sums::from_list([(keys::LOSS, found), (keys::PTX_LOSS, on_texts)])
}

/// Sum of the loss, correct next tokens, and tokens, of one packed row.
fn evaluate_row(role: &Role, row: &PackedRow) -> [f64; 3] {
    let (model, w) = (&role.transformer, &role.weights);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
    let found = model.logprobs_on_device(w, &hidden, &row.rows, &row.targets, 1.0, Extra::Top).later().into_values();
    let (logprobs, right) = found.split_at(row.rows.len());
    let sum = |x: &[f32]| x.iter().map(|x| f64::from(*x)).sum::<f64>();
    [-sum(logprobs), sum(right), row.rows.len() as f64]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_that_are_learned_are_all_answers_the_last_one_or_everything() {
        let mask = [0, 1, 1, 0, 0, 1, 1, 0];
        for (on, learned) in
            [(LossOn::Response, mask), (LossOn::LastResponse, [0, 0, 0, 0, 0, 1, 1, 0]), (LossOn::All, [1; 8])]
        {
            let mut rows = [SftRow { mask: mask.to_vec(), ..SftRow::default() }];
            choose(&mut rows, on);
            assert_eq!(rows[0].mask, learned, "{on:?}");
        }
    }
}
