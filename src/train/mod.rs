//! The algorithms, one on a page, and the state that a resume restores.

pub mod answerer;
mod banner;
mod batch;
mod check;
mod claim;
mod config_diff;
mod evaluate;
mod experience_maker;
mod export;
mod gpu;
mod inputs;
pub mod job;
mod layout;
mod models;
mod offload;
mod placement;
pub mod ppo;
mod products;
mod products_time;
mod report;
mod resources;
mod rollout;
pub mod rollout_weights;
mod setup;
pub mod sft;
pub mod state;
mod timers;
mod trial;
mod trial_draws;
mod trial_layout;
mod trial_ring;
mod trial_update;
pub mod update;

pub use claim::{claim, working_dir};
pub use setup::Run;

use crate::config::job::JobKind;
use crate::error::Result;

/// Runs the job of `run.config` to its end.
///
/// # Errors
/// As `job::run`.
pub fn run(run: Run) -> Result<()> {
    match run.config.job.kind {
        JobKind::Sft => job::run::<sft::Sft>(run),
        JobKind::Ppo => job::run::<ppo::Ppo>(run),
    }
}
