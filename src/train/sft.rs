//! Supervised fine-tuning on one page: rows -> loss -> gradient -> step.

use super::job::{Ended, Job, Step};
use super::models::ModelSpec;
use crate::comm::phase;
use crate::config::Config;
use crate::config::job::{LossOn, Recompute};
use crate::config::mesh::RoleName;
use crate::data::balance::{self, Cost};
use crate::data::{Part, Rows, SftRow, SftSource};
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::accumulation::accumulate;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::token::cross_entropy;
use crate::metrics::Phase;
use crate::metrics::keys::{self, Metrics, named};
use crate::model::{Arch, Head, Saved};
use crate::ops::linear_logprob::Extra;
use crate::text::Tokenizer;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

pub struct Sft {
    learner: Learner,
    source: SftSource,
}

impl Job for Sft {
    type Row = SftRow;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let optim = &config.optim.actor;
        vec![ModelSpec::new(RoleName::Actor, &config.model.actor, Head::LanguageModel, Some(optim))]
    }

    fn shape(config: &Config) -> StepShape {
        let samples = config.sft.minibatch_samples;
        StepShape {
            part: Part::Demonstration,
            rows: samples,
            samples_per_row: 1,
            minibatch: samples,
            epochs: 1,
            microbatch_tokens_max: config.sft.microbatch_tokens_max,
            trained: 1,
            scored: 0,
        }
    }

    fn new(
        _run: &Run,
        _arch: &Arch,
        mut learners: Vec<Learner>,
        _frozen: Vec<Role>,
        source: SftSource,
        _tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let learner = learners.pop().expect("a job without a placement has all models on each rank");
        Ok(Self { learner, source })
    }

    fn rows(&self) -> &Rows {
        &self.source
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        vec![&mut self.learner]
    }

    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        phase::set(step.number, "train");
        let sft = &run.config.sft;
        let drawn = self.source.next(sft.minibatch_samples).and_then(|rows| {
            let texts = if sft.pretrain_coef > 0.0 { rows.len() } else { 0 };
            Ok((rows, self.source.pretrain(step.number, texts)?))
        });
        let (mut rows, texts) = run.ranks.all.agree(drawn)?;
        choose(&mut rows, sft.loss_on);
        let timers = &mut step.timers;
        let sums = step.phases.time(Phase::Train, || timers.train(|| self.update(run, &rows, &texts)))?;
        run.has_learned = true;
        step.lengths = lengths(rows.iter().chain(&texts));
        let tokens: usize = step.lengths.iter().sum();
        let report = self.learner.report;
        let ptx = (!texts.is_empty()).then(|| (keys::PTX_LOSS, sums.get(keys::PTX_LOSS)));
        Ok(named(ptx.into_iter().chain([
            (keys::LOSS, sums.get(keys::LOSS)),
            (keys::GRAD_NORM, report.grad_norm),
            (keys::LR, report.lr),
            (keys::SAMPLES, rows.len() as f64),
            (keys::TOKENS, tokens as f64),
            (keys::EPOCH, (step.number * rows.len() as u64) as f64 / self.source.epoch_rows() as f64),
        ])))
    }

    /// Loss and accuracy of next tokens on the eval split.
    fn evaluate(&mut self, run: &mut Run, _step: u64) -> Result<Option<Metrics>> {
        let start = Instant::now();
        let mut rows = run.ranks.all.agree(self.source.eval_rows(run.config.eval.samples_max))?;
        choose(&mut rows, run.config.sft.loss_on);
        if rows.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let (axes, sft, role) = (&run.ranks.axes, &run.config.sft, &self.learner.role);
        let tokens_max = sft.microbatch_tokens_max * axes.sequence.size();
        let plan = balance::plan(&lengths(rows.iter()), axes.data.size(), tokens_max, &Cost::of(role.arch()));
        let mut sums = [0.0; 3];
        for chosen in &plan[axes.data.rank()] {
            if run.stop_requested() {
                return Ok(None);
            }
            let found = evaluate_row(role, &pack(&rows, chosen).shard(&axes.sequence));
            sums.iter_mut().zip(found).for_each(|(sum, x)| *sum += x);
        }
        axes.zero.all_reduce_sum_f64(&mut sums);
        let [loss, right, tokens] = sums;
        Ok(Some(named([
            (keys::EVAL_LOSS, loss / tokens),
            (keys::EVAL_ACCURACY, right / tokens),
            (keys::EVAL_SAMPLES, rows.len() as f64),
            (keys::EVAL_TIME_S, start.elapsed().as_secs_f64()),
        ])))
    }
}

