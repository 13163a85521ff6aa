//! The methods, one per page, and the list of them.

mod distill;
mod eval;
mod kto;
mod on_policy;
mod pairs;
pub mod policy_columns;
mod ppo;
mod preference;
mod reference;
mod reward_model;
mod rollout_warnings;
pub mod sft;
mod step_reward;
pub mod update;
pub(super) mod update_metrics;

use super::job::{self, Job};
use super::models::ModelSpec;
use super::planned::{self, Planned};
use super::replay;
use super::sampling::online::Online;
use super::supervised::Supervised;
use crate::config::Config;
use crate::config::method::JobKind;
use crate::error::Result;
use crate::launch::replay::Update;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;

/// The functions for jobs of one kind.
pub(super) struct Entry {
    pub models: fn(&Config) -> Vec<ModelSpec>,
    pub shape: fn(&Config) -> StepShape,
    pub plan: fn(Planned) -> Result<()>,
    pub run: fn(Run) -> Result<()>,
    pub replay: fn(Run) -> Result<Vec<Update>>,
}

impl Entry {
    fn for_job<J: Job>() -> Self {
        Self {
            models: J::models,
            shape: J::shape,
            plan: planned::drive::<J>,
            run: job::run::<J>,
            replay: replay::run::<J>,
        }
    }
}

/// The only match on the kind of a job.
pub(super) fn entry(config: &Config) -> Entry {
    match config.job.kind {
        JobKind::Sft => Entry::for_job::<Supervised<sft::Sft>>(),
        JobKind::RewardModel => Entry::for_job::<Supervised<reward_model::RewardModel>>(),
        JobKind::Dpo => Entry::for_job::<Supervised<preference::Preference>>(),
        JobKind::Kto => Entry::for_job::<Supervised<kto::Kto>>(),
        JobKind::StepReward => Entry::for_job::<Supervised<step_reward::StepReward>>(),
        JobKind::Distill if config.distill.on_policy => Entry::for_job::<Online<on_policy::OnPolicy>>(),
        JobKind::Distill => Entry::for_job::<Supervised<distill::Distill>>(),
        JobKind::Eval => Entry::for_job::<Online<eval::Eval>>(),
        JobKind::Ppo => Entry::for_job::<Online<ppo::Ppo>>(),
    }
}
