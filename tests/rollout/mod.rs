//! Tests of sampling, scheduling and rollout.

mod beams;
mod exactness;
mod models;
mod sampling;
mod scheduling;
mod stopping;
