//! The one schema of a job. Every key has a default here and a line in `jobs/reference.toml`; a test holds them equal.

pub mod checkpoint;
pub mod job;
pub mod mesh;
pub mod metrics;
pub mod optim;
pub mod ppo;
