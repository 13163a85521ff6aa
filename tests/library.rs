//! Tests that call the library.

mod checkpoint;
mod data;
mod formulas;
mod metrics;
mod ops;
mod parity;
mod reward;
mod rollout;
mod tidy;
