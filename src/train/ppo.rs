//! PPO and its relatives on one page: prompts -> rollout -> reward -> advantage -> { loss -> gradient -> step }.

use super::dynamic_sampling::{DroppedGroup, History, Rounds};
use super::experience_maker::{
    Collected, RolloutModels, StagedBatch, hold, make_experience, rollout_speed, score_ahead,
};
use super::job::{Ended, Job, Step};
use super::models::{JobModel, ModelSpec};
use super::reward_models::{self, RewardModels};
use super::rollout::Collector;
use super::rollout_weights::{Gathered, RolloutWeights};
use super::sample_metrics::{advantage_values, sampled_values};
use super::update::{REPORTED, Update};
use super::warnings::Warning;
use super::weight_sync::WeightSync;
use super::{evaluate, placement, rollout_banner, rollout_warnings};
use crate::advantage::AdvantageState;
use crate::comm::{phase, records};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::method::ppo::KlIn;
use crate::config::reward::{JudgeConfig, ModelRewardConfig};
use crate::data::{LEDGER_LINES, PromptSource, RowKind, Rows, SftRow};
use crate::device::null;
use crate::error::{Error, Kind, Result};
use crate::experience::{Experience, Prompt, Response};
use crate::launch::banner::BannerRows;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role, role};
use crate::metrics::keys::{self, Metrics, named};
use crate::metrics::{Phase, Phases};
use crate::model::{Arch, Head};
use crate::reward::rules::Rule;
use crate::rng::{Purpose, Rng};
use crate::text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// The models of this rank, and the state that all ranks share.
pub struct Ppo {
    pub(super) actor: Option<Learner>,
    critic: Option<Learner>,
    reference: Option<Role>,
    /// The actor's copy on rollout ranks, or an actor that does not learn.
    copy: Option<Role>,
    weight_sync: WeightSync,
    /// Weights of the actor or its copy, if this rank samples.
    rollout_weights: Option<RolloutWeights>,
    pub(super) collector: Collector,
    advantage: AdvantageState,
    /// The rest of a step that an earlier start interrupted.
    pub(super) work: Option<Work>,
    /// The samples of the next steps so far, if the rollout runs ahead.
    pub(super) ahead: VecDeque<StagedBatch>,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Work {
    /// Interrupted in the rollout: the finished responses.
    Rollout(Vec<Response>),
    /// Interrupted in training: the experience, the position in the updates, and the measurements so far.
    Update(UpdateWork),
    /// If the rollout runs ahead: samples of the next steps, and the rest of an interrupted step.
    Staged(VecDeque<StagedBatch>, Option<Vec<u8>>),
}

/// The training phase of one step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct UpdateWork {
    pub(super) experience: Vec<Experience>,
    dropped: Vec<DroppedGroup>,
    /// KL coefficient of this step.
    kl_beta: f32,
    /// Minibatches done in this step, over all epochs.
    minibatches: usize,
    pub(super) sums: Sums,
    /// Metrics of the step that are already known.
    pub(super) values: Vec<(String, f64)>,
}

