//! The algorithms, one on a page, and the state that a resume restores.

mod async_rollout;
mod best;
mod config_diff;
pub mod distill;
mod dynamic_sampling;
mod episodes;
pub mod eval;
mod evaluate;
mod experience_maker;
mod export;
mod inputs;
pub mod job;
mod judges;
pub mod kto;
pub mod models;
mod on_policy;
mod pairs;
mod placement;
mod planned;
pub mod ppo;
pub mod preference;
mod reference;
pub mod reward_model;
mod reward_models;
mod rollout;
pub mod rollout_weights;
mod sample_metrics;
pub mod saved;
mod scores;
pub mod sft;
mod shares;
pub mod state;
pub mod step_reward;
mod supervised;
mod timers;
pub mod update;
mod warnings;
mod weight_sync;

use crate::config::Config;
use crate::config::job::JobKind;
use crate::config::mesh::RoleName;
use crate::error::Result;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::model::{Arch, Head};
use job::Job;
use models::ModelSpec;
use std::path::Path;

pub use export::check_export;
pub use models::Archs;
pub use planned::{Planned, PlannedGpu};

/// The only match on the kind of a job: `$call` with `$job` as the method of `$config`.
macro_rules! of_kind {
    ($config:expr, $job:ident => $call:expr) => {
        match $config.job.kind {
            JobKind::Sft => {
                type $job = sft::Sft;
                $call
            }
            JobKind::RewardModel => {
                type $job = reward_model::RewardModel;
                $call
            }
            JobKind::Dpo => {
                type $job = preference::Preference;
                $call
            }
            JobKind::Kto => {
                type $job = kto::Kto;
                $call
            }
            JobKind::StepReward => {
                type $job = step_reward::StepReward;
                $call
            }
            JobKind::Distill if $config.distill.on_policy => {
                type $job = on_policy::OnPolicy;
                $call
            }
            JobKind::Distill => {
                type $job = distill::Distill;
                $call
            }
            JobKind::Eval => {
                type $job = eval::Eval;
                $call
            }
            JobKind::Ppo => {
                type $job = ppo::Ppo;
                $call
            }
        }
    };
}

/// The roles that need ranks: models, and the rewards of responses.
pub fn roles(config: &Config) -> Vec<RoleName> {
    let reward = shape(config).has_rollout().then_some(RoleName::Reward);
    let mut all: Vec<RoleName> = models(config).into_iter().map(|model| model.role).chain(reward).collect();
    all.dedup();
    all
}

/// The models, in the order in which they are loaded.
pub fn models(config: &Config) -> Vec<ModelSpec> {
    of_kind!(config, J => J::models(config))
}

/// The head of each model and its config.json.
pub fn archs(config: &Config) -> Result<Vec<(RoleName, Head, Arch)>> {
    models(config).into_iter().map(|model| Ok((model.role, model.head, model.arch()?))).collect()
}

/// The same of a plan, which needs no weights, and of the reward model in `reward`, where the job names none.
pub fn planned_archs(config: &Config, reward: Option<&Path>) -> Result<Archs> {
    let reward = reward.filter(|_| shape(config).has_rollout() && !config.reward.has_models());
    let mut all = archs(config)?;
    if let Some(dir) = reward {
        let arch = Arch::load(dir).map_err(|e| e.within("reward model"))?;
        all.push((RoleName::Reward, Head::Value, arch));
    }
    Ok(Archs(all))
}

/// How a step is cut.
pub fn shape(config: &Config) -> StepShape {
    of_kind!(config, J => J::shape(config))
}

/// Runs the first steps of a job on a null device, for a plan. Errors are those that a run of it would end with.
pub fn plan(planned: Planned) -> Result<()> {
    of_kind!(planned.config, J => planned::drive::<J>(planned))
}

pub fn run(run: Run) -> Result<()> {
    of_kind!(run.config, J => job::run::<J>(run))
}
