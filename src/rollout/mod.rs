//! Rollout: responses sampled from the training weights, in place.

pub mod blocks;
pub mod scheduler;
