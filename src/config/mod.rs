//! The schema of a job, a file per table.

pub mod ppo;
pub mod reward;
