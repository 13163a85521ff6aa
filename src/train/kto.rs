//! KTO on one page: labelled responses, KL of mismatched pairs -> log-probabilities -> loss -> gradient -> step (arXiv:2402.01306).

use super::job::{Ended, Job, Step};
use super::models::ModelSpec;
use super::reference::{self, Reference};
use super::supervised;
use crate::comm::{Axes, phase};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::data::{LabelledRow, Part, RowSource, Rows};
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::accumulation::accumulate;
use crate::learn::packed::PackedRow;
use crate::learn::score::Tokens;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::labelled::kto_loss;
use crate::metrics::eval_rows::{EvalResponses, EvalRow};
use crate::metrics::keys::{self, Metrics, named};
use crate::metrics::{Phase, Phases};
use crate::model::{Arch, Head, Saved};
use crate::text::Tokenizer;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Responses of each label that were counted.
const DESIRABLE: &str = "desirable";
const UNDESIRABLE: &str = "undesirable";

pub struct Kto {
    learner: Learner,
    reference: Reference<1>,
    source: RowSource<LabelledRow>,
    tokenizer: Arc<Tokenizer>,
}

/// What the policy's log-probabilities of a minibatch are compared with.
struct Known {
    /// Sums of the reference's log-probabilities of each response.
    reference: Vec<[f64; 1]>,
    kl: f64,
}

/// What is counted of a response.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Judged {
    /// Its share of the minibatch's.
    loss: f64,
    /// beta times the log-ratio to the reference.
    reward: f64,
    /// By how much that is above beta times the KL where it is desirable, and below where not.
    margin: f64,
}

impl Job for Kto {
    type Row = LabelledRow;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let (model, optim) = (&config.model, &config.optim.actor);
        vec![
            ModelSpec::new(RoleName::Actor, &model.actor, Head::LanguageModel, Some(optim)),
            ModelSpec::new(RoleName::Reference, model.reference_dir(), Head::LanguageModel, None),
        ]
    }

    fn shape(config: &Config) -> StepShape {
        // Both models score mismatched pairs, and the reference each row.
        supervised::shape(Part::Labelled, config.kto.minibatch_samples, config.kto.microbatch_tokens_max, 3)
    }

    fn check_rows(_config: &Config, source: &RowSource<LabelledRow>, _tokenizer: &Tokenizer) -> Result<()> {
        let mut found = [false; 2];
        source.check_each(|row| {
            found[usize::from(row.is_desirable)] = true;
            Ok(())
        })?;
        both_labels(found)
    }

    fn new(
        _run: &Run,
        _arch: &Arch,
        mut learners: Vec<Learner>,
        mut frozen: Vec<Role>,
        source: RowSource<LabelledRow>,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let all = "a job without a placement has all models on each rank";
        let (learner, reference) = (learners.pop().expect(all), Reference::new(frozen.pop().expect(all)));
        Ok(Self { learner, reference, source, tokenizer })
    }

    fn rows(&self) -> &Rows {
        &self.source
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        vec![&mut self.learner]
    }

    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        phase::set(step.number, "score");
        let rows = self.source.next(run.config.kto.minibatch_samples);
        let rows = run.ranks.all.agree(rows)?;
        let known = self.known(run, &rows, &mut step.phases);
        phase::set(step.number, "train");
        let timers = &mut step.timers;
        let sums = step.phases.time(Phase::Train, || timers.train(|| self.update(run, &rows, &known)))?;
        let mut numbers =
            sums.means(&[(keys::DESIRABLE_REWARD_MEAN, DESIRABLE), (keys::UNDESIRABLE_REWARD_MEAN, UNDESIRABLE)]);
        let accuracy = sums.get(keys::ACCURACY) / rows.len() as f64;
        numbers.extend([(keys::LOSS, sums.get(keys::LOSS)), (keys::ACCURACY, accuracy), (keys::KL_MEAN, known.kl)]);
        Ok(supervised::learned(run, step, &self.learner, numbers, rows.len(), lengths(&rows), &self.source))
    }

    /// Loss on held-out rows, and the share of them whose reward is above the KL where they are desirable, and below where not.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Option<Metrics>> {
        let start = Instant::now();
        let rows = run.ranks.all.agree(self.source.eval_rows(run.config.eval.samples_max))?;
        if rows.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let known = self.known(run, &rows, &mut Phases::start());
        let (config, axes, role) = (&run.config, &run.ranks.axes, &self.learner.role);
        let tokens_max = config.kto.microbatch_tokens_max;
        let judged = supervised::evaluate(run, role, &lengths(&rows), tokens_max, |chosen| {
            let whole = pack(&rows, chosen);
            let row = whole.shard(&axes.sequence);
            let (model, w) = (&role.transformer, &role.weights);
            let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
            let (logprobs, _) = model.logprobs(w, &hidden, &row.rows, &row.targets, 1.0, false);
            loss(config, axes, &whole, &logprobs, &rows, chosen, &known).0
        })?;
        let Some(mut judged) = judged else { return Ok(None) };
        judged.sort_by_key(|(i, _)| *i);
        let record = |(i, of): &(usize, Judged)| record(&self.tokenizer, step, &rows[*i], of);
        let recorded = run.recorder.eval_rows(step, judged.iter().map(record));
        run.ranks.all.agree(recorded)?;
        let sums = sums(&rows, &judged);
        Ok(Some(named([
            (keys::EVAL_LOSS, sums.get(keys::LOSS)),
            (keys::EVAL_ACCURACY, sums.get(keys::ACCURACY) / rows.len() as f64),
            (keys::EVAL_SAMPLES, rows.len() as f64),
            (keys::EVAL_TIME_S, start.elapsed().as_secs_f64()),
        ])))
    }
}

