//! A process reward model on one page: texts with labelled steps -> log-probabilities of reward tokens -> loss -> gradient -> step
//! (arXiv:2305.20050). What follows a placeholder, by the language model's head, is the label of the step before it.

use super::job::{Ended, Job, Step};
use super::models::ModelSpec;
use super::supervised;
use crate::comm::phase;
use crate::config::Config;
use crate::config::labelled::StepRewardConfig;
use crate::config::mesh::RoleName;
use crate::data::{Part, RowSource, Rows, StepLabel, StepRow};
use crate::device::null;
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::accumulation::accumulate;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::labelled::{step_loss, step_margin};
use crate::metrics::Phase;
use crate::metrics::eval_rows::{EvalResponses, EvalRow};
use crate::metrics::keys::{self, Metrics, named};
use crate::model::{Arch, Head, Saved};
use crate::text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Steps that were counted.
const STEPS: &str = "steps";
/// Rows of a plan have no text: so many tokens are taken to be a step.
const PLANNED_STEP_TOKENS: usize = 16;

pub struct StepReward {
    learner: Learner,
    source: RowSource<StepRow>,
    marks: Marks,
    tokenizer: Arc<Tokenizer>,
}

/// The tokens that steps and labels are written with.
struct Marks {
    config: StepRewardConfig,
    placeholder: u32,
    rewards: Vec<u32>,
}

/// A step as the model judged it, by the place of its row and its own there.
#[derive(Serialize, Deserialize)]
struct Judged {
    row: usize,
    step: usize,
    loss: f64,
    /// Probability of the first reward token.
    reward: f64,
    margin: f64,
    is_right: bool,
}

/// Where a placeholder stands, and the probabilities that the reward tokens are to have there.
type Placed = (u32, Vec<f64>);

impl Job for StepReward {
    type Row = StepRow;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let optim = &config.optim.actor;
        vec![ModelSpec::new(RoleName::Actor, &config.model.actor, Head::LanguageModel, Some(optim))]
    }

    fn shape(config: &Config) -> StepShape {
        let of = &config.step_reward;
        supervised::shape(Part::Steps, of.minibatch_samples, of.microbatch_tokens_max, 0)
    }

    fn check_rows(config: &Config, source: &RowSource<StepRow>, tokenizer: &Tokenizer) -> Result<()> {
        let marks = Marks::new(&config.step_reward, tokenizer)?;
        source.check_each(|row| marks.steps(&row).map(|_| ()))
    }

    fn new(
        run: &Run,
        _arch: &Arch,
        mut learners: Vec<Learner>,
        _frozen: Vec<Role>,
        source: RowSource<StepRow>,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let marks = Marks::new(&run.config.step_reward, &tokenizer)?;
        let learner = learners.pop().expect("a job without a placement has all models on each rank");
        Ok(Self { learner, source, marks, tokenizer })
    }

    fn rows(&self) -> &Rows {
        &self.source
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        vec![&mut self.learner]
    }

    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        phase::set(step.number, "train");
        let rows = self.source.next(run.config.step_reward.minibatch_samples);
        let rows = run.ranks.all.agree(rows)?;
        let timers = &mut step.timers;
        let sums = step.phases.time(Phase::Train, || timers.train(|| self.update(run, &rows)))?;
        let mut numbers = sums.means(&[(keys::ACCURACY, STEPS)]);
        numbers.push((keys::LOSS, sums.get(keys::LOSS)));
        Ok(supervised::learned(run, step, &self.learner, numbers, rows.len(), lengths(&rows), &self.source))
    }

    /// Loss and accuracy of the steps of held-out rows.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Option<Metrics>> {
        let start = Instant::now();
        let rows = run.ranks.all.agree(self.source.eval_rows(run.config.eval.samples_max))?;
        if rows.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let placed = self.placed(&rows)?;
        let (axes, role) = (&run.ranks.axes, &self.learner.role);
        let tokens_max = run.config.step_reward.microbatch_tokens_max;
        let judged = supervised::evaluate(run, role, &lengths(&rows), tokens_max, |chosen| {
            let row = self.marks.pack(&rows, &placed, chosen).shard(&axes.sequence);
            let (model, w) = (&role.transformer, &role.weights);
            let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
            let (logprobs, _) = model.logprobs(w, &hidden, &row.rows, &row.targets, 1.0, false);
            loss(&row, &logprobs, &placed, chosen, 1.0).0
        })?;
        let Some(mut judged) = judged else { return Ok(None) };
        judged.sort_by_key(|of| (of.row, of.step));
        let of_rows = judged.chunk_by(|a, b| a.row == b.row);
        let record = |of: &[Judged]| record(&self.tokenizer, step, &rows[of[0].row], &placed[of[0].row], of);
        let recorded = run.recorder.eval_rows(step, of_rows.map(record));
        run.ranks.all.agree(recorded)?;
        let sums = sums(&judged);
        let of_step = |key| sums.get(key) / sums.get(STEPS).max(1.0);
        Ok(Some(named([
            (keys::EVAL_LOSS, of_step(keys::LOSS)),
            (keys::EVAL_ACCURACY, of_step(keys::ACCURACY)),
            (keys::EVAL_SAMPLES, rows.len() as f64),
            (keys::EVAL_TIME_S, start.elapsed().as_secs_f64()),
        ])))
    }
}

