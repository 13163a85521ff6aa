//! The CPU: a fork-join pool, and one file per operation.

pub mod attention;
pub mod embedding;
pub mod pool;
pub mod residual;
pub mod rmsnorm;
pub mod rope;
pub mod swiglu;
