//! PPO and its relatives on one page: prompts -> rollout -> reward -> advantage -> { loss -> gradient -> step }
//! (arXiv:1707.06347; `ppo.advantage` and `ppo.loss` name the papers of the others).

use super::rollout_warnings;
use super::update::Update;
use super::update_metrics::REPORTED;
use crate::advantage::{self, AdvantageState};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::method::ppo::{KlIn, PpoConfig};
use crate::data::{Rows, SftRow};
use crate::error::{Error, Result};
use crate::experience::{Experience, Finish};
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::Role;
use crate::learn::sums::Sums;
use crate::metrics::keys::{self, Metrics, named};
use crate::model::Head;
use crate::train::job::Job;
use crate::train::models::ModelSpec;
use crate::train::sampling::Sampling;
use crate::train::sampling::online::{Minibatch, Online, OnlineMethod};
use crate::train::sampling::sample_metrics::advantage_values;
use crate::train::warnings::Warning;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The state of PPO from step to step; part of the checkpoint.
#[derive(Serialize, Deserialize)]
pub struct Ppo {
    /// The adaptive KL coefficient, and the moments of the rewards.
    #[serde(flatten)]
    advantages: AdvantageState,
    /// The entries of `rollout.response_tokens_schedule` that ended before their steps.
    #[serde(default, skip_serializing_if = "is_zero")]
    lengths_skipped: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl OnlineMethod for Ppo {
    fn models(config: &Config) -> Vec<ModelSpec> {
        let uses = config.uses();
        let reference = || ModelSpec::frozen(RoleName::Reference, config.model.reference_dir());
        let critic = || ModelSpec::new(RoleName::Critic, config.critic_dir(), Head::Value, Some(&config.optim.critic));
        let actor = ModelSpec::actor(config, Head::LanguageModel);
        let all = [Some(actor), uses.reference.then(reference), uses.critic.then(critic)];
        all.into_iter().flatten().collect()
    }

    fn steps(config: &Config, _rows: &Rows) -> u64 {
        config.job.steps
    }

    fn minibatches(Config { ppo, .. }: &Config) -> (usize, usize) {
        let [actor, critic] = ppo.epochs_in_force();
        (actor.max(critic), ppo.minibatch_samples)
    }

    fn shape(config: &Config, rollout: StepShape) -> StepShape {
        let uses = config.uses();
        let [critics, references] = [uses.critic, uses.reference].map(usize::from);
        let [epochs, critic_epochs] = config.ppo.epochs_in_force();
        StepShape { epochs, critic_epochs, trained: 1 + critics, scored: critics + references, ..rollout }
    }

    fn warnings_of_start(run: &Run, rows: &Rows, context: usize) -> Vec<String> {
        rollout_warnings::of_start(&run.config, run.ranks.layout().rollout_data(), rows, context)
    }

    fn warnings_of_step(config: &Config, values: &Metrics) -> Vec<Warning> {
        rollout_warnings::of_step(config, values)
    }

    fn new(config: &Config, _teachers: Vec<Role>) -> Self {
        Self { advantages: AdvantageState::new(&config.ppo), lengths_skipped: 0 }
    }

    fn state(&self) -> Value {
        serde_json::to_value(self).expect("numbers are JSON")
    }

    fn restore(&mut self, state: Value) -> Result<()> {
        let mut kl = self.advantages.kl.clone();
        *self = serde_json::from_value(state)
            .map_err(|e| Error::data(format!("the checkpoint's state is malformed: {e}")))?;
        kl.resume(&self.advantages.kl);
        self.advantages.kl = kl;
        Ok(())
    }

    fn lengths_skipped(&self) -> usize {
        self.lengths_skipped
    }

    /// Computes advantages and returns from scores, KL and values.
    fn prepare(
        &mut self,
        run: &Run,
        sampling: &Sampling,
        step: u64,
        samples: &mut [Experience],
    ) -> Result<(Metrics, f32)> {
        let Config { ppo, rollout, .. } = &run.config;
        let (kl_beta, weights) = (self.advantages.kl.beta, sampling.collector.reward.weights());
        // The length penalty ends at the limit of this step.
        let limit = rollout.scheduled_tokens(step, self.lengths_skipped).unwrap_or(usize::MAX);
        let ppo = PpoConfig { overlong_tokens_max: ppo.overlong_tokens_max.min(limit), ..ppo.clone() };
        let stats = advantage::compute_step(&ppo, weights, &mut self.advantages, samples)?;
        let cut = samples.iter().filter(|sample| sample.response.finish == Finish::Length).count();
        self.lengths_skipped =
            rollout.skipped_after(step, self.lengths_skipped, cut as f64 / samples.len().max(1) as f64);
        Ok((advantage_values(&stats, samples, kl_beta), kl_beta))
    }

    /// Updates the actor and the critic, each in its epochs. While the critic warms up, only the critic.
    fn update(&mut self, run: &Run, sampling: &mut Sampling, batch: &Minibatch) -> Result<Sums> {
        let ppo = &run.config.ppo;
        let [of_actor, of_critic] = ppo.epochs_in_force().map(|epochs| batch.epoch < epochs);
        let trains_actor = of_actor && batch.step > ppo.critic_warmup_steps;
        let texts = &if trains_actor { texts(run, sampling, batch)? } else { Vec::new() };
        let update = Update { config: &run.config, axes: &run.ranks.axes, kl_beta: batch.kl_beta, texts };
        let actor = sampling.actor.as_mut().filter(|_| trains_actor);
        update.minibatch(actor, sampling.critic.as_mut().filter(|_| of_critic), batch.samples)
    }

    fn metrics(run: &Run, sums: &Sums) -> Metrics {
        let kl_in_loss = run.config.ppo.kl_in == KlIn::Loss && run.config.uses().reference;
        // Means over the updates, and the largest gap and norms.
        let means = sums.means(REPORTED);
        let of_updates = means.iter().copied().filter(|(key, _)| kl_in_loss || *key != keys::KL_LOSS);
        // The metrics of model.actor that every kind of job reports.
        let of_actor = [(keys::LR, keys::LR_ACTOR), (keys::GRAD_NORM, keys::GRAD_NORM_ACTOR)];
        let of_actor = of_actor.into_iter().flat_map(|(key, of_actor)| {
            means.iter().filter(move |(known, _)| *known == of_actor).map(move |(_, value)| (key, *value))
        });
        named(of_updates.chain(of_actor))
    }
}

/// The pretraining rows of an update: as many as a minibatch has samples, if the job learns from such rows (PPO-ptx).
fn texts(run: &Run, sampling: &mut Sampling, batch: &Minibatch) -> Result<Vec<SftRow>> {
    if run.config.ppo.ptx_coef == 0.0 {
        return Ok(Vec::new());
    }
    let shape = Online::<Ppo>::shape(&run.config);
    let update = (batch.step - 1) * shape.updates() as u64 + batch.before as u64 + 1;
    run.ranks.together.agree(sampling.collector.source.pretrain(update, shape.minibatch))
}
