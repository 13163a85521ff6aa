//! The CPU: a fork-join pool, and one file per operation.

pub mod adamw;
pub mod attention;
mod attention_backward;
mod attention_forward;
pub mod embedding;
pub mod exp;
pub mod linear_logprob;
pub mod matmul;
pub mod norm;
pub mod pool;
pub mod residual;
pub mod rmsnorm;
pub mod rope;
mod scratch;
pub mod softmax;
pub mod swiglu;
pub mod value_head;
mod vector;
