//! Evaluation alone on one page: held-out prompts -> responses -> rewards -> share of correct answers. Nothing is
//! trained.

use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::rollout::RolloutConfig;
use crate::data::Rows;
use crate::error::Result;
use crate::launch::banner::BannerRows;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::Role;
use crate::metrics::keys::Metrics;
use crate::metrics::{eval_lines, name_of_rows};
use crate::train::models::ModelSpec;
use crate::train::sampling::Sampling;
use crate::train::sampling::evaluate;
use crate::train::sampling::online::OnlineMethod;
use crate::train::saved;

pub struct Eval;

impl OnlineMethod for Eval {
    fn models(config: &Config) -> Vec<ModelSpec> {
        vec![ModelSpec::frozen(RoleName::Actor, &config.model.actor)]
    }

    /// The job begins and ends at the step whose weights it evaluates.
    fn steps(config: &Config, _rows: &Rows) -> u64 {
        saved::step_of(&config.model.actor)
    }

    fn minibatches(_config: &Config) -> (usize, usize) {
        (0, 1)
    }

    /// The step of a plan: each prompt is answered greedily and by sampling.
    fn shape(config: &Config, rollout: StepShape) -> StepShape {
        StepShape { samples_per_row: 1 + config.eval.samples_per_prompt, trained: 0, ..rollout }
    }

    fn adapt_banner(run: &Run, rows: &mut BannerRows) {
        rows.rollouts = 0;
        rows.notes.retain(|(name, _)| name != "old logprobs");
        let RolloutConfig { samples_per_prompt: n, temperature, .. } = evaluate::sampled(&run.config);
        rows.about.push(("answers".to_string(), format!("greedy, and {n} sampled at temperature {temperature}")));
    }

    fn new(_config: &Config, _teachers: Vec<Role>) -> Self {
        Self
    }

    fn evaluate(&mut self, run: &mut Run, sampling: &mut Sampling, step: u64) -> Result<Metrics> {
        let found = sampling.evaluate(run, step)?;
        run.recorder.say(&eval_lines(&found, name_of_rows(&run.config.data.eval_split)));
        Ok(found)
    }
}
