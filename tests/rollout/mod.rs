//! Tests of sampling, scheduling and rollout.

mod exactness;
mod models;
mod sampling;
mod scheduling;
mod stopping;
mod turns;