impl Sft {
    /// One optimizer step on `rows`, and on `texts` of pretraining beside them: the loss is
    ///
    /// mean over the learned tokens of rows of -l + pretrain_coef * mean over the tokens of texts of -l.
    fn update(&mut self, run: &Run, rows: &[SftRow], texts: &[SftRow]) -> Result<Sums> {
        let (axes, sft, recompute) = (&run.ranks.axes, &run.config.sft, run.config.gradient.recompute);
        let learned = |row: &SftRow| (1..row.tokens.len()).filter(|&i| row.mask[i] != 0).count();
        let [tokens, of_texts] = [rows, texts].map(|rows| rows.iter().map(learned).sum::<usize>());
        if tokens == 0 {
            return Err(Error::data("a minibatch has no token to learn").hint("are the responses of these rows empty?"));
        }
        let weights = [1.0 / tokens as f32, sft.pretrain_coef / of_texts.max(1) as f32];
        let all = [rows, texts].concat();
        let lengths = lengths(all.iter());
        let sums = accumulate(&mut self.learner, axes, &lengths, sft.microbatch_tokens_max, |learner, chosen| {
            let whole = pack(&all, chosen);
            let row = whole.shard(&axes.sequence);
            // One weight for each predicted token, by where its row is from.
            let by_row = chosen.iter().zip(whole.row_offsets.windows(2));
            let spread = |of: [f32; 2]| -> Vec<f32> {
                let each = |(&i, ends): (&usize, &[usize])| {
                    std::iter::repeat_n(of[usize::from(i >= rows.len())], ends[1] - ends[0])
                };
                row.select(&by_row.clone().flat_map(each).collect::<Vec<_>>())
            };
            microbatch(learner, &row, &spread(weights), &spread([0.0, 1.0 / of_texts.max(1) as f32]), recompute)
        });
        let part = |chosen: &[usize]| pack(&all, chosen).shard(&axes.sequence);
        self.learner.step_if_finite(axes, recompute, sums.get(keys::LOSS), part)?;
        Ok(sums)
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

fn lengths<'a>(rows: impl Iterator<Item = &'a SftRow>) -> Vec<usize> {
    rows.map(|row| row.tokens.len()).collect()
}

/// The rows `rows[chosen]`, one behind the other.
pub(super) fn pack(rows: &[SftRow], chosen: &[usize]) -> PackedRow {
    let mut packed = PackedRow::new();
    for row in chosen.iter().map(|&i| &rows[i]) {
        packed.push_where(&row.tokens, |i| row.mask[i] != 0);
    }
    packed
}

/// Accumulates the gradient of one packed row, whose predicted tokens have `weights`; returns its share of the minibatch's loss, and
/// of the mean loss of texts, in which they weigh `of_texts`.
pub(super) fn microbatch(
    learner: &mut Learner,
    row: &PackedRow,
    weights: &[f32],
    of_texts: &[f32],
    recompute: Recompute,
) -> Sums {
    let Learner { role, sum, .. } = learner;
    let (model, w) = (&role.transformer, &role.weights);
    let mut saved = Saved::new(recompute);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
    let (mut found, mut on_texts) = (0.0, 0.0);
    let mut loss = |range: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], _: &mut [f32]| {
        on_texts += cross_entropy(l, &of_texts[range.clone()], dlogprobs);
        found += cross_entropy(l, &weights[range], dlogprobs);
    };
    let grads = &mut sum.grads;
    let (dhidden, ..) = model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut loss, grads);
    model.backward(w, saved, &row.cu_seqlens, dhidden, grads);
    Sums::of([(keys::LOSS, found), (keys::PTX_LOSS, on_texts)])
}

/// Sum of the loss, correct next tokens, and tokens, of one packed row.
fn evaluate_row(role: &Role, row: &PackedRow) -> [f64; 3] {
    let (model, w) = (&role.transformer, &role.weights);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
    let found = model.logprobs_on_device(w, &hidden, &row.rows, &row.targets, 1.0, Extra::Top).later().take();
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
