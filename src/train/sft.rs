//! Supervised fine-tuning on one page: rows -> loss -> gradient -> step.

use super::clock::Clock;
use super::cut;
use super::inputs::Hashed;
use super::role::{Learner, Role};
use super::setup::{Run, Values, check_vocabulary};
use super::state::{self, State};
use super::sums::Sums;
use super::sweep::{microbatches, sweep};
use super::{astray, finish, report};
use crate::comm::{Axes, phase};
use crate::config::job::LossOn;
use crate::data::balance::{self, Cost};
use crate::data::{Part, SftRow, SftSource};
use crate::error::{Error, Result};
use crate::gradient::microbatch::PackedRow;
use crate::loss::token::cross_entropy;
use crate::metrics::{Phase, Phases, keys};
use crate::model::{Arch, Head, Saved};
use crate::ops::linear_logprob::Also;
use crate::plan::Rows;
use std::ops::Range;
use std::time::Instant;

pub struct Sft {
    learner: Learner,
    source: SftSource,
    state: State,
    steps: u64,
}

/// Runs the job: opens, resumes, trains, exports.
pub fn run(mut run: Run) -> Result<()> {
    let mut sft = Sft::open(&mut run)?;
    if run.dry_run {
        run.recorder.say("dry run: the job is ready to start");
        return Ok(());
    }
    sft.train(&mut run)?;
    sft.learner.sum.grads.free();
    finish::finish(&mut run, Some(&sft.learner.role), sft.state.step, sft.source.ledger())
}

/// Whether token i of a row is learned; the first never is: nothing predicts it.
fn learned(row: &SftRow, on: LossOn, i: usize) -> bool {
    i > 0 && (on == LossOn::All || row.mask[i] != 0)
}

fn learned_tokens(row: &SftRow, on: LossOn) -> usize {
    (1..row.tokens.len()).filter(|&i| learned(row, on, i)).count()
}

impl Sft {
    fn open(run: &mut Run) -> Result<Self> {
        let config = run.config.clone();
        let tokenizer = run.tokenizer()?;
        let dir = &config.model.actor;
        let arch = Arch::load(dir).map_err(|e| e.within("model.actor"));
        let arch = arch.and_then(|arch| check_vocabulary(&arch, dir, &tokenizer).map(|()| arch));
        let arch = run.all.agree(arch)?;
        let vocabulary = arch.vocabulary;
        let (prepared, hashed) = Hashed::data(run, Part::Demonstration, &tokenizer, vocabulary)?;
        let source = SftSource::open(&config.data, &tokenizer, vocabulary, &prepared, config.job.seed);
        let mut source = run.all.agree(source.and_then(|s| s.check_context(arch.context).map(|()| s)))?;
        let steps = match config.job.steps {
            0 => (config.sft.epochs * source.epoch_rows() as f64 / config.sft.minibatch_samples as f64).ceil() as u64,
            steps => steps,
        };
        if steps == 0 {
            return run.all.agree(Err(Error::usage("sft.epochs and job.steps are both 0: nothing to do")));
        }
        let ahead = source.ahead(Rows::wanted(&config)).and_then(|rows| Ok((rows, source.eval_tokens()?)));
        let (rows, eval) = run.all.agree(ahead)?;
        run.expect(&rows, &eval);
        let mut state = State {
            step: 0,
            cursor: source.cursor().clone(),
            ledger: source.ledger().clone(),
            advantage: None,
            updates: Vec::new(),
            has_work: false,
            eval_due: config.eval.every_steps > 0,
            inputs: hashed.all(run)?,
        };
        let resumed = state::find(run, &arch, &state.inputs)?;
        if let Some(resumed) = &resumed {
            state = resumed.state.clone();
            run.all.agree(source.restore(&state.cursor, &state.ledger))?;
        }
        let values = Values::of(resumed.is_some());
        let actor = run.role("actor", dir, &arch, Head::LanguageModel, values)?;
        let plan = report::memory_plan(run, Some(&actor), None, None);
        let whole = actor.whole().len();
        let unwritten = if values == Values::ToRestore { actor.weights.bytes() } else { 0 };
        run.check_resources(&plan, unwritten, whole, whole * config.model.dtype().bytes(), 0)?;
        let mut learner = run.learner(actor, &config.optim.actor, steps, values)?;
        if let Some(resumed) = &resumed {
            resumed.fill(run, &mut [&mut learner])?;
        }
        let resumed_from = resumed.map(|resumed| resumed.state.step);
        if !run.dry_run {
            let cut = run.recorder.cut_back(state.step);
            run.all.agree(cut)?;
        }
        let (role, parameters) = (&learner.role, learner.role.whole().parameters());
        run.banner(steps, resumed_from, &[(role.name, parameters, &role.dir)], &plan, 0);
        Ok(Self { learner, source, state, steps })
    }

