//! Supervised fine-tuning on one page: rows -> loss -> gradient -> step.

use super::role::{Learner, Role};
use super::setup::{Run, check_vocabulary};
use super::state::{self, State};
use super::{finish, report};
use crate::checkpoint;
use crate::comm::phase;
use crate::config::job::LossOn;
use crate::data::{self, SftRow, SftSource, packing};
use crate::error::{Error, Result};
use crate::gradient::microbatch::PackedRow;
use crate::loss::token::cross_entropy;
use crate::metrics::{Phase, Phases, keys};
use crate::model::{Head, Saved};
use std::ops::Range;
use std::time::Instant;

/// Bytes of logits that an evaluation holds at once.
const EVAL_LOGITS_BYTES: usize = 32 << 20;

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
    finish::finish(&mut run, &sft.learner.role, sft.state.step, sft.source.ledger())
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
        let actor = run.role("actor", &config.model.actor, Head::LanguageModel)?;
        run.group.agree(check_vocabulary(&actor, &tokenizer))?;
        let (cache, vocabulary) = (run.dir.join("data"), actor.arch().vocabulary);
        let shard = || data::prepare(&config.data, data::Part::Demonstration, &tokenizer, vocabulary, &cache).map(drop);
        run.group.agree(if run.group.rank() == 0 { shard() } else { Ok(()) })?;
        let source = SftSource::open(&config.data, &tokenizer, vocabulary, &cache, config.job.seed);
        let mut source = run.group.agree(source.and_then(|s| s.check_context(actor.arch().context).map(|()| s)))?;
        let steps = match config.job.steps {
            0 => (config.sft.epochs * source.epoch_rows() as f64 / config.sft.minibatch_samples as f64).ceil() as u64,
            steps => steps,
        };
        if steps == 0 {
            return run.group.agree(Err(Error::usage("sft.epochs and job.steps are both 0: nothing to do")));
        }
        let plan = report::memory_plan(&config, &actor, None, None, run.group.size());
        run.check_resources(&plan, std::iter::once(&actor))?;
        let learner = Learner::new(actor, &config.optim.actor, &config.gradient, steps, &run.axes, 1);
        let mut learner = run.group.agree(learner)?;
        run.offload_learner(&mut learner)?;
        let mut state = State {
            step: 0,
            cursor: source.cursor().clone(),
            ledger: source.ledger().clone(),
            advantage: None,
            updates: Vec::new(),
            has_work: false,
            eval_due: config.eval.every_steps > 0,
        };
        let mut resumed_from = None;
        if let Some(checkpoint) = checkpoint::resume(&run.checkpoints(), &run.group)? {
            (state, _) = state::restore(run, &checkpoint, &mut [&mut learner])?;
            run.group.agree(source.restore(&state.cursor, &state.ledger))?;
            resumed_from = Some(state.step);
        }
        if !run.dry_run {
            let cut = run.recorder.cut_back(state.step);
            run.group.agree(cut)?;
        }
        run.banner(steps, resumed_from, &[&learner.role], &plan);
        Ok(Self { learner, source, state, steps })
    }

    fn train(&mut self, run: &mut Run) -> Result<()> {
        let config = run.config.clone();
        let every = config.eval.every_steps;
        if self.state.eval_due {
            self.evaluate(run, self.state.step)?;
            self.state.eval_due = false;
        }
        while self.state.step < self.steps {
            let step = self.state.step + 1;
            phase::set(step, "train");
            let mut phases = Phases::start();
            let rows = self.source.next(config.sft.minibatch_samples);
            let rows = run.group.agree(rows)?;
            let loss = phases.time(Phase::Train, || self.update(run, &rows))?;
            (self.state.cursor, self.state.ledger) = (self.source.cursor().clone(), self.source.ledger().clone());
            self.state.step = step;
            let tokens: usize = rows.iter().map(|r| r.tokens.len()).sum();
            let report = self.learner.report;
            let (resident, arena) = run.memory_peaks();
            let mut values = vec![
                (keys::LOSS, loss),
                (keys::GRAD_NORM, report.grad_norm),
                (keys::LR, report.lr),
                (keys::SAMPLES, rows.len() as f64),
                (keys::TOKENS, tokens as f64),
                (keys::EPOCH, (step * rows.len() as u64) as f64 / self.source.epoch_rows() as f64),
                (keys::MEMORY_PEAK_BYTES, resident),
                (keys::MEMORY_ARENA_PEAK_BYTES, arena),
            ];
            values.extend(phases.values(tokens as u64));
            let recorded = run.recorder.step(step, &values);
            run.group.agree(recorded)?;
            if every > 0 && (step.is_multiple_of(every) || step == self.steps) {
                self.evaluate(run, step)?;
            }
            let stop = step < self.steps && run.stop_requested();
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
        let (config, group) = (&run.config, &run.group);
        let on = config.sft.loss_on;
        let total: usize = rows.iter().map(|r| learned_tokens(r, on)).sum();
        if total == 0 {
            return Err(Error::data("a minibatch has no token to learn").hint("are the responses of these rows empty?"));
        }
        let weight = 1.0 / total as f32;
        let lengths: Vec<usize> = rows.iter().map(|r| r.tokens.len()).collect();
        let dealt = packing::deal(&lengths, self.learner.sum.chunks(group));
        let mut mine = Vec::new();
        for (leaf, chunk) in self.learner.sum.own_chunks(group) {
            self.learner.sum.begin_chunk();
            let members: Vec<&SftRow> = dealt[chunk].iter().map(|&i| &rows[i]).collect();
            let lengths: Vec<usize> = members.iter().map(|r| r.tokens.len()).collect();
            let mut loss = 0.0;
            for part in packing::microbatches(&lengths, config.sft.microbatch_tokens_max) {
                let part: Vec<&SftRow> = part.iter().map(|&i| members[i]).collect();
                loss += self.microbatch(&packed(&part, on), weight, config.gradient.recompute);
            }
            self.learner.sum.end_chunk(leaf);
            mine.extend([chunk as f64, loss]);
        }
        let gathered = group.all_gather_f64(&mine).concat();
        let mut losses: Vec<&[f64]> = gathered.chunks_exact(2).collect();
        losses.sort_by(|a, b| a[0].total_cmp(&b[0]));
        self.learner.step(&run.axes)?;
        Ok(losses.iter().map(|row| row[1]).sum())
    }

    fn microbatch(&mut self, row: &PackedRow, weight: f32, recompute: bool) -> f64 {
        let Learner { role, sum, .. } = &mut self.learner;
        let (model, w) = (&role.transformer, &role.weights);
        let mut saved = Saved::new(recompute);
        let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
        let weights = vec![weight; row.rows.len()];
        let mut loss = 0.0;
        let mut local = |r: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]| {
            loss += cross_entropy(l, &weights[r], dlogprobs);
            dentropy.fill(0.0);
        };
        let (dhidden, _, _) =
            model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut local, &mut sum.grads);
        model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
        loss
    }

    /// Loss and share of right next tokens on the eval split.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<()> {
        phase::set(step, "eval");
        let start = Instant::now();
        let mut rows = self.source.eval_rows()?;
        if run.config.eval.samples_max > 0 {
            rows.truncate(run.config.eval.samples_max);
        }
        if rows.is_empty() {
            return Ok(());
        }
        let on = run.config.sft.loss_on;
        let lengths: Vec<usize> = rows.iter().map(|r| r.tokens.len()).collect();
        let dealt = packing::deal(&lengths, run.group.size());
        let members: Vec<&SftRow> = dealt[run.group.rank()].iter().map(|&i| &rows[i]).collect();
        let lengths: Vec<usize> = members.iter().map(|r| r.tokens.len()).collect();
        let mut sums = [0.0; 3];
        for part in packing::microbatches(&lengths, run.config.sft.microbatch_tokens_max) {
            let part: Vec<&SftRow> = part.iter().map(|&i| members[i]).collect();
            let found = look(&self.learner.role, &packed(&part, on));
            sums.iter_mut().zip(found).for_each(|(sum, x)| *sum += x);
        }
        run.group.all_reduce_sum_f64(&mut sums);
        let [loss, right, tokens] = sums;
        let values = [
            (keys::EVAL_LOSS, loss / tokens),
            (keys::EVAL_ACCURACY, right / tokens),
            (keys::EVAL_SAMPLES, rows.len() as f64),
            (keys::EVAL_TIME_S, start.elapsed().as_secs_f64()),
        ];
        let recorded = run.recorder.eval(step, &values);
        run.group.agree(recorded)
    }
}

fn packed(rows: &[&SftRow], on: LossOn) -> PackedRow {
    let mut packed = PackedRow::new();
    for row in rows {
        packed.push_where(&row.tokens, |i| learned(row, on, i));
    }
    packed
}

/// Sum of the loss, right next tokens, and tokens, of one packed row.
fn look(role: &Role, row: &PackedRow) -> [f64; 3] {
    let (model, w) = (&role.transformer, &role.weights);
    let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
    let (logprobs, _) = model.logprobs(w, &hidden, &row.rows, &row.targets, 1.0, false);
    let loss: f64 = logprobs.iter().map(|l| -f64::from(*l)).sum();
    let step = (EVAL_LOGITS_BYTES / 4 / role.arch().vocabulary).max(1);
    let mut right = 0usize;
    for (rows, targets) in row.rows.chunks(step).zip(row.targets.chunks(step)) {
        let logits = model.logits(w, &hidden, rows);
        right += targets.iter().enumerate().filter(|(i, target)| argmax(logits.row(*i)) == **target as usize).count();
    }
    [loss, right as f64, row.rows.len() as f64]
}

/// The first of the largest.
fn argmax(row: &[f32]) -> usize {
    row.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best }).0
}
