//! Jobs of methods that learn from their own samples: prompts -> rollout -> rewards, then minibatches of the samples.
//! The counterpart of `supervised`.

use super::dynamic_sampling::Rounds;
use super::experience_maker::{StagedBatch, hold, rollout_speed};
use super::models_of_rank::{Sampling, UpdateWork, Work, reward_models};
use super::reward_models as reward;
use super::rollout_banner;
use super::sample_metrics::sampled_values;
use crate::comm::{phase, records};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::data::{PromptSource, RowKind, Rows};
use crate::error::{Error, Result};
use crate::experience::{Experience, Prompt};
use crate::launch::banner::BannerRows;
use crate::launch::replay;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role, role, routing, schedule};
use crate::metrics::Phase;
use crate::metrics::keys::{self, Metrics, named};
use crate::model::Arch;
use crate::reward::rules::Rule;
use crate::rng::{Purpose, Rng};
use crate::text::Tokenizer;
use crate::train::job::{Ended, Job, Step};
use crate::train::methods::update_metrics;
use crate::train::models::{JobModel, ModelSpec};
use crate::train::placement;
use crate::train::warnings::Warning;
use serde_json::Value;
use std::sync::Arc;

/// A method that learns from its own samples.
pub trait OnlineMethod: Sized {
    /// The model that samples, then the other models of the method. Reward models are added to them.
    fn models(config: &Config) -> Vec<ModelSpec>;

    /// The number of steps.
    fn steps(config: &Config, rows: &Rows) -> u64;

    /// The epochs over the samples of a step, and the samples of an optimizer step.
    fn minibatches(config: &Config) -> (usize, usize);

    /// The shape of a step. `rollout` is that of a step that trains the first model alone.
    fn shape(config: &Config, rollout: StepShape) -> StepShape;

    /// Adapts the rows of the banner about rewards and rollout.
    fn adapt_banner(_run: &Run, _rows: &mut BannerRows) {}

    /// Warnings about the job before its first step, and about the metrics of a step: see `Job`.
    fn warnings_of_start(_run: &Run, _rows: &Rows, _context: usize) -> Vec<String> {
        Vec::new()
    }

    fn warnings_of_step(_config: &Config, _values: &Metrics) -> Vec<Warning> {
        Vec::new()
    }

    /// Creates the method with its teachers.
    fn new(config: &Config, teachers: Vec<Role>) -> Self;

    /// See `Job`.
    fn state(&self) -> Value {
        Value::Null
    }

    /// See `Job`.
    fn restore(&mut self, _state: Value) -> Result<()> {
        Ok(())
    }

    /// The entries of `rollout.response_tokens_schedule` that no longer apply.
    fn lengths_skipped(&self) -> usize {
        0
    }

    /// Completes the scored samples of a step. Returns metrics, and the KL coefficient of the step.
    fn prepare(&mut self, _: &Run, _: &Sampling, _step: u64, _: &mut [Experience]) -> Result<(Metrics, f32)> {
        Ok((Metrics::new(), 0.0))
    }

    /// One optimizer step. All ranks that learn call this. A method without models that learn has none.
    fn update(&mut self, _: &Run, _: &mut Sampling, _: &Minibatch) -> Result<Sums> {
        Ok(Sums::default())
    }

    /// The metrics of a step from the sums over its updates.
    fn metrics(_run: &Run, _sums: &Sums) -> Metrics {
        Metrics::new()
    }

    /// Evaluates on held-out prompts. All ranks call this.
    fn evaluate(&mut self, run: &mut Run, sampling: &mut Sampling, step: u64) -> Result<Metrics> {
        sampling.evaluate(run, step)
    }
}

/// Samples of one optimizer step.
pub struct Minibatch<'a> {
    pub step: u64,
    /// The epoch of the step, from 0.
    pub epoch: usize,
    /// The minibatches of the step before this one, over all epochs.
    pub before: usize,
    /// KL coefficient of the step.
    pub kl_beta: f32,
    pub samples: &'a [&'a Experience],
}

/// A job of a method.
pub struct Online<M> {
    pub(super) sampling: Sampling,
    method: M,
}