impl Job for Ppo {
    type Row = Prompt;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let mut all = vec![ModelSpec::actor(config, Head::LanguageModel)];
        if config.uses().reference {
            all.push(ModelSpec::frozen(RoleName::Reference, config.model.reference_dir()));
        }
        if config.ppo.advantage.has_critic() {
            all.push(ModelSpec::new(RoleName::Critic, config.critic_dir(), Head::Value, Some(&config.optim.critic)));
        }
        all.extend(Self::reward_models(config));
        if config.mesh.rollout_is_apart() {
            all.push(ModelSpec::frozen(RoleName::Rollout, &config.model.actor));
        }
        all
    }

    /// Rejects a model whose context is shorter than the longest rows of the actor.
    fn check_models(config: &Config, actor: &Arch, other: &JobModel) -> Result<()> {
        if other.spec.role == RoleName::Reward {
            return reward_models::check(&config.reward, other, actor);
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

    fn steps(config: &Config, _rows: &Rows) -> u64 {
        config.job.steps
    }

    fn shape(config: &Config) -> StepShape {
        let (ppo, rollout, critics) = (&config.ppo, &config.rollout, usize::from(config.ppo.advantage.has_critic()));
        StepShape {
            part: RowKind::Prompt,
            rows: rollout.prompts_per_step,
            samples_per_row: rollout.samples_per_prompt,
            minibatch: ppo.minibatch_samples.min(rollout.prompts_per_step * rollout.samples_per_prompt),
            epochs: ppo.epochs,
            microbatch_tokens_max: ppo.microbatch_tokens_max,
            trained: 1 + critics,
            scored: critics + usize::from(config.uses().reference),
        }
    }

    fn needs(run: &Run, arch: &Arch, rows: &Rows) -> BannerRows {
        let rollouts = run.rollout_bytes_max(rows.longest(), arch.context);
        BannerRows {
            rollouts,
            about: vec![("rewards".to_string(), rollout_banner::rewards(&run.config))],
            notes: rollout_banner::notes(run),
        }
    }

    fn warnings_of_start(run: &Run, rows: &Rows, context: usize) -> Vec<String> {
        rollout_warnings::of_start(&run.config, run.ranks.layout().rollout_data(), rows, context)
    }

    fn warnings_of_step(config: &Config, values: &Metrics) -> Vec<Warning> {
        rollout_warnings::of_step(config, values)
    }

    fn new(
        run: &Run,
        arch: &Arch,
        learners: Vec<Learner>,
        frozen: Vec<Role>,
        source: PromptSource,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let is_actor = |learner: &Learner| learner.role.name == RoleName::Actor.name();
        let (mut actors, mut critics): (Vec<_>, Vec<_>) = learners.into_iter().partition(is_actor);
        let (actor, critic) = (actors.pop(), critics.pop());
        let is_reference = |role: &Role| role.name == RoleName::Reference.name();
        let (mut references, others): (Vec<_>, Vec<_>) = frozen.into_iter().partition(is_reference);
        // A frozen actor only samples, like a copy of an actor.
        let samples = |role: &Role| [RoleName::Rollout, RoleName::Actor].iter().any(|name| role.name == name.name());
        let (mut copies, rewards): (Vec<_>, Vec<_>) = others.into_iter().partition(samples);
        let rewards = run.ranks.all.agree(RewardModels::new(run, rewards, &tokenizer, &source))?;
        let copy = copies.pop();
        let role = copy.as_ref().or(actor.as_ref().map(|actor| &actor.role)).filter(|_| run.ranks.samples());
        let (rollout_weights, weights_bytes) = RolloutWeights::for_sampler(run, role, source.longest())?;
        Ok(Self {
            critic,
            reference: references.pop(),
            collector: Collector::new(run, source, tokenizer, arch, weights_bytes, rewards)?,
            advantage: AdvantageState::new(&run.config.ppo),
            work: None,
            ahead: VecDeque::new(),
            actor,
            copy,
            weight_sync: WeightSync::new(run),
            rollout_weights,
        })
    }

    fn check_services(run: &Run, arch: &Arch, source: PromptSource, tokenizer: Arc<Tokenizer>) -> Result<()> {
        let rewards = RewardModels::new(run, Vec::new(), &tokenizer, &source)?;
        Collector::new(run, source, tokenizer, arch, 0, rewards).map(drop)
    }

    fn rows(&self) -> &Rows {
        &self.collector.source
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        self.actor.iter_mut().chain(&mut self.critic).collect()
    }

    fn state(&self) -> Value {
        serde_json::to_value(&self.advantage).expect("numbers are JSON")
    }

    fn restore(&mut self, state: Value, work: Option<&[u8]>) -> Result<()> {
        self.advantage = serde_json::from_value(state)
            .map_err(|e| Error::data(format!("the checkpoint's state is malformed: {e}")))?;
        self.work = match work.map(records::decode).transpose()? {
            Some(Work::Staged(ahead, rest)) => {
                self.ahead = ahead;
                rest.as_deref().map(records::decode).transpose()?
            }
            work => work,
        };
        Ok(())
    }

    fn partial_work(&self) -> Option<Vec<u8>> {
        (!self.ahead.is_empty()).then(|| records::encode(&Work::Staged(self.ahead.clone(), None)))
    }

    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        if run.runs_ahead() { self.step_ahead(run, step) } else { self.learn_step(run, step) }
    }

    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Metrics> {
        let start = Instant::now();
        run.make_room(self.actor.as_mut(), self.critic.as_mut());
        self.send_weights(run, step, &mut Phases::start());
        let sampler = self.copy.as_ref().or(self.actor.as_ref().map(|actor| &actor.role));
        let sampler = sampler.zip(self.rollout_weights.as_ref());
        let gathered = sampler.map(|(role, rollout_weights)| rollout_weights.gather(role, &mut Phases::start()));
        evaluate::evaluate(run, gathered.as_ref().map(Gathered::model), &mut self.collector, step, start)
    }
}

