//! DPO and its relatives on one page: pairs -> log-probabilities of both sides -> loss -> gradient -> step (arXiv:2305.18290).

use super::job::{Ended, Job, Step};
use super::models::ModelSpec;
use super::pairs::{self, Judged};
use super::reference::Reference;
use super::supervised;
use crate::comm::{Axes, phase};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::data::{PairRow, Part, RowSource, Rows};
use crate::error::Result;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::accumulation::accumulate;
use crate::learn::packed::PackedRow;
use crate::learn::score::Tokens;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::preference::{PairLogprobs, preference_loss};
use crate::metrics::keys::{self, Metrics};
use crate::metrics::{Phase, Phases};
use crate::model::{Arch, Head, Saved};
use crate::text::Tokenizer;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

pub struct Preference {
    learner: Learner,
    /// None where the loss has no reference.
    reference: Option<Reference<2>>,
    source: RowSource<PairRow>,
    tokenizer: Arc<Tokenizer>,
}

impl Job for Preference {
    type Row = PairRow;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let (model, optim) = (&config.model, &config.optim.actor);
        let actor = ModelSpec::new(RoleName::Actor, &model.actor, Head::LanguageModel, Some(optim));
        let reference = || ModelSpec::new(RoleName::Reference, model.reference_dir(), Head::LanguageModel, None);
        [Some(actor), config.dpo.has_reference().then(reference)].into_iter().flatten().collect()
    }

    fn shape(config: &Config) -> StepShape {
        let scored = usize::from(config.dpo.has_reference());
        supervised::shape(Part::Pair, config.dpo.minibatch_samples, config.dpo.microbatch_tokens_max, scored)
    }

    fn new(
        _run: &Run,
        _arch: &Arch,
        mut learners: Vec<Learner>,
        mut frozen: Vec<Role>,
        source: RowSource<PairRow>,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let learner = learners.pop().expect("a job without a placement has all models on each rank");
        Ok(Self { learner, reference: frozen.pop().map(Reference::new), source, tokenizer })
    }

    fn rows(&self) -> &Rows {
        &self.source
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        vec![&mut self.learner]
    }

    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        phase::set(step.number, "score");
        let rows = self.source.next(run.config.dpo.minibatch_samples);
        let rows = run.ranks.all.agree(rows)?;
        let reference = self.reference(run, &rows, &mut step.phases);
        phase::set(step.number, "train");
        let timers = &mut step.timers;
        let sums = step.phases.time(Phase::Train, || timers.train(|| self.update(run, &rows, &reference)))?;
        Ok(pairs::learned(run, step, &self.learner, &sums, &rows, &self.source))
    }

    /// Loss, accuracy and margin on held-out pairs.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Option<Metrics>> {
        let start = Instant::now();
        let rows = run.ranks.all.agree(self.source.eval_rows(run.config.eval.samples_max))?;
        if rows.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let reference = self.reference(run, &rows, &mut Phases::start());
        let (config, axes, role) = (&run.config, &run.ranks.axes, &self.learner.role);
        let tokens_max = config.dpo.microbatch_tokens_max;
        let judged = supervised::evaluate(run, role, &pairs::lengths(&rows), tokens_max, |chosen| {
            let whole = pack(&rows, chosen);
            let row = whole.shard(&axes.sequence);
            let (model, w) = (&role.transformer, &role.weights);
            let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
            let (logprobs, _) = model.logprobs(w, &hidden, &row.rows, &row.targets, 1.0, false);
            loss(config, axes, &whole, &logprobs, chosen, &reference, 1.0).0
        })?;
        let ended = judged.map(|judged| pairs::evaluated(run, step, start, &self.tokenizer, &rows, judged));
        ended.transpose()
    }
}

impl Preference {
    /// Sums of the reference's log-probabilities of both sides of each pair; 0 where there is no reference. All ranks call this.
    fn reference(&mut self, run: &Run, rows: &[PairRow], phases: &mut Phases) -> Vec<[f64; 2]> {
        let tokens_max = run.config.dpo.microbatch_tokens_max;
        match &mut self.reference {
            Some(reference) => reference.of_rows(run, rows, |row| (row.id, sides(row)), tokens_max, phases),
            None => vec![[0.0; 2]; rows.len()],
        }
    }

