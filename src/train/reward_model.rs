//! A reward model on one page: pairs -> scores -> loss -> gradient -> step (arXiv:2203.02155).

use super::job::{Ended, Job, Step};
use super::models::ModelSpec;
use super::pairs::{self, Judged};
use super::supervised;
use crate::comm::{Axes, phase};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::data::{PairRow, Part, RowSource, Rows};
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::accumulation::accumulate;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::preference::pair_loss;
use crate::metrics::Phase;
use crate::metrics::keys::{self, Metrics};
use crate::model::{Arch, Head, Saved};
use crate::text::Tokenizer;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

pub struct RewardModel {
    learner: Learner,
    source: RowSource<PairRow>,
    tokenizer: Arc<Tokenizer>,
}

impl Job for RewardModel {
    type Row = PairRow;

    fn models(config: &Config) -> Vec<ModelSpec> {
        vec![ModelSpec::new(RoleName::Actor, &config.model.actor, Head::Value, Some(&config.optim.actor))]
    }

    fn shape(config: &Config) -> StepShape {
        let of = &config.reward_model;
        supervised::shape(Part::Pair, of.minibatch_samples, of.microbatch_tokens_max, 0)
    }

    fn new(
        _run: &Run,
        _arch: &Arch,
        mut learners: Vec<Learner>,
        _frozen: Vec<Role>,
        source: RowSource<PairRow>,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let learner = learners.pop().expect("a job without a placement has all models on each rank");
        Ok(Self { learner, source, tokenizer })
    }

    fn rows(&self) -> &Rows {
        &self.source
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        vec![&mut self.learner]
    }

    /// Mean and standard deviation of the scores in the last evaluation.
    fn state(&self) -> Value {
        json!(self.learner.role.arch().reward_mean_std)
    }

    fn restore(&mut self, state: Value, _work: Option<&[u8]>) -> Result<()> {
        self.learner.role.transformer.arch.reward_mean_std = mean_std(&state)?;
        Ok(())
    }

    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        phase::set(step.number, "train");
        let rows = self.source.next(run.config.reward_model.minibatch_samples);
        let rows = run.ranks.all.agree(rows)?;
        let timers = &mut step.timers;
        let sums = step.phases.time(Phase::Train, || timers.train(|| self.update(run, &rows)))?;
        Ok(pairs::learned(run, step, &self.learner, &sums, &rows, &self.source))
    }

    /// Loss, accuracy and margin on held-out pairs; and how scores are distributed there, by which others normalise them.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Option<Metrics>> {
        let start = Instant::now();
        let rows = run.ranks.all.agree(self.source.eval_rows(run.config.eval.samples_max))?;
        if rows.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let (config, axes) = (&run.config, &run.ranks.axes);
        let role = &self.learner.role;
        let tokens_max = config.reward_model.microbatch_tokens_max;
        let judged = supervised::evaluate(run, role, &pairs::lengths(&rows), tokens_max, |chosen| {
            let whole = pack(&rows, chosen);
            let row = whole.shard(&axes.sequence);
            let (model, w) = (&role.transformer, &role.weights);
            let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
            let scores = whole.gather(&axes.sequence, &model.values(w, &hidden, &row.rows));
            loss(config, axes, &rows, chosen, &scores, 1.0).0
        })?;
        let Some(judged) = judged else { return Ok(None) };
        let scores = || judged.iter().flat_map(|(_, pair)| [pair.chosen_reward, pair.rejected_reward]);
        let n = 2.0 * rows.len() as f64;
        let mean = scores().sum::<f64>() / n;
        let std = (scores().map(|score| (score - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt();
        self.learner.role.transformer.arch.reward_mean_std = Some((mean as f32, std as f32));
        pairs::evaluated(run, step, start, &self.tokenizer, &rows, judged).map(Some)
    }
}

/// Mean and standard deviation in the state of a checkpoint.
pub fn mean_std(state: &Value) -> Result<Option<(f32, f32)>> {
    Deserialize::deserialize(state).map_err(|e| Error::data(format!("the checkpoint's state: {e}")))
}

impl RewardModel {
    /// One optimizer step on `rows`.
    fn update(&mut self, run: &Run, rows: &[PairRow]) -> Result<Sums> {
        let (config, axes) = (&run.config, &run.ranks.axes);
        let (recompute, tokens_max) = (config.gradient.recompute, config.reward_model.microbatch_tokens_max);
        let weight = 1.0 / rows.len() as f64;
        let sums = accumulate(&mut self.learner, axes, &pairs::lengths(rows), tokens_max, |learner, chosen| {
            let Learner { role, sum, .. } = learner;
            let (model, w) = (&role.transformer, &role.weights);
            let whole = pack(rows, chosen);
            let row = whole.shard(&axes.sequence);
            let mut saved = Saved::new(recompute);
            let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
            let scores = whole.gather(&axes.sequence, &model.values(w, &hidden, &row.rows));
            let (judged, slopes) = loss(config, axes, rows, chosen, &scores, weight);
            let dhidden = model.values_backward(w, &hidden, &row.rows, &row.select(&slopes), &mut sum.grads);
            model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
            pairs::sums(&judged, weight)
        });
        let part = |chosen: &[usize]| pack(rows, chosen).shard(&axes.sequence);
        self.learner.step_if_finite(axes, recompute, sums.get(keys::LOSS), part)?;
        Ok(sums)
    }
}

/// Both sides of the pairs `rows[chosen]`, one behind the other; scored is the last token of each.
fn pack(rows: &[PairRow], chosen: &[usize]) -> PackedRow {
    let mut packed = PackedRow::new();
    for row in chosen.iter().map(|&i| &rows[i]) {
        packed.push_end(&row.chosen);
        packed.push_end(&row.rejected);
    }
    packed
}

/// What this rank counts of pairs with these scores, and the derivatives of the loss by the scores. Ranks of a ring compute the same.
fn loss(
    config: &Config,
    axes: &Axes,
    rows: &[PairRow],
    chosen: &[usize],
    scores: &[f32],
    weight: f64,
) -> (Vec<Judged>, Vec<f32>) {
    let (mut judged, mut slopes) = (Vec::new(), Vec::new());
    for (&i, scores) in chosen.iter().zip(scores.chunks(2)) {
        let [better, worse] = [0, 1].map(|side| f64::from(scores[side]));
        let (pair, by_score) = pair_loss(config.reward_model.loss, better, worse, f64::from(rows[i].margin));
        slopes.extend(by_score.map(|slope| (weight * slope) as f32));
        if axes.sequence.rank() == 0 {
            judged.push((i, pair));
        }
    }
    (judged, slopes)
}
