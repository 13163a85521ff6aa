//! Evaluation alone on one page: held-out prompts -> responses -> rewards -> how many are right. Nothing is trained.

use super::evaluate;
use super::job::{Ended, Job, Step};
use super::models::{JobModel, ModelSpec};
use super::ppo::Ppo;
use super::reward_models::RewardModels;
use super::rollout::Collector;
use super::rollout_weights::{Gathered, RolloutWeights};
use super::saved;
use crate::comm::phase;
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::rollout::RolloutConfig;
use crate::data::{Part, PromptSource, Rows};
use crate::error::Result;
use crate::launch::banner::Needs;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::{Learner, Role};
use crate::metrics::keys::Metrics;
use crate::metrics::{Phases, eval_lines};
use crate::model::Arch;
use crate::text::Tokenizer;
use std::sync::Arc;
use std::time::Instant;

pub struct Eval {
    /// Where it is on this rank.
    actor: Option<Role>,
    rollout_weights: Option<RolloutWeights>,
    collector: Collector,
}

impl Job for Eval {
    type Row = crate::experience::Prompt;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let actor = ModelSpec::frozen(RoleName::Actor, &config.model.actor);
        std::iter::once(actor).chain(Ppo::reward_models(config)).collect()
    }

    fn check_models(config: &Config, actor: &Arch, other: &JobModel) -> Result<()> {
        Ppo::check_models(config, actor, other)
    }

    /// It begins and ends at the step whose weights it evaluates.
    fn steps(config: &Config, _rows: &Rows) -> u64 {
        saved::step_of(&config.model.actor)
    }

    /// What a plan takes for a step: each prompt is answered greedily, and by sampling.
    fn shape(config: &Config) -> StepShape {
        StepShape {
            part: Part::Prompt,
            rows: config.rollout.prompts_per_step,
            samples_per_row: 1 + config.eval.samples_per_prompt,
            minibatch: 1,
            epochs: 0,
            microbatch_tokens_max: config.ppo.microbatch_tokens_max,
            trained: 0,
            scored: 0,
        }
    }

    fn needs(run: &Run, arch: &Arch, rows: &Rows) -> Needs {
        let Needs { mut about, mut notes, .. } = Ppo::needs(run, arch, rows);
        notes.retain(|(name, _)| name != "old logprobs");
        let RolloutConfig { samples_per_prompt: n, temperature, .. } = evaluate::sampled(&run.config);
        about.push(("answers".to_string(), format!("greedy, and {n} drawn at temperature {temperature}")));
        Needs { rollouts: 0, about, notes }
    }

    fn new(
        run: &Run,
        arch: &Arch,
        _learners: Vec<Learner>,
        frozen: Vec<Role>,
        source: PromptSource,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let is_actor = |role: &Role| role.name == RoleName::Actor.name();
        let (mut actors, rewards): (Vec<_>, Vec<_>) = frozen.into_iter().partition(is_actor);
        let mut actor = actors.pop();
        if let Some(actor) = &mut actor {
            run.onload(actor);
        }
        let rewards = run.ranks.all.agree(RewardModels::new(run, rewards, &tokenizer, &source))?;
        let (rollout_weights, bytes) = RolloutWeights::of(run, actor.as_ref(), source.longest())?;
        let collector = Collector::new(run, source, tokenizer, arch, bytes, rewards)?;
        Ok(Self { actor, rollout_weights, collector })
    }

    fn rows(&self) -> &Rows {
        &self.collector.source
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        Vec::new()
    }

    /// In a plan alone.
    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        phase::set(step.number, "rollout");
        Ok(self.evaluate(run, step.number)?)
    }

    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Metrics> {
        let start = Instant::now();
        let actor = self.actor.as_ref().zip(self.rollout_weights.as_ref());
        let gathered = actor.map(|(actor, rollout_weights)| rollout_weights.gather(actor, &mut Phases::start()));
        let model = gathered.as_ref().map(Gathered::model);
        let found = evaluate::evaluate(run, model, &mut self.collector, step, start)?;
        run.recorder.say(&eval_lines(&found));
        Ok(found)
    }
}