impl<M: OnlineMethod> Job for Online<M> {
    type Row = Prompt;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let copy = config.mesh.rollout_is_apart().then(|| ModelSpec::frozen(RoleName::Rollout, &config.model.actor));
        M::models(config).into_iter().chain(reward_models(config)).chain(copy).collect()
    }

    /// Rejects a model whose context is shorter than the longest rows of the actor.
    fn check_models(config: &Config, actor: &Arch, other: &JobModel) -> Result<()> {
        if other.spec.role == RoleName::Reward {
            return reward::check(&config.reward, other, actor);
        }
        let (prompt, response) = (config.data.prompt_tokens_max, config.rollout.response_tokens_max);
        let (longest, context) = ((prompt + response).min(actor.context), other.arch.context);
        if longest <= context {
            return Ok(());
        }
        let name = role::key(other.spec.role.name());
        Err(Error::data(format!(
            "rows may have {longest} tokens (prompts up to {prompt}, responses up to {response}), but {name} has a \
             context of {context}"
        ))
        .hint("lower data.prompt_tokens_max or rollout.response_tokens_max"))
    }

    fn check_rows(config: &Config, source: &PromptSource, _tokenizer: &Tokenizer) -> Result<()> {
        if config.reward.rule.iter().any(Rule::needs_label) { source.check_labels() } else { Ok(()) }
    }

    fn steps(config: &Config, rows: &Rows) -> u64 {
        M::steps(config, rows)
    }

    fn shape(config: &Config) -> StepShape {
        let (rows, samples_per_row) = (config.rollout.prompts_per_step, config.rollout.samples_per_prompt);
        let (epochs, minibatch) = M::minibatches(config);
        let rollout = StepShape {
            kind: RowKind::Prompt,
            rows,
            samples_per_row,
            minibatch: minibatch.min(rows * samples_per_row),
            epochs,
            critic_epochs: 0,
            microbatch_tokens_max: config.ppo.microbatch_tokens_max,
            trained: 1,
            scored: 0,
        };
        M::shape(config, rollout)
    }

    fn needs(run: &Run, arch: &Arch, rows: &Rows) -> BannerRows {
        let mut needs = BannerRows {
            rollouts: run.rollout_bytes_max(rows.longest(), arch),
            about: vec![("rewards".to_string(), rollout_banner::rewards(&run.config))],
            notes: rollout_banner::notes(run),
        };
        M::adapt_banner(run, &mut needs);
        needs
    }

    fn warnings_of_start(run: &Run, rows: &Rows, context: usize) -> Vec<String> {
        M::warnings_of_start(run, rows, context)
    }

    fn warnings_of_step(config: &Config, values: &Metrics) -> Vec<Warning> {
        M::warnings_of_step(config, values)
    }

    fn new(
        run: &Run,
        arch: &Arch,
        learners: Vec<Learner>,
        frozen: Vec<Role>,
        source: PromptSource,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let is_teacher = |role: &Role| role.name == RoleName::Teacher.name();
        let (teachers, others): (Vec<_>, Vec<_>) = frozen.into_iter().partition(is_teacher);
        let method = M::new(&run.config, teachers);
        Ok(Self { sampling: Sampling::new(run, arch, learners, others, source, tokenizer)?, method })
    }

    fn check_services(run: &Run, arch: &Arch, source: PromptSource, tokenizer: Arc<Tokenizer>) -> Result<()> {
        Sampling::check_services(run, arch, source, tokenizer)
    }

    fn rows(&self) -> &Rows {
        &self.sampling.collector.source
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        self.sampling.actor.iter_mut().chain(&mut self.sampling.critic).collect()
    }

    fn state(&self) -> Value {
        self.method.state()
    }

    fn restore(&mut self, state: Value, work: Option<&[u8]>) -> Result<()> {
        self.method.restore(state)?;
        self.sampling.restore(work)
    }

    fn partial_work(&self) -> Option<Vec<u8>> {
        let staged = &self.sampling.staged;
        (!staged.is_empty()).then(|| records::encode(&Work::Staged(staged.clone(), None)))
    }

    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        if !run.config.uses().trains {
            // The step of a plan, whose job evaluates.
            phase::set(step.number, phase::Phase::Rollout);
            return Ok(self.evaluate(run, step.number)?);
        }
        if run.runs_ahead { self.step_ahead(run, step) } else { self.learn_step(run, step) }
    }

    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Metrics> {
        self.method.evaluate(run, &mut self.sampling, step)
    }
}

