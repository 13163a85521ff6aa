//! Each operation against naive f64 loops, its backward against finite differences, and bitwise tests.

mod arena;
mod attention;
mod delta;
mod embedding;
mod experts;
mod glu;
mod linear_divergence;
mod linear_logprob;
mod matmul;
mod nf4;
pub mod probe;
mod ring_attention;
mod rmsnorm;
mod rope;
mod sinks;
mod small;
