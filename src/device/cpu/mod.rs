//! The CPU: a fork-join pool, and one file per operation.

pub mod adamw;
pub mod exp;
pub mod linear_logprob;
pub mod matmul;
pub mod norm;
pub mod pool;
pub mod softmax;
pub mod value_head;
