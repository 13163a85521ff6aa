//! The algorithms, one on a page, and the state that a resume restores.

mod claim;
mod collect;
mod evaluate;
mod exchange;
mod finish;
pub mod ppo;
mod report;
mod role;
mod score;
mod setup;
pub mod sft;
pub mod state;
mod update;

pub use claim::claim;
pub use setup::Run;
