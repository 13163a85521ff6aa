//! From losses to one summed gradient.

pub mod accumulate;

pub use accumulate::{TreeSum, leaves};
