//! Supervised fine-tuning on one page: rows -> loss -> gradient -> step.

use super::job::{Ended, Job, Step};
use super::models::ModelSpec;
use crate::comm::{Axes, phase};
use crate::config::Config;
use crate::config::job::LossOn;
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
        let rows = self.source.next(run.config.sft.minibatch_samples);
        let rows = run.ranks.all.agree(rows)?;
        let timers = &mut step.timers;
        let loss = step.phases.time(Phase::Train, || timers.train(|| self.update(run, &rows)))?;
        run.has_learned = true;
        step.lengths = lengths(&rows);
        let tokens: usize = step.lengths.iter().sum();
        let report = self.learner.report;
        Ok(named([
            (keys::LOSS, loss),
            (keys::GRAD_NORM, report.grad_norm),
            (keys::LR, report.lr),
            (keys::SAMPLES, rows.len() as f64),
            (keys::TOKENS, tokens as f64),
            (keys::EPOCH, (step.number * rows.len() as u64) as f64 / self.source.epoch_rows() as f64),
        ]))
    }

    /// Loss and accuracy of next tokens on the eval split.
    fn evaluate(&mut self, run: &mut Run, _step: u64) -> Result<Option<Metrics>> {
        let start = Instant::now();
        let rows = run.ranks.all.agree(self.source.eval_rows(run.config.eval.samples_max))?;
        if rows.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let (axes, sft, role) = (&run.ranks.axes, &run.config.sft, &self.learner.role);
        let tokens_max = sft.microbatch_tokens_max * axes.sequence.size();
        let plan = balance::plan(&lengths(&rows), axes.data.size(), tokens_max, &Cost::of(role.arch()));
        let mut sums = [0.0; 3];
        for chosen in &plan[axes.data.rank()] {
            if run.stop_requested() {
                return Ok(None);
            }
            let found = evaluate_row(role, &part(&rows, chosen, sft.loss_on, axes));
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
    /// One optimizer step on `rows`; returns the mean loss over all learned tokens of the minibatch.
    fn update(&mut self, run: &Run, rows: &[SftRow]) -> Result<f64> {
        let (axes, sft, recompute) = (&run.ranks.axes, &run.config.sft, run.config.gradient.recompute);
        let total =
            rows.iter().map(|r| (1..r.tokens.len()).filter(|&i| learned(r, sft.loss_on, i)).count()).sum::<usize>();
        if total == 0 {
            return Err(Error::data("a minibatch has no token to learn").hint("are the responses of these rows empty?"));
        }
        let weight = 1.0 / total as f32;
        let part = |chosen: &[usize]| part(rows, chosen, sft.loss_on, axes);
        let sums = accumulate(&mut self.learner, axes, &lengths(rows), sft.microbatch_tokens_max, |learner, chosen| {
            microbatch(learner, &part(chosen), weight, recompute)
        });
        let loss = sums.get(keys::LOSS);
        self.learner.step_if_finite(axes, recompute, loss, part)?;
        Ok(loss)
    }
}

/// Whether token i of a row is learned; the first never is: nothing predicts it.
fn learned(row: &SftRow, on: LossOn, i: usize) -> bool {
    i > 0 && (on == LossOn::All || row.mask[i] != 0)
}

fn lengths(rows: &[SftRow]) -> Vec<usize> {
    rows.iter().map(|row| row.tokens.len()).collect()
}

/// This rank's part of the packed row of `rows[chosen]`.
pub(super) fn part(rows: &[SftRow], chosen: &[usize], on: LossOn, axes: &Axes) -> PackedRow {
    let mut packed = PackedRow::new();
    for row in chosen.iter().map(|&i| &rows[i]) {
        packed.push_where(&row.tokens, |i| learned(row, on, i));
    }
    packed.shard(&axes.sequence)
}

/// Accumulates the gradient of one packed row; returns its share of the minibatch's loss.
pub(super) fn microbatch(learner: &mut Learner, row: &PackedRow, weight: f32, recompute: bool) -> Sums {
    let Learner { role, sum, .. } = learner;
    let (model, w) = (&role.transformer, &role.weights);
    let mut saved = Saved::new(recompute);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
    let (weights, mut found) = (vec![weight; row.rows.len()], 0.0);
    let mut loss = |range: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], _: &mut [f32]| {
        found += cross_entropy(l, &weights[range], dlogprobs);
    };
    let grads = &mut sum.grads;
    let (dhidden, ..) = model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut loss, grads);
    model.backward(w, saved, &row.cu_seqlens, dhidden, grads);
    Sums::of([(keys::LOSS, found)])
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
