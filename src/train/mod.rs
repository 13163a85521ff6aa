//! The algorithms, one on a page, and the state that a resume restores.

mod batch;
mod cast;
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
mod layout;
pub mod losses;
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
mod sweep;
mod trial;
mod trial_draws;
mod trial_update;
pub mod update;

pub use claim::claim;
pub use setup::Run;