impl<M: OnlineMethod> Online<M> {
    /// Samples, scores and learns.
    pub(super) fn learn_step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        let mut work = self.begin(run, step)?;
        let _held = hold(&work.experience);
        self.learn(run, step, &mut work)?;
        let mut metrics = std::mem::take(&mut work.values);
        metrics.extend(M::metrics(run, &work.sums));
        metrics.extend(routing::metrics(&work.sums).into_iter().chain(schedule::metrics(&work.sums)));
        Ok(metrics)
    }

    /// Records and returns the experience of a step: the rest of an interrupted step, or new samples.
    fn begin(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<UpdateWork, Ended> {
        let Self { sampling, method } = self;
        let finished = match sampling.work.take() {
            Some(Work::Update(work)) => {
                sampling.record(run, step.number, &work)?;
                return Ok(work);
            }
            Some(Work::Rollout(finished)) => finished,
            // The rollout was running ahead when the run was stopped.
            _ if !run.runs_ahead => {
                let whole = std::mem::take(&mut sampling.staged).pop_front().filter(StagedBatch::is_scored);
                whole.map_or_else(Vec::new, |staged| staged.responses)
            }
            _ => Vec::new(),
        };
        sampling.collector.lengths_skipped = method.lengths_skipped();
        let rounds = if run.replay.is_some() {
            sampling.recorded(run, step)?
        } else {
            sampling.collect(run, step, &finished)?
        };
        let Rounds { samples: mut experience, dropped, response_tokens, values: measured, .. } = rounds;
        let (mut values, kl_beta) = method.prepare(run, sampling, step.number, &mut experience)?;
        let shown = run.recorder.samples(step.number, &experience);
        run.ranks.together.agree(shown)?;
        values.extend(sampled_values(&experience));
        let (rollout, skipped) = (&run.config.rollout, sampling.collector.lengths_skipped);
        if !rollout.response_tokens_schedule.is_empty() {
            let limit = rollout.scheduled_tokens(step.number, skipped).unwrap_or(rollout.response_tokens_max);
            values.extend(named([(keys::RESPONSE_TOKENS_LIMIT, limit as f64)]));
        }
        values.extend(measured);
        let sent = Some(sampling.weight_sync.bytes as f64).filter(|bytes| *bytes > 0.0);
        values.extend(named(sent.map(|bytes| (keys::RESHARD_BYTES, bytes))));
        values.extend(rollout_speed(step.phases.spent(Phase::Rollout).as_secs_f64(), response_tokens));
        let work = UpdateWork { experience, dropped, kl_beta, values, ..UpdateWork::default() };
        sampling.record(run, step.number, &work)?;
        Ok(work)
    }

    /// Epochs over minibatches from a global, seeded shuffle that does not depend on the ranks. The run can stop
    /// between two updates.
    fn learn(&mut self, run: &mut Run, step: &mut Step, work: &mut UpdateWork) -> std::result::Result<(), Ended> {
        phase::set(step.number, phase::Phase::Train);
        let Self { sampling, method } = self;
        // Its weights are offloaded after an evaluation, and when a resume finishes a step.
        if let Some(critic) = &mut sampling.critic {
            run.onload(&mut critic.role);
        }
        let (epochs, size) = M::minibatches(&run.config);
        let rng = Rng::new(run.config.job.seed, Purpose::Shuffle);
        // Counted in the batch, because the configuration may have changed since the batch was saved.
        let per_epoch = work.experience.len().div_ceil(size);
        let total = epochs * per_epoch;
        let total = run.replay.as_ref().map_or(total, |replay| replay.updates_of(step.number, total));
        let bar = run.recorder.phase(Phase::Train.name(), total as u64);
        bar.set_position(work.minibatches as u64);
        while work.minibatches < total {
            if work.minibatches > 0 && run.ranks.together.any(run.stop_requested_here()) {
                let work = records::encode(&Work::Update(std::mem::take(work)));
                return Err(Ended::Unfinished { work, took_rows: true, error: None });
            }
            let (epoch, index) = (work.minibatches / per_epoch, work.minibatches % per_epoch);
            let order = rng.permutation(work.experience.len(), (step.number as usize * epochs + epoch) as u32);
            let chosen = order.chunks(size).nth(index).unwrap_or_default();
            let samples: Vec<&Experience> = chosen.iter().map(|&i| &work.experience[i]).collect();
            let (before, kl_beta) = (work.minibatches, work.kl_beta);
            let batch = Minibatch { step: step.number, epoch, before, kl_beta, samples: &samples };
            let timers = &mut step.timers;
            let mut found = step.phases.time(Phase::Train, || {
                let found = timers.train(|| method.update(run, sampling, &batch));
                placement::sums(&run.ranks, found)
            })?;
            if work.minibatches > 0 {
                // Only the first minibatch is compared with sampling before any update.
                for key in update_metrics::COMPARED {
                    found.0.remove(*key);
                }
            }
            if let Some(replay) = &run.replay {
                let learners = sampling.actor.iter().chain(&sampling.critic);
                replay.note(step.number, || replay::Update::new(M::metrics(run, &found), learners));
            }
            work.sums.add(&found);
            work.minibatches += 1;
            run.has_learned = true;
            bar.inc(1);
        }
        step.lengths = work.experience.iter().map(Experience::length).collect();
        Ok(())
    }
}