impl Kto {
    /// The reference's sums, and KL = max(0, mean of sum_t (l - l_ref)) over mismatched pairs: each prompt with the response of the
    /// row behind it, the last one with the first row's. None of this is learned from. All ranks call this.
    fn known(&mut self, run: &Run, rows: &[LabelledRow], phases: &mut Phases) -> Known {
        let tokens_max = run.config.kto.microbatch_tokens_max;
        let reference = self.reference.of_rows(run, rows, |row| (row.id, [tokens(row)]), tokens_max, phases);
        let context = self.learner.role.arch().context;
        let others = rows.iter().cycle().skip(1);
        let mismatched: Vec<Tokens> =
            rows.iter().zip(others).map(|(row, other)| mismatch(row, other, context)).collect();
        let theirs = self.reference.sums(run, &mismatched, tokens_max, phases);
        let own = phases.time(Phase::Score, || reference::sums(&self.learner.role, run, &mismatched, tokens_max));
        let sum: f64 = own.iter().zip(theirs).map(|(own, theirs)| own - theirs).sum();
        // One row has no other.
        let kl = if rows.len() > 1 { (sum / rows.len() as f64).max(0.0) } else { 0.0 };
        Known { reference, kl }
    }

    /// One optimizer step on `rows`.
    fn update(&mut self, run: &Run, rows: &[LabelledRow], known: &Known) -> Result<Sums> {
        let (config, axes) = (&run.config, &run.ranks.axes);
        let (recompute, tokens_max) = (config.gradient.recompute, config.kto.microbatch_tokens_max);
        let sums = accumulate(&mut self.learner, axes, &lengths(rows), tokens_max, |learner, chosen| {
            let Learner { role, sum, .. } = learner;
            let (model, w) = (&role.transformer, &role.weights);
            let whole = pack(rows, chosen);
            let row = whole.shard(&axes.sequence);
            let mut saved = Saved::new(recompute);
            let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
            // The loss is of whole responses: all log-probabilities are needed before any derivative.
            let (logprobs, _) = model.logprobs(w, &hidden, &row.rows, &row.targets, 1.0, false);
            let (judged, slopes) = loss(config, axes, &whole, &logprobs, rows, chosen, known);
            let slopes = row.select(&slopes);
            let mut given = |range: Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], _: &mut [f32]| {
                dl.copy_from_slice(&slopes[range]);
            };
            let grads = &mut sum.grads;
            let (dhidden, ..) = model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut given, grads);
            model.backward(w, saved, &row.cu_seqlens, dhidden, grads);
            sums(rows, &judged)
        });
        let part = |chosen: &[usize]| pack(rows, chosen).shard(&axes.sequence);
        self.learner.step_if_finite(axes, recompute, sums.get(keys::LOSS), part)?;
        Ok(sums)
    }
}

