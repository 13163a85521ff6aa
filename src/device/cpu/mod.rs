//! The CPU: a fork-join pool, and one file per operation.

pub mod adamw;
pub mod attention;
pub mod embedding;
pub mod exp;
pub mod linear_logprob;
pub mod matmul;
pub mod norm;
pub mod pool;
pub mod residual;
pub mod rmsnorm;
pub mod rope;
pub mod sample;
pub mod softmax;
pub mod swiglu;
pub mod value_head;
