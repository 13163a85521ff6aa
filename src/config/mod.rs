//! The one schema of a job. Every key has a default here and a line in `jobs/reference.toml`; a test holds them equal.

pub mod job;
mod load;

pub use load::{load, parse};

use job::{EvalConfig, GradientConfig, JobConfig, SftConfig};
use serde::{Deserialize, Serialize};