    fn train(&mut self, run: &mut Run) -> Result<()> {
        let config = run.config.clone();
        let every = config.eval.every_steps;
        if self.state.eval_due {
            self.state.eval_due = !self.evaluate(run, self.state.step)?;
            if self.state.eval_due {
                state::save(run, &mut self.state, &[&self.learner], None)?;
                return Err(run.stopped(self.state.step));
            }
        }
        while self.state.step < self.steps {
            let step = self.state.step + 1;
            phase::set(step, "train");
            let (mut phases, mut clock) = (Phases::start(), Clock::start());
            let rows = self.source.next(config.sft.minibatch_samples);
            let rows = run.all.agree(rows)?;
            let loss = phases.time(Phase::Train, || clock.train(|| self.update(run, &rows)))?;
            (self.state.cursor, self.state.ledger) = (self.source.cursor().clone(), self.source.ledger().clone());
            self.state.step = step;
            run.has_learned = true;
            let tokens: usize = rows.iter().map(|r| r.tokens.len()).sum();
            let report = self.learner.report;
            let mut values = vec![
                (keys::LOSS, loss),
                (keys::GRAD_NORM, report.grad_norm),
                (keys::LR, report.lr),
                (keys::SAMPLES, rows.len() as f64),
                (keys::TOKENS, tokens as f64),
                (keys::EPOCH, (step * rows.len() as u64) as f64 / self.source.epoch_rows() as f64),
            ];
            values.extend(run.memory_peaks());
            values.extend(phases.values(tokens as u64));
            values.extend(clock.values(run));
            let recorded = run.recorder.step(step, &values);
            run.all.agree(recorded)?;
            self.state.eval_due = every > 0 && (step.is_multiple_of(every) || step == self.steps);
            if self.state.eval_due {
                self.state.eval_due = !self.evaluate(run, step)?;
            }
            let stop = self.state.eval_due || (step < self.steps && run.stop_requested());
            if stop || config.checkpoint.due(step, self.steps) {
                phase::set(step, "checkpoint");
                state::save(run, &mut self.state, &[&self.learner], None)?;
            }
            if stop {
                return Err(run.stopped(step));
            }
        }
        Ok(())
    }

    /// One optimiser step on `rows`; the loss is the mean over all learned tokens of the minibatch.
    fn update(&mut self, run: &Run, rows: &[SftRow]) -> Result<f64> {
        let (axes, sft, recompute) = (&run.axes, &run.config.sft, run.config.gradient.recompute);
        let total: usize = rows.iter().map(|r| learned_tokens(r, sft.loss_on)).sum();
        if total == 0 {
            return Err(Error::data("a minibatch has no token to learn").hint("are the responses of these rows empty?"));
        }
        let weight = 1.0 / total as f32;
        let lengths = lengths(rows);
        let sums = sweep(&mut self.learner, axes, &lengths, sft.microbatch_tokens_max, |learner, chosen| {
            microbatch(learner, &part(rows, chosen, sft.loss_on, axes), weight, recompute)
        });
        let loss = sums.get(keys::LOSS);
        let rows = |learner: &Learner| {
            let made = microbatches(learner, axes, &lengths, sft.microbatch_tokens_max).into_iter();
            made.map(|chosen| part(rows, &chosen, sft.loss_on, axes)).collect()
        };
        astray::step(&mut self.learner, axes, recompute, loss, rows)?;
        Ok(loss)
    }

    /// Loss and share of right next tokens on the eval split. False where the run was asked to stop before all rows were
    /// seen; then nothing is recorded.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<bool> {
        phase::set(step, "eval");
        let start = Instant::now();
        let mut rows = run.all.agree(self.source.eval_rows())?;
        if run.config.eval.samples_max > 0 {
            rows.truncate(run.config.eval.samples_max);
        }
        if rows.is_empty() {
            return Ok(true);
        }
        let (axes, sft, role) = (&run.axes, &run.config.sft, &self.learner.role);
        let tokens_max = sft.microbatch_tokens_max * axes.sequence.size();
        let plan = balance::plan(&lengths(&rows), axes.data.size(), tokens_max, &Cost::of(role.arch()));
        let mut sums = [0.0; 3];
        for chosen in &plan[axes.data.rank()] {
            if run.stop_requested() {
                return Ok(false);
            }
            let found = look(role, &part(&rows, chosen, sft.loss_on, axes));
            sums.iter_mut().zip(found).for_each(|(sum, x)| *sum += x);
        }
        axes.zero.all_reduce_sum_f64(&mut sums);
        let [loss, right, tokens] = sums;
        let values = [
            (keys::EVAL_LOSS, loss / tokens),
            (keys::EVAL_ACCURACY, right / tokens),
            (keys::EVAL_SAMPLES, rows.len() as f64),
            (keys::EVAL_TIME_S, start.elapsed().as_secs_f64()),
        ];
        let recorded = run.recorder.eval(step, &values);
        run.all.agree(recorded).map(|()| true)
    }
}

fn lengths(rows: &[SftRow]) -> Vec<usize> {
    rows.iter().map(|row| row.tokens.len()).collect()
}

/// This rank's part of the packed row of `rows[chosen]`.
fn part(rows: &[SftRow], chosen: &[usize], on: LossOn, axes: &Axes) -> PackedRow {
    let mut packed = PackedRow::new();
    for row in chosen.iter().map(|&i| &rows[i]) {
        packed.push_where(&row.tokens, |i| learned(row, on, i));
    }
    cut::part(&packed, &axes.sequence)
}

/// Adds the gradient of one packed row, and gives its part of the minibatch's loss.
fn microbatch(learner: &mut Learner, row: &PackedRow, weight: f32, recompute: bool) -> Sums {
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

/// Sum of the loss, right next tokens, and tokens, of one packed row.
fn look(role: &Role, row: &PackedRow) -> [f64; 3] {
    let (model, w) = (&role.transformer, &role.weights);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
    let found = model.logprobs_there(w, &hidden, &row.rows, &row.targets, 1.0, Also::Top).later().take();
    let (logprobs, right) = found.split_at(row.rows.len());
    let sum = |x: &[f32]| x.iter().map(|x| f64::from(*x)).sum::<f64>();
    [-sum(logprobs), sum(right), row.rows.len() as f64]
}
