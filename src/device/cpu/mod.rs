//! The CPU: a fork-join pool, and one file per operation.

pub mod adamw;
pub mod attention;
mod attention_backward;
mod attention_forward;
mod attention_tile;
pub mod copy;
pub mod embedding;
pub mod exp;
pub mod glu;
mod lanes;
pub mod linear_divergence;
pub mod matmul;
pub mod matmul_weight;
mod microkernel;
pub mod nf4;
pub mod norm;
mod panel;
pub mod peak;
pub mod pool;
mod product;
pub mod rmsnorm;
pub mod rope;
pub mod sample;
mod scratch;
pub mod softmax;
pub mod value_head;
mod vector;
