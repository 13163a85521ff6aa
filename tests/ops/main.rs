//! Each operation against naive f64 loops, its backward against finite differences, and bitwise facts.

mod linear_logprob;
mod matmul;
mod probe;
mod small;