impl StepReward {
    /// The steps of each row.
    fn placed(&self, rows: &[StepRow]) -> Result<Vec<Vec<Placed>>> {
        rows.iter().map(|row| self.marks.steps(row)).collect()
    }

    /// One optimizer step on `rows`.
    fn update(&mut self, run: &Run, rows: &[StepRow]) -> Result<Sums> {
        let (axes, recompute) = (&run.ranks.axes, run.config.gradient.recompute);
        let placed = self.placed(rows)?;
        let steps = placed.iter().flatten().count();
        if steps == 0 {
            return Err(Error::data("a minibatch has no step to learn").hint("data.row_tokens_max cut all of them off"));
        }
        let (weight, tokens_max) = (1.0 / steps as f64, run.config.step_reward.microbatch_tokens_max);
        let Self { learner, marks, .. } = self;
        let part = |chosen: &[usize]| marks.pack(rows, &placed, chosen).shard(&axes.sequence);
        let sums = accumulate(learner, axes, &lengths(rows), tokens_max, |learner, chosen| {
            let Learner { role, sum, .. } = learner;
            let (model, w) = (&role.transformer, &role.weights);
            let row = part(chosen);
            let mut saved = Saved::new(recompute);
            let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
            // A step needs the log-probabilities of all reward tokens before any derivative.
            let (logprobs, _) = model.logprobs(w, &hidden, &row.rows, &row.targets, 1.0, false);
            let (judged, slopes) = loss(&row, &logprobs, &placed, chosen, weight);
            let mut given = |range: Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], _: &mut [f32]| {
                dl.copy_from_slice(&slopes[range]);
            };
            let grads = &mut sum.grads;
            let (dhidden, ..) = model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut given, grads);
            model.backward(w, saved, &row.cu_seqlens, dhidden, grads);
            sums(&judged)
        });
        learner.step_if_finite(axes, recompute, sums.get(keys::LOSS), part)?;
        Ok(sums)
    }
}

impl Marks {
    /// Refuses texts that are not one token.
    fn new(config: &StepRewardConfig, tokenizer: &Tokenizer) -> Result<Self> {
        if null::is_active() {
            // A plan has no tokenizer.
            return Ok(Self { config: config.clone(), placeholder: 0, rewards: vec![0; config.reward_tokens.len()] });
        }
        let id = |key: &str, text: &String| match tokenizer.encode(text, false)?[..] {
            [id] => Ok(id),
            ref many => Err(Error::usage(format!("step_reward.{key}: {text:?} is {} tokens, needed one", many.len()))
                .hint("take a text that is one token of the model's tokenizer, or add it there as a special token")),
        };
        let rewards = config.reward_tokens.iter().map(|text| id("reward_tokens", text)).collect::<Result<_>>()?;
        Ok(Self { config: config.clone(), placeholder: id("placeholder", &config.placeholder)?, rewards })
    }

    /// The steps of a row, each with its label; of one that was cut, those that are left.
    fn steps(&self, row: &StepRow) -> Result<Vec<Placed>> {
        if null::is_active() {
            // The last one ends with the row.
            let first = row.tokens.len().saturating_sub(1) % PLANNED_STEP_TOKENS;
            let ends = (first..row.tokens.len()).step_by(PLANNED_STEP_TOKENS);
            return ends.map(|at| Ok((at as u32, self.wanted(&StepLabel::Soft(1.0))?))).collect();
        }
        let places = (0..row.tokens.len()).filter(|&i| row.tokens[i] == self.placeholder);
        let (steps, labels, placeholder) = (places.clone().count(), row.labels.len(), &self.config.placeholder);
        if steps == 0 && !row.is_cut {
            return Err(Error::data(format!("there is no placeholder {placeholder:?} in the text"))
                .hint("step_reward.placeholder stands behind each step, as a token of its own"));
        }
        if labels < steps || labels > steps && !row.is_cut {
            return Err(Error::data(format!("{labels} labels for {steps} placeholders {placeholder:?}")));
        }
        places.zip(&row.labels).map(|(i, label)| Ok((i as u32, self.wanted(label)?))).collect()
    }

