//! The algorithms, one per page, and the state that a resume restores.

mod about;
mod adapters;
mod best;
mod config_diff;
mod dry_run;
mod export;
mod inputs;
pub mod job;
mod load;
pub mod methods;
pub mod models;
mod origin;
mod placement;
mod planned;
mod replay;
pub mod sampling;
pub mod saved;
pub mod state;
mod step_metrics;
pub mod supervised;
mod timers;
mod trace;
mod warnings;

use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::error::Result;
use crate::launch::replay::Update;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::model::{Arch, Head};
use models::ModelSpec;
use std::path::Path;

pub use export::{adapter_config, check_export};
pub use inputs::check_base;
pub use models::Archs;
pub use planned::{Planned, PlannedGpu};

/// The roles that need ranks: models, and the rewards of responses.
pub fn roles(config: &Config) -> Vec<RoleName> {
    let reward = shape(config).has_rollout().then_some(RoleName::Reward);
    let mut all: Vec<RoleName> = models(config).into_iter().map(|model| model.role).chain(reward).collect();
    all.dedup();
    all
}

/// The models, in the order in which they are loaded.
pub fn models(config: &Config) -> Vec<ModelSpec> {
    (methods::entry(config).models)(config)
}

/// Each model's head and its config.json.
pub fn archs(config: &Config) -> Result<Vec<(RoleName, Head, Arch)>> {
    let located = models(config).into_iter().map(|model| model.located(config));
    located.map(|model| model.and_then(|model| Ok((model.role, model.head, model.arch(config)?)))).collect()
}

/// The same for a plan, which needs no weights. The reward model in `reward` is added if the job names none.
pub fn planned_archs(config: &Config, reward: Option<&Path>) -> Result<Archs> {
    let reward = reward.filter(|_| shape(config).has_rollout() && !config.reward.has_models());
    let models = models::planned(config, models(config))?;
    let mut all: Vec<_> = models.into_iter().map(|model| (model.spec.role, model.spec.head, model.arch)).collect();
    if let Some(dir) = reward {
        let arch = Arch::load(dir).map_err(|e| e.within("reward model"))?;
        all.push((RoleName::Reward, Head::Value, arch));
    }
    Ok(Archs(all))
}

/// The shape of a step.
pub fn shape(config: &Config) -> StepShape {
    (methods::entry(config).shape)(config)
}

/// Runs the first steps of a job on a null device, for a plan. Errors are the same as in a run.
pub fn plan(planned: Planned) -> Result<()> {
    (methods::entry(planned.config).plan)(planned)
}

/// Computes recorded steps again: `Run::replay` names them. Returns the measurements of each update of the last one.
pub fn replay(run: Run) -> Result<Vec<Update>> {
    (methods::entry(&run.config).replay)(run)
}

/// Whether the work that a checkpoint keeps follows updates of the step that it interrupts.
pub fn has_updates(work: &[u8]) -> Result<bool> {
    sampling::Work::has_updates(work)
}

pub fn run(run: Run) -> Result<()> {
    (methods::entry(&run.config).run)(run)
}
