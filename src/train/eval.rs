//! Evaluation alone on one page: held-out prompts -> responses -> rewards -> share of correct answers. Nothing is
//! trained.

use super::evaluate;
use super::job::{Ended, Job, Step};
use super::models::{JobModel, ModelSpec};
use super::ppo::Ppo;
use super::saved;
use crate::comm::phase;
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::rollout::RolloutConfig;
use crate::data::{PromptSource, Rows};
use crate::error::Result;
use crate::launch::banner::BannerRows;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::{Learner, Role};
use crate::metrics::keys::Metrics;
use crate::metrics::{eval_lines, name_of_rows};
use crate::model::Arch;
use crate::text::Tokenizer;
use std::sync::Arc;

/// A PPO job without models that learn.
pub struct Eval(Ppo);

impl Job for Eval {
    type Row = crate::experience::Prompt;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let actor = ModelSpec::frozen(RoleName::Actor, &config.model.actor);
        std::iter::once(actor).chain(Ppo::reward_models(config)).collect()
    }

    fn check_models(config: &Config, actor: &Arch, other: &JobModel) -> Result<()> {
        Ppo::check_models(config, actor, other)
    }

    fn check_rows(config: &Config, source: &PromptSource, tokenizer: &Tokenizer) -> Result<()> {
        Ppo::check_rows(config, source, tokenizer)
    }

    /// The job begins and ends at the step whose weights it evaluates.
    fn steps(config: &Config, _rows: &Rows) -> u64 {
        saved::step_of(&config.model.actor)
    }

    /// The step of a plan: each prompt is answered greedily and by sampling.
    fn shape(config: &Config) -> StepShape {
        let samples_per_row = 1 + config.eval.samples_per_prompt;
        StepShape { samples_per_row, minibatch: 1, epochs: 0, trained: 0, scored: 0, ..Ppo::shape(config) }
    }

    fn needs(run: &Run, arch: &Arch, rows: &Rows) -> BannerRows {
        let BannerRows { mut about, mut notes, .. } = Ppo::needs(run, arch, rows);
        notes.retain(|(name, _)| name != "old logprobs");
        let RolloutConfig { samples_per_prompt: n, temperature, .. } = evaluate::sampled(&run.config);
        about.push(("answers".to_string(), format!("greedy, and {n} sampled at temperature {temperature}")));
        BannerRows { rollouts: 0, about, notes }
    }

    fn new(
        run: &Run,
        arch: &Arch,
        learners: Vec<Learner>,
        mut frozen: Vec<Role>,
        source: PromptSource,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let is_actor = |role: &&mut Role| role.name == RoleName::Actor.name();
        frozen.iter_mut().filter(is_actor).for_each(|actor| run.onload(actor));
        Ppo::new(run, arch, learners, frozen, source, tokenizer).map(Self)
    }

    fn check_services(run: &Run, arch: &Arch, source: PromptSource, tokenizer: Arc<Tokenizer>) -> Result<()> {
        Ppo::check_services(run, arch, source, tokenizer)
    }

    fn rows(&self) -> &Rows {
        self.0.rows()
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        Vec::new()
    }

    /// Called only in a plan.
    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        phase::set(step.number, phase::Phase::Rollout);
        Ok(self.evaluate(run, step.number)?)
    }

    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Metrics> {
        let found = self.0.evaluate(run, step)?;
        run.recorder.say(&eval_lines(&found, name_of_rows(&run.config.data.eval_split)));
        Ok(found)
    }
}
