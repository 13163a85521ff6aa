//! Supervised fine-tuning on one page: rows -> loss -> gradient -> step.

use crate::config::Config;
use crate::config::method::sft::LossOn;
use crate::data::SftRow;
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::learn::{HeadPass, Learner, MicroBatch, Objective, Pass, Role};
use crate::loss::token::cross_entropy;
use crate::metrics::Phases;
use crate::metrics::keys;
use crate::ops::linear_logprob::Extra;
use crate::text::Tokenizer;
use crate::train::supervised::{Method, Minibatch, Numbers, evaluate_share};
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
        let sft = &run.config.sft;
        let learned = |row: &SftRow| (1..row.tokens.len()).filter(|&i| row.mask[i] != 0).count();
        let [tokens, of_texts] = [rows, texts].map(|rows| rows.iter().map(learned).sum::<usize>());
        if tokens == 0 {
            return Err(
                Error::data("a minibatch has no tokens to learn").hint("check that its responses are not empty")
            );
        }
        let [coef_of_texts, mean_of_texts] = [sft.pretrain_coef, 1.0].map(|coef| coef / of_texts.max(1) as f32);
        let (of_row, of_text) = ([1.0 / tokens as f32, 0.0], [coef_of_texts, mean_of_texts]);
        let both = [(rows, of_row), (texts, of_text)];
        let both = both.into_iter().flat_map(|(rows, weights)| rows.iter().map(move |row| (row, weights)));
        let objective = CrossEntropy { rows: both.collect() };
        let sums = learner.learn(&run.ranks.axes, sft.microbatch_tokens_max, &[&objective])?;
        let of_texts = (!texts.is_empty()).then(|| (keys::PTX_LOSS, sums.get(keys::PTX_LOSS)));
        Ok(of_texts.into_iter().chain([(keys::LOSS, sums.get(keys::LOSS))]).collect())
    }

    /// Loss and accuracy of next tokens.
    fn evaluate(&mut self, run: &mut Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let (axes, role, tokens_max) = (&run.ranks.axes, &learner.role, run.config.sft.microbatch_tokens_max);
        let rows = CrossEntropy { rows: batch.rows.iter().map(|row| (row, [0.0; 2])).collect() };
        let found = evaluate_share(run, role, &rows, tokens_max, |packed| vec![evaluate_row(role, packed.own)])?;
        let mut sums = [0.0; 3];
        for of_row in found {
            sums.iter_mut().zip(of_row).for_each(|(sum, x)| *sum += x);
        }
        axes.zero.all_reduce_sum_f64(&mut sums);
        // The last stage alone has found any.
        axes.pipeline.all_reduce_sum_f64(&mut sums);
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

/// Cross-entropy of rows: sum over their learned tokens of -weight l. Each row has the weight of its tokens in the loss
/// and in the measured loss of texts.
pub struct CrossEntropy<'a> {
    pub rows: Vec<(&'a SftRow, [f32; 2])>,
}

impl Objective for CrossEntropy<'_> {
    fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(|(row, _)| row.tokens.len()).collect()
    }

    fn pack(&self, rows: &[usize]) -> PackedRow {
        let mut packed = PackedRow::new();
        for (row, _) in rows.iter().map(|&i| &self.rows[i]) {
            packed.push_where(&row.tokens, |i| row.mask[i] != 0);
            packed.see(&row.images);
        }
        packed
    }

    fn loss(&self, MicroBatch { rows, whole, own }: &MicroBatch, pass: Pass) -> Sums {
        let by_row = || rows.iter().zip(whole.row_offsets.windows(2));
        let [weights, of_texts] = [0, 1].map(|i| {
            let of_row = |(&row, ends): (&usize, &[usize])| std::iter::repeat_n(self.rows[row].1[i], ends[1] - ends[0]);
            own.select(&by_row().flat_map(of_row).collect::<Vec<_>>())
        });
        let (mut found, mut on_texts) = (0.0, 0.0);
        let mut loss = |range: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], _: &mut [f32]| {
            on_texts += cross_entropy(l, &of_texts[range.clone()], dlogprobs);
            found += cross_entropy(l, &weights[range], dlogprobs);
        };
        pass.run(|head| head.token_loss(1.0, &mut loss));
        Sums::from_list([(keys::LOSS, found), (keys::PTX_LOSS, on_texts)])
    }
}

/// Sum of the loss, correct next tokens, and tokens, of one packed row.
fn evaluate_row(role: &Role, row: &PackedRow) -> [f64; 3] {
    let found = HeadPass::forward(role, row).logprobs_on_device(1.0, Extra::Top).later().into_values();
    let (logprobs, right) = found.split_at(row.rows.len());
    let sum = |x: &[f32]| x.iter().map(|x| f64::from(*x)).sum::<f64>();
    [-sum(logprobs), sum(right), row.rows.len() as f64]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learned_tokens_are_all_answers_the_last_answer_or_everything() {
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
