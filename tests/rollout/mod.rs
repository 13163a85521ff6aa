//! Tests of sampling, scheduling and rollout.

mod beams;
mod edits;
mod exactness;
mod models;
mod sampling;
mod scheduling;
mod states;
mod stopping;
mod turns;
mod windows;
