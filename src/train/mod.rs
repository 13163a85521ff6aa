//! The algorithms, one on a page, and the state that a resume restores.

pub mod answerer;
mod astray;
mod banner;
mod batch;
mod changes;
mod check;
mod claim;
mod clock;
mod collect;
mod cut;
mod evaluate;
mod exchange;
mod finish;
mod gpu;
mod inputs;
pub mod job;
mod layout;
mod models;
mod offload;
mod places;
pub mod policy;
pub mod ppo;
mod produce;
mod products;
mod products_time;
mod report;
mod resources;
pub mod role;
pub mod score;
mod setup;
pub mod sft;
pub mod state;
pub mod sums;
mod sweep;
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