/// Refuses rows of one label: mostly the labels are in another field.
fn both_labels(found: [bool; 2]) -> Result<()> {
    let only = match found {
        [true, false] => "false",
        [false, true] => "true",
        _ => return Ok(()),
    };
    Err(Error::data(format!("every row is labelled {only}, a kto job needs desirable and undesirable ones"))
        .hint("look at data.label_key; responses that are all good are for job.kind = \"sft\""))
}

fn lengths(rows: &[LabelledRow]) -> Vec<usize> {
    rows.iter().map(|row| row.tokens.len()).collect()
}

fn tokens(row: &LabelledRow) -> Tokens<'_> {
    Tokens { tokens: (&row.tokens).into(), prompt_tokens: row.prompt_tokens }
}

/// The prompt of a row with the response of another one, as much of it as the model's context takes.
fn mismatch(row: &LabelledRow, other: &LabelledRow, context: usize) -> Tokens<'static> {
    let mut tokens = [&row.tokens[..row.prompt_tokens], &other.tokens[other.prompt_tokens..]].concat();
    tokens.truncate(context);
    Tokens { tokens: tokens.into(), prompt_tokens: row.prompt_tokens }
}

/// The rows `rows[chosen]`, one behind the other; predicted are the responses.
fn pack(rows: &[LabelledRow], chosen: &[usize]) -> PackedRow {
    let mut packed = PackedRow::new();
    for &i in chosen {
        packed.push(&rows[i].tokens, rows[i].prompt_tokens);
    }
    packed
}

/// What this rank counts of the rows in `whole`, given the log-probabilities of its own tokens; and the derivatives of the loss by
/// those of all tokens, which ranks of a ring compute alike. Losses are divided by the number of all `rows`.
fn loss(
    config: &Config,
    axes: &Axes,
    whole: &PackedRow,
    logprobs: &[f32],
    rows: &[LabelledRow],
    chosen: &[usize],
    known: &Known,
) -> (Vec<(usize, Judged)>, Vec<f32>) {
    let (logprobs, weight) = (whole.gather(&axes.sequence, logprobs), 1.0 / rows.len() as f64);
    let (mut judged, mut slopes) = (Vec::new(), vec![0.0; logprobs.len()]);
    for (&i, ends) in chosen.iter().zip(whole.row_offsets.windows(2)) {
        let (of_row, is_desirable) = (ends[0]..ends[1], rows[i].is_desirable);
        let h = logprobs[of_row.clone()].iter().map(|l| f64::from(*l)).sum::<f64>() - known.reference[i][0];
        let (loss, slope) = kto_loss(&config.kto, is_desirable, h, known.kl);
        slopes[of_row].fill((weight * slope) as f32);
        let (beta, sign) = (config.kto.beta, if is_desirable { 1.0 } else { -1.0 });
        if axes.sequence.rank() == 0 {
            let margin = sign * beta * (h - known.kl);
            judged.push((i, Judged { loss: weight * loss, reward: beta * h, margin }));
        }
    }
    (judged, slopes)
}

/// Sums over rows by their places in `rows`.
fn sums(rows: &[LabelledRow], judged: &[(usize, Judged)]) -> Sums {
    let mut sums = Sums::default();
    for (i, Judged { loss, reward, margin }) in judged {
        let (count, key) = if rows[*i].is_desirable {
            (DESIRABLE, keys::DESIRABLE_REWARD_MEAN)
        } else {
            (UNDESIRABLE, keys::UNDESIRABLE_REWARD_MEAN)
        };
        let right = f64::from(u8::from(*margin > 0.0));
        sums.add(&Sums::of([(keys::LOSS, *loss), (keys::ACCURACY, right), (count, 1.0), (key, *reward)]));
    }
    sums
}

fn record(tokenizer: &Tokenizer, step: u64, row: &LabelledRow, judged: &Judged) -> Result<EvalRow> {
    let (prompt, response) = row.tokens.split_at(row.prompt_tokens);
    let response = tokenizer.decode(response, true)?;
    Ok(EvalRow {
        step,
        row: row.id,
        prompt: tokenizer.decode_prompt(prompt)?,
        responses: EvalResponses::Labelled { response, label: row.is_desirable, reward: judged.reward },
        margin: judged.margin,
        correct: judged.margin > 0.0,
    })
}
