//! Each operation on the CPU against a plain f64 loop, its gradients, and its bitwise promises.

mod attention;
mod embedding;
mod numbers;
mod rmsnorm;
mod rope;
mod swiglu;