    /// The probabilities that the reward tokens are to have.
    fn wanted(&self, label: &StepLabel) -> Result<Vec<f64>> {
        let names = &self.config.reward_tokens;
        match label {
            StepLabel::Token(text) if names.contains(text) => {
                Ok(names.iter().map(|name| f64::from(u8::from(name == text))).collect())
            }
            StepLabel::Token(text) => Err(Error::data(format!("label {text:?} is no reward token"))
                .hint(format!("step_reward.reward_tokens are {names:?}"))),
            StepLabel::Soft(p) if names.len() == 2 || null::is_active() => {
                Ok([*p, 1.0 - p].into_iter().chain(std::iter::repeat(0.0)).take(names.len()).collect())
            }
            StepLabel::Soft(p) => Err(Error::data(format!("label {p} with {} reward tokens", names.len()))
                .hint("a number is the probability of the first of exactly two step_reward.reward_tokens")),
        }
    }

    /// The rows `rows[chosen]`, one behind the other; each placeholder predicts every reward token.
    fn pack(&self, rows: &[StepRow], placed: &[Vec<Placed>], chosen: &[usize]) -> PackedRow {
        let mut packed = PackedRow::new();
        for &i in chosen {
            let of_step = |&(at, _): &Placed| self.rewards.iter().map(move |&reward| (at, reward));
            packed.push_at(&rows[i].tokens, placed[i].iter().flat_map(of_step));
        }
        packed
    }
}

fn lengths(rows: &[StepRow]) -> Vec<usize> {
    rows.iter().map(|row| row.tokens.len()).collect()
}

/// The steps in `row`, this rank's part of the rows `chosen`, their losses with this weight; and the derivatives of these by the
/// log-probabilities: those of the reward tokens of a step stand together.
fn loss(
    row: &PackedRow,
    logprobs: &[f32],
    placed: &[Vec<Placed>],
    chosen: &[usize],
    weight: f64,
) -> (Vec<Judged>, Vec<f32>) {
    let steps_of = |&i: &usize| placed[i].iter().enumerate().map(move |(step, (_, wanted))| (i, step, wanted));
    let steps: Vec<(usize, usize, &Vec<f64>)> = chosen.iter().flat_map(steps_of).collect();
    let (mut judged, mut slopes) = (Vec::new(), Vec::with_capacity(logprobs.len()));
    let rewards = steps.first().map_or(1, |(.., wanted)| wanted.len());
    for (logprobs, indices) in logprobs.chunks(rewards).zip(row.row_indices.chunks(rewards)) {
        let (row, step, wanted) = steps[indices[0] / rewards];
        let (loss, by_logprob, p) = step_loss(logprobs, wanted);
        slopes.extend(by_logprob.into_iter().map(|slope| (weight * slope) as f32));
        let (is_right, margin) = step_margin(&p, wanted);
        judged.push(Judged { row, step, loss: weight * loss, reward: p[0], margin, is_right });
    }
    (judged, slopes)
}

fn sums(judged: &[Judged]) -> Sums {
    let mut sums = Sums::default();
    for Judged { loss, is_right, .. } in judged {
        let right = f64::from(u8::from(*is_right));
        sums.add(&Sums::of([(keys::LOSS, *loss), (keys::ACCURACY, right), (STEPS, 1.0)]));
    }
    sums
}

/// A row whose steps are `judged`, each with the text up to its placeholder.
fn record(tokenizer: &Tokenizer, step: u64, row: &StepRow, placed: &[Placed], judged: &[Judged]) -> Result<EvalRow> {
    let mut from = 0;
    let text_to = |(at, _): &Placed| {
        let tokens = &row.tokens[from..=*at as usize];
        from = *at as usize + 1;
        tokenizer.decode_prompt(tokens)
    };
    let steps: Vec<String> = placed.iter().map(text_to).collect::<Result<_>>()?;
    let labels = row.labels[..steps.len()].iter().map(|label| json!(label)).collect();
    Ok(EvalRow {
        step,
        row: row.id,
        prompt: tokenizer.decode_prompt(&row.tokens)?,
        responses: EvalResponses::Steps { steps, labels, rewards: judged.iter().map(|of| of.reward).collect() },
        margin: judged.iter().map(|of| of.margin).fold(f64::INFINITY, f64::min),
        correct: judged.iter().all(|of| of.is_right),
    })
}
