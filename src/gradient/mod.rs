//! From losses to one summed gradient.

pub mod accumulate;
pub mod microbatch;
pub mod sum;

pub use accumulate::{TreeSum, leaves, waiting_max};
