//! The CPU: a fork-join pool, and one file per operation.

pub mod exp;
pub mod pool;
pub mod sample;
pub mod softmax;
