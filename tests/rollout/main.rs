//! Facts about sampling, scheduling and rollout.

mod sampling;
mod scheduling;
