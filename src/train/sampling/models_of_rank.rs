//! The state of a method that samples: its models, the collector of responses, and the rest of an interrupted step.

use super::dynamic_sampling::{DroppedGroup, History, Rounds};
use super::evaluate;
use super::experience_maker::{Collected, RolloutModels, StagedBatch, make_experience, score_ahead};
use super::kv_divergence;
use super::reward_models::RewardModels;
use super::rollout::Collector;
use super::rollout_weights::{Gathered, RolloutWeights};
use super::weight_sync::WeightSync;
use crate::comm::{phase, records};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::reward::{JudgeConfig, ModelRewardConfig};
use crate::data::{LEDGER_LINES, PromptSource};
use crate::error::{Error, Kind, Result};
use crate::experience::{Experience, Prompt, Response};
use crate::launch::run::Run;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::metrics::Phases;
use crate::metrics::keys::{self, Metrics};
use crate::model::{Arch, Head};
use crate::text::Tokenizer;
use crate::train::job::{Ended, Step};
use crate::train::models::ModelSpec;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// The models of this rank, and the state that all ranks share.
pub struct Sampling {
    pub actor: Option<Learner>,
    pub critic: Option<Learner>,
    reference: Option<Role>,
    /// The actor's copy on rollout ranks, or an actor that does not learn.
    copy: Option<Role>,
    pub weight_sync: WeightSync,
    /// Weights of the actor or its copy, if this rank samples.
    rollout_weights: Option<RolloutWeights>,
    pub collector: Collector,
    /// The rest of a step that an earlier start interrupted.
    pub work: Option<Work>,
    /// The samples of the next steps so far, if the rollout runs ahead.
    pub staged: VecDeque<StagedBatch>,
}

#[derive(Serialize, Deserialize)]
pub enum Work {
    /// Interrupted in the rollout: the finished responses.
    Rollout(Vec<Response>),
    /// Interrupted in training: the experience, the position in the updates, and the measurements so far.
    Update(UpdateWork),
    /// If the rollout runs ahead: samples of the next steps, and the rest of an interrupted step.
    Staged(VecDeque<StagedBatch>, Option<Vec<u8>>),
}

/// The training phase of one step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct UpdateWork {
    pub experience: Vec<Experience>,
    pub dropped: Vec<DroppedGroup>,
    /// KL coefficient of this step.
    pub kl_beta: f32,
    /// Minibatches done in this step, over all epochs.
    pub minibatches: usize,
    pub sums: Sums,
    /// Metrics of the step that are already known.
    pub values: Vec<(String, f64)>,
}

/// The reward models and judges of a job.
pub fn reward_models(config: &Config) -> impl Iterator<Item = ModelSpec> {
    let reward = |model: &ModelRewardConfig| ModelSpec::new(RoleName::Reward, &model.dir, Head::Value, None);
    let judge = |judge: &JudgeConfig| ModelSpec::frozen(RoleName::Reward, &judge.dir);
    config.reward.models.iter().map(reward).chain(config.reward.judge.iter().map(judge))
}

impl Sampling {
    /// Creates it from the models of this rank, except those of the method alone. All ranks call this.
    pub fn new(
        run: &Run,
        arch: &Arch,
        learners: Vec<Learner>,
        mut frozen: Vec<Role>,
        source: PromptSource,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let is = |role: &Role, name: RoleName| role.name == name.name();
        let (mut actors, mut critics): (Vec<_>, Vec<_>) =
            learners.into_iter().partition(|learner| is(&learner.role, RoleName::Actor));
        let (actor, critic) = (actors.pop(), critics.pop());
        // A frozen actor only samples, like a copy of an actor.
        frozen.iter_mut().filter(|role| is(role, RoleName::Actor)).for_each(|actor| run.onload(actor));
        let (mut references, others): (Vec<_>, Vec<_>) =
            frozen.into_iter().partition(|role| is(role, RoleName::Reference));
        let samples = |role: &Role| is(role, RoleName::Rollout) || is(role, RoleName::Actor);
        let (mut copies, rewards): (Vec<_>, Vec<_>) = others.into_iter().partition(samples);
        let rewards = run.ranks.all.agree(RewardModels::new(run, rewards, &tokenizer, &source))?;
        let copy = copies.pop();
        let role = copy.as_ref().or(actor.as_ref().map(|actor| &actor.role)).filter(|_| run.ranks.samples());
        let (rollout_weights, weights_bytes) = RolloutWeights::for_sampler(run, role, source.longest())?;
        Ok(Self {
            critic,
            reference: references.pop(),
            collector: Collector::new(run, source, tokenizer, arch, weights_bytes, rewards)?,
            work: None,
            staged: VecDeque::new(),
            actor,
            copy,
            weight_sync: WeightSync::new(run),
            rollout_weights,
        })
    }

