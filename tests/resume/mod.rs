//! Whole runs of the program, alone and under mpirun: equal on any number of ranks, equal after any interruption, and
//! nothing lost when they fail. Models and data are tiny and made by the program's own verbs.

mod adapters;
mod alike;
mod arrays;
mod async_rollout;
mod best;
mod changed;
mod dynamic_sampling;
mod environment;
mod evaluation;
mod failing;
mod families;
mod interrupted;
pub mod job;
mod layouts;
mod learning;
mod memory;
mod methods;
mod outside;
mod placement;
mod records;
mod replay;
mod rewards;
mod rounded_keys;
mod starts;
mod traces;
mod variants;
mod warned;
mod windows;