impl Ppo {
    /// Samples, scores and learns.
    pub(super) fn learn_step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        let config = run.config.clone();
        let mut work = self.begin(run, step, |ppo, experience| {
            let kl_beta = ppo.advantage.kl.beta;
            let weights = ppo.collector.reward.weights();
            let stats = crate::advantage::compute_step(&config.ppo, weights, &mut ppo.advantage, experience)?;
            Ok((advantage_values(&stats, experience, kl_beta), kl_beta))
        })?;
        let _held = hold(&work.experience);
        let (epochs, size, kl_beta) = (config.ppo.epochs, config.ppo.minibatch_samples, work.kl_beta);
        // A plan is about the steps after the warm-up.
        let warms_up = step.number <= config.ppo.critic_warmup_steps && !null::is_active();
        let (number, mut minibatch) = (step.number, work.minibatches);
        self.learn(run, step, &mut work, epochs, size, |ppo, run, samples| {
            let texts = &if warms_up { Vec::new() } else { ppo.texts(run, number, minibatch)? };
            minibatch += 1;
            let update = Update { config: &config, axes: &run.ranks.axes, kl_beta, texts };
            update.minibatch(ppo.actor.as_mut().filter(|_| !warms_up), ppo.critic.as_mut(), samples)
        })?;
        Ok(metrics(run, &work))
    }

    pub(super) fn reward_models(config: &Config) -> impl Iterator<Item = ModelSpec> {
        let reward = |model: &ModelRewardConfig| ModelSpec::new(RoleName::Reward, &model.dir, Head::Value, None);
        let judge = |judge: &JudgeConfig| ModelSpec::frozen(RoleName::Reward, &judge.dir);
        config.reward.models.iter().map(reward).chain(config.reward.judge.iter().map(judge))
    }

    /// Records and returns the experience of a step: the rest of an interrupted step, or new samples. For these,
    /// `prepare` returns metrics and the KL coefficient of the step.
    pub(super) fn begin(
        &mut self,
        run: &mut Run,
        step: &mut Step,
        prepare: impl FnOnce(&mut Self, &mut [Experience]) -> Result<(Metrics, f32)>,
    ) -> std::result::Result<UpdateWork, Ended> {
        let finished = match self.work.take() {
            Some(Work::Update(work)) => {
                self.record(run, step.number, &work)?;
                return Ok(work);
            }
            Some(Work::Rollout(finished)) => finished,
            // The rollout was running ahead when the run was stopped.
            _ if !run.runs_ahead() => {
                let whole = std::mem::take(&mut self.ahead).pop_front().filter(StagedBatch::is_scored);
                whole.map_or_else(Vec::new, |ahead| ahead.responses)
            }
            _ => Vec::new(),
        };
        let Rounds { samples: mut experience, dropped, response_tokens, values: measured, .. } =
            self.collect(run, step, &finished)?;
        let (mut values, kl_beta) = prepare(self, &mut experience)?;
        let shown = run.recorder.samples(step.number, &experience);
        run.ranks.together.agree(shown)?;
        values.extend(sampled_values(&experience));
        values.extend(measured);
        let sent = Some(self.weight_sync.bytes as f64).filter(|bytes| *bytes > 0.0);
        values.extend(named(sent.map(|bytes| (keys::RESHARD_BYTES, bytes))));
        values.extend(rollout_speed(step.phases.spent(Phase::Rollout).as_secs_f64(), response_tokens));
        let work = UpdateWork { experience, dropped, kl_beta, values, ..UpdateWork::default() };
        self.record(run, step.number, &work)?;
        Ok(work)
    }

    /// Rollout, rewards, scores of reference and critic. Returns the whole batch and its metrics on every rank, after
    /// as many rounds as dynamic sampling needs. A step that is stopped, or whose reward fails, ends with its finished
    /// responses. The resumed run takes its prompts again.
    fn collect(&mut self, run: &mut Run, step: &mut Step, finished: &[Response]) -> std::result::Result<Rounds, Ended> {
        let (dynamic, wanted) = (run.config.rollout.dynamic_sampling.clone(), run.config.rollout.prompts_per_step);
        let most = wanted * dynamic.prompts_max_factor;
        let (cursor, ledger) = (self.collector.source.cursor().clone(), self.collector.source.ledger().clone());
        let (answered, kept) = (ledger.handed_out, ledger.handed_out.saturating_sub(ledger.groups_dropped));
        let (mut rounds, mut prompts) = (Rounds::new(History { answered, kept }), Vec::new());
        while rounds.groups < wanted && prompts.len() < most {
            phase::set(step.number, phase::Phase::Rollout);
            let first = prompts.len();
            let more: Result<Vec<Prompt>> = self.collector.source.next(rounds.prompts_needed(wanted).min(most - first));
            prompts.extend(run.ranks.together.agree(more)?);
            let (samples, values) = self.sample(run, step.number, &prompts, first, finished, &mut step.phases)?;
            match values {
                Err(error) if matches!(error.kind, Kind::Service | Kind::Stopped) => {
                    let work = records::encode(&Work::Rollout(rounds.responses(samples)));
                    let error = Some(error).filter(|error| error.kind == Kind::Service);
                    return Err(Ended::Unfinished { work, took_rows: false, error });
                }
                measured => rounds.add_round(&dynamic, samples, measured?),
            }
        }
        if rounds.samples.is_empty() {
            let (number, all) = (step.number, prompts.len());
            let dropped =
                format!("step {number} has no samples to learn from: none of its groups was kept (prompts: {all})");
            let hint = "widen the bounds of rollout.dynamic_sampling on mean scores, or use rewards that differ \
                        within a group: groups with equal scores are dropped";
            let work = records::encode(&Work::Rollout(rounds.responses(Vec::new())));
            return Err(Ended::Unfinished { work, took_rows: false, error: Some(Error::data(dropped).hint(hint)) });
        }
        if dynamic.is_on() && rounds.groups < wanted {
            run.recorder.warn(&format!(
                "step {}: only {} of {wanted} groups to learn from in {} prompts; raise \
                 rollout.dynamic_sampling.prompts_max_factor to answer more",
                step.number,
                rounds.groups,
                prompts.len()
            ));
        }
        let taken = rounds.finish(&dynamic, wanted, prompts.len(), run.config.rollout.samples_per_prompt);
        if taken < prompts.len() {
            let source = &mut self.collector.source;
            let again = source.restore(&cursor, &ledger).and_then(|()| source.next(taken));
            run.ranks.together.agree(again)?;
        }
        let failed = rounds.values.iter().filter(|(key, _)| key == keys::SAMPLES_DROPPED);
        self.collector.source.drop_samples(failed.map(|(_, samples)| *samples as u64).sum());
        self.collector.source.drop_groups(rounds.dropped.len() as u64);
        Ok(rounds)
    }

    /// Records the experience of a step. A resumed run that ends a step records it again, because the resume removed
    /// the record.
    fn record(&self, run: &mut Run, step: u64, work: &UpdateWork) -> Result<()> {
        let UpdateWork { experience, dropped, .. } = work;
        let recorded = run.recorder.rollouts(step, experience, run.config.job.seed, &run.config_hash);
        let of_dropped = dropped.iter().map(|group| (group.prompt_id, group.score_mean));
        let is_writer = run.ranks.world.rank == 0 && !dropped.is_empty();
        let ledger = run.dir.join(LEDGER_LINES);
        let listed = if is_writer { self.collector.source.write_dropped(&ledger, step, of_dropped) } else { Ok(()) };
        run.ranks.together.agree(recorded.and(listed))
    }

    /// The pretraining rows of an update: as many as a minibatch has samples, if the job learns from such rows
    /// (PPO-ptx).
    fn texts(&mut self, run: &Run, step: u64, minibatch: usize) -> Result<Vec<SftRow>> {
        if run.config.ppo.ptx_coef == 0.0 {
            return Ok(Vec::new());
        }
        let shape = Self::shape(&run.config);
        let update = (step - 1) * shape.updates() as u64 + minibatch as u64 + 1;
        run.ranks.together.agree(self.collector.source.pretrain(update, shape.minibatch))
    }

    /// Samples and scores responses to `prompts` from index `first` on, except `finished` ones, which are kept.
    pub(super) fn sample(
        &mut self,
        run: &mut Run,
        step: u64,
        prompts: &[Prompt],
        first: usize,
        finished: &[Response],
        phases: &mut Phases,
    ) -> Result<Collected> {
        let ahead = if run.runs_ahead() { self.ahead.pop_front() } else { None };
        if ahead.is_none() {
            run.make_room(self.actor.as_mut(), self.critic.as_mut());
            self.send_weights(run, step - 1, phases);
        }
        let (mut models, collector) = self.models_of_rank();
        match ahead {
            Some(ahead) => score_ahead(run, &mut models, collector, step, prompts, ahead, phases),
            None => make_experience(run, &mut models, collector, step, prompts, first, finished, phases),
        }
    }

    /// The models of this rank that generate and score, and the collector of their results.
    pub(super) fn models_of_rank(&mut self) -> (RolloutModels<'_>, &mut Collector) {
        let actor = self.actor.as_ref().map(|actor| &actor.role);
        let models = RolloutModels {
            sampler: self.copy.as_ref().or(actor).zip(self.rollout_weights.as_ref()),
            actor,
            critic: self.critic.as_mut().map(|critic| &mut critic.role),
            reference: self.reference.as_mut(),
        };
        (models, &mut self.collector)
    }

    /// Sends the weights after `step` to the ranks that sample, if these have a copy.
    pub(super) fn send_weights(&mut self, run: &Run, step: u64, phases: &mut Phases) {
        let actor = self.actor.as_ref().map(|actor| &actor.role);
        self.weight_sync.send(run, step, actor, self.copy.as_mut(), phases);
    }

    /// Epochs over minibatches of `size` samples from a global, seeded shuffle that does not depend on the ranks.
    /// `update` runs an optimizer step on each minibatch. The run can stop between two updates.
    pub(super) fn learn(
        &mut self,
        run: &mut Run,
        step: &mut Step,
        work: &mut UpdateWork,
        epochs: usize,
        size: usize,
        mut update: impl FnMut(&mut Self, &Run, &[&Experience]) -> Result<Sums>,
    ) -> std::result::Result<(), Ended> {
        phase::set(step.number, phase::Phase::Train);
        // Its weights are offloaded after an evaluation, and when a resume finishes a step.
        if let Some(critic) = &mut self.critic {
            run.onload(&mut critic.role);
        }
        let rng = Rng::new(run.config.job.seed, Purpose::Shuffle);
        // Counted in the batch, because the configuration may have changed since the batch was saved.
        let per_epoch = work.experience.len().div_ceil(size);
        let total = epochs * per_epoch;
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
            let timers = &mut step.timers;
            let mut found = step.phases.time(Phase::Train, || {
                let found = timers.train(|| update(self, run, &samples));
                placement::sums(&run.ranks, found)
            })?;
            if work.minibatches > 0 {
                // Only the gap of the first minibatch is measured before any update.
                found.0.remove(keys::LOGPROB_GAP_MAX);
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

fn metrics(run: &Run, work: &UpdateWork) -> Metrics {
    let mut values = work.values.clone();
    let kl_in_loss = run.config.ppo.kl_in == KlIn::Loss && run.config.uses().reference;
    // Means over the updates, and the largest gap and norms.
    let of_updates = work.sums.means(REPORTED).into_iter();
    values.extend(named(of_updates.filter(|(key, _)| kl_in_loss || *key != keys::KL_LOSS)));
    // The metrics of model.actor that every kind of job reports.
    for (key, of_actor) in [(keys::LR, keys::LR_ACTOR), (keys::GRAD_NORM, keys::GRAD_NORM_ACTOR)] {
        values.extend(
            work.sums.means(REPORTED).into_iter().filter(|(k, _)| *k == of_actor).map(|(_, x)| (key.into(), x)),
        );
    }
    values
}