    /// Starts the rewards and the environment, to check them without models.
    pub fn check_services(run: &Run, arch: &Arch, source: PromptSource, tokenizer: Arc<Tokenizer>) -> Result<()> {
        let rewards = RewardModels::new(run, Vec::new(), &tokenizer, &source)?;
        Collector::new(run, source, tokenizer, arch, 0, rewards).map(drop)
    }

    /// Sets the rest of an interrupted step.
    pub fn restore(&mut self, work: Option<&[u8]>) -> Result<()> {
        self.work = match work.map(records::decode).transpose()? {
            Some(Work::Staged(staged, rest)) => {
                self.staged = staged;
                rest.as_deref().map(records::decode).transpose()?
            }
            work => work,
        };
        Ok(())
    }

    /// Evaluates on held-out prompts. All ranks call this.
    pub fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Metrics> {
        let start = Instant::now();
        run.make_room(self.actor.as_mut(), self.critic.as_mut());
        self.send_weights(run, step, &mut Phases::start());
        let sampler = self.copy.as_ref().or(self.actor.as_ref().map(|actor| &actor.role));
        let sampler = sampler.zip(self.rollout_weights.as_ref());
        let gathered = sampler.map(|(role, rollout_weights)| rollout_weights.gather(role, &mut Phases::start()));
        let model = gathered.as_ref().map(Gathered::model);
        let (mut found, samples) = evaluate::evaluate(run, model, &mut self.collector, step, start)?;
        drop(gathered);
        found.extend(self.kv_divergence(run, &samples, evaluate::sampled(&run.config).temperature)?);
        Ok(found)
    }

    /// The effect of rounded keys and values on the policy (`kv_divergence`). All ranks call this.
    pub fn kv_divergence(&mut self, run: &Run, samples: &[Experience], temperature: f32) -> Result<Metrics> {
        let frozen = self.copy.as_mut().filter(|copy| copy.name == RoleName::Actor.name());
        let actor = self.actor.as_mut().map(|actor| &mut actor.role).or(frozen);
        kv_divergence::measure(run, actor, samples, temperature)
    }

    /// Rollout, rewards, scores of reference and critic. Returns the whole batch and its metrics on every rank, after
    /// as many rounds as dynamic sampling needs. A step that is stopped, or whose reward fails, ends with its finished
    /// responses. The resumed run takes its prompts again.
    pub fn collect(
        &mut self,
        run: &mut Run,
        step: &mut Step,
        finished: &[Response],
    ) -> std::result::Result<Rounds, Ended> {
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
    pub fn record(&self, run: &mut Run, step: u64, work: &UpdateWork) -> Result<()> {
        let UpdateWork { experience, dropped, .. } = work;
        let recorded = run.recorder.rollouts(step, experience, run.config.job.seed, &run.config_hash);
        let of_dropped = dropped.iter().map(|group| (group.prompt_id, group.score_mean));
        let is_writer = run.ranks.world.rank == 0 && !dropped.is_empty();
        let ledger = run.dir.join(LEDGER_LINES);
        let listed = if is_writer { self.collector.source.write_dropped(&ledger, step, of_dropped) } else { Ok(()) };
        run.ranks.together.agree(recorded.and(listed))
    }

    /// Samples and scores responses to `prompts` from index `first` on, except `finished` ones, which are kept.
    pub fn sample(
        &mut self,
        run: &mut Run,
        step: u64,
        prompts: &[Prompt],
        first: usize,
        finished: &[Response],
        phases: &mut Phases,
    ) -> Result<Collected> {
        let ahead = if run.runs_ahead { self.staged.pop_front() } else { None };
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
    pub fn models_of_rank(&mut self) -> (RolloutModels<'_>, &mut Collector) {
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
    pub fn send_weights(&mut self, run: &Run, step: u64, phases: &mut Phases) {
        let actor = self.actor.as_ref().map(|actor| &actor.role);
        self.weight_sync.send(run, step, actor, self.copy.as_mut(), phases);
    }
}