    /// One optimizer step on `rows`.
    fn update(&mut self, run: &Run, rows: &[PairRow], reference: &[[f64; 2]]) -> Result<Sums> {
        let (config, axes) = (&run.config, &run.ranks.axes);
        let (recompute, tokens_max) = (config.gradient.recompute, config.dpo.microbatch_tokens_max);
        let weight = 1.0 / rows.len() as f64;
        let sums = accumulate(&mut self.learner, axes, &pairs::lengths(rows), tokens_max, |learner, chosen| {
            let Learner { role, sum, .. } = learner;
            let (model, w) = (&role.transformer, &role.weights);
            let whole = pack(rows, chosen);
            let row = whole.shard(&axes.sequence);
            let mut saved = Saved::new(recompute);
            let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
            // The loss is of whole responses: all log-probabilities are needed before any derivative.
            let (logprobs, _) = model.logprobs(w, &hidden, &row.rows, &row.targets, 1.0, false);
            let (judged, slopes) = loss(config, axes, &whole, &logprobs, chosen, reference, weight);
            let slopes = row.select(&slopes);
            let mut known = |range: Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], _: &mut [f32]| {
                dl.copy_from_slice(&slopes[range]);
            };
            let grads = &mut sum.grads;
            let (dhidden, ..) = model.logprobs_backward(w, &hidden, &row.rows, &row.targets, 1.0, &mut known, grads);
            model.backward(w, saved, &row.cu_seqlens, dhidden, grads);
            pairs::sums(&judged, weight)
        });
        let part = |chosen: &[usize]| pack(rows, chosen).shard(&axes.sequence);
        self.learner.step_if_finite(axes, recompute, sums.get(keys::LOSS), part)?;
        Ok(sums)
    }
}

fn sides(row: &PairRow) -> [Tokens<'_>; 2] {
    [&row.chosen, &row.rejected].map(|side| Tokens { tokens: side.into(), prompt_tokens: row.prompt_tokens })
}

/// Both sides of the pairs `rows[chosen]`, one behind the other; predicted are the responses.
fn pack(rows: &[PairRow], chosen: &[usize]) -> PackedRow {
    let mut packed = PackedRow::new();
    for Tokens { tokens, prompt_tokens } in chosen.iter().flat_map(|&i| sides(&rows[i])) {
        packed.push(&tokens, prompt_tokens);
    }
    packed
}

/// What this rank counts of the pairs `chosen`, which are in `whole`, given the log-probabilities of its own tokens; and the
/// derivatives of the loss by those of all tokens, which ranks of a ring compute alike.
fn loss(
    config: &Config,
    axes: &Axes,
    whole: &PackedRow,
    logprobs: &[f32],
    chosen: &[usize],
    reference: &[[f64; 2]],
    weight: f64,
) -> (Vec<Judged>, Vec<f32>) {
    let logprobs = whole.gather(&axes.sequence, logprobs);
    let (mut judged, mut slopes) = (Vec::new(), vec![0.0; logprobs.len()]);
    for (&i, ends) in chosen.iter().zip(whole.row_offsets.windows(3).step_by(2)) {
        let [chosen, rejected] = [ends[0]..ends[1], ends[1]..ends[2]];
        let [of_chosen, of_rejected] = [&chosen, &rejected].map(|side| &logprobs[side.clone()]);
        let of_pair = PairLogprobs { chosen: of_chosen, rejected: of_rejected, reference: reference[i] };
        let (pair, by_token) = preference_loss(&config.dpo, of_pair);
        slopes[chosen].fill((weight * by_token[0]) as f32);
        slopes[rejected].fill((weight * by_token[1]) as f32);
        if axes.sequence.rank() == 0 {
            judged.push((i, pair));
        }
    }
    (judged, slopes)
}
