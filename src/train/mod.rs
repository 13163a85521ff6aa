//! The algorithms, one per page, and the state that a resume restores.

mod about;
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
mod online;
mod pairs;
mod placement;
mod planned;
mod policy_columns;
pub mod ppo;
pub mod preference;
mod reference;
pub mod reward_model;
mod reward_models;
mod rollout;
mod rollout_banner;
mod rollout_warnings;
pub mod rollout_weights;
pub mod sample_metrics;
mod sampling;
pub mod saved;
mod scores;
pub mod sft;
mod shares;
pub mod state;
pub mod step_reward;
pub mod supervised;
mod timers;
pub mod update;
mod update_metrics;
mod warnings;
mod weight_sync;

use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::method::JobKind;
use crate::error::Result;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::model::{Arch, Head};
use distill::Distill;
use eval::Eval;
use job::Job;
use kto::Kto;
use models::ModelSpec;
use on_policy::OnPolicy;
use online::Online;
use ppo::Ppo;
use preference::Preference;
use reward_model::RewardModel;
use sft::Sft;
use std::path::Path;
use step_reward::StepReward;
use supervised::Supervised;

pub use export::check_export;
pub use models::Archs;
pub use planned::{Planned, PlannedGpu};

/// The functions for jobs of one kind.
struct Entry {
    models: fn(&Config) -> Vec<ModelSpec>,
    shape: fn(&Config) -> StepShape,
    plan: fn(Planned) -> Result<()>,
    run: fn(Run) -> Result<()>,
}

impl Entry {
    fn for_job<J: Job>() -> Self {
        Self { models: J::models, shape: J::shape, plan: planned::drive::<J>, run: job::run::<J> }
    }
}

/// The only match on the kind of a job.
fn entry(config: &Config) -> Entry {
    match config.job.kind {
        JobKind::Sft => Entry::for_job::<Supervised<Sft>>(),
        JobKind::RewardModel => Entry::for_job::<Supervised<RewardModel>>(),
        JobKind::Dpo => Entry::for_job::<Supervised<Preference>>(),
        JobKind::Kto => Entry::for_job::<Supervised<Kto>>(),
        JobKind::StepReward => Entry::for_job::<Supervised<StepReward>>(),
        JobKind::Distill if config.distill.on_policy => Entry::for_job::<Online<OnPolicy>>(),
        JobKind::Distill => Entry::for_job::<Supervised<Distill>>(),
        JobKind::Eval => Entry::for_job::<Online<Eval>>(),
        JobKind::Ppo => Entry::for_job::<Online<Ppo>>(),
    }
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
    (entry(config).models)(config)
}

/// Each model's head and its config.json.
pub fn archs(config: &Config) -> Result<Vec<(RoleName, Head, Arch)>> {
    models(config).into_iter().map(|model| Ok((model.role, model.head, model.arch()?))).collect()
}

/// The same for a plan, which needs no weights. The reward model in `reward` is added if the job names none.
pub fn planned_archs(config: &Config, reward: Option<&Path>) -> Result<Archs> {
    let reward = reward.filter(|_| shape(config).has_rollout() && !config.reward.has_models());
    let mut all = archs(config)?;
    if let Some(dir) = reward {
        let arch = Arch::load(dir).map_err(|e| e.within("reward model"))?;
        all.push((RoleName::Reward, Head::Value, arch));
    }
    Ok(Archs(all))
}

/// The shape of a step.
pub fn shape(config: &Config) -> StepShape {
    (entry(config).shape)(config)
}

/// Runs the first steps of a job on a null device, for a plan. Errors are the same as in a run.
pub fn plan(planned: Planned) -> Result<()> {
    (entry(planned.config).plan)(planned)
}

pub fn run(run: Run) -> Result<()> {
    (entry(&run.config).run)(run)
}
