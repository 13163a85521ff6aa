//! Sections of a job as plain data.

pub mod rollout;
