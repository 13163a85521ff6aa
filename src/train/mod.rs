//! The algorithms, one on a page, and the state that a resume restores.

mod batch;
mod cast;
mod changes;
mod claim;
mod clock;
mod collect;
mod cut;
mod evaluate;
mod exchange;
mod finish;
mod gpu;
mod layout;
mod losses;
mod offload;
mod places;
pub mod policy;
pub mod ppo;
mod produce;
mod report;
mod resources;
pub mod role;
pub mod score;
mod setup;
pub mod sft;
pub mod state;
mod sweep;
pub mod update;

pub use claim::claim;
pub use setup::Run;
