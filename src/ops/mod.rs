//! Operations, one file each: contract, shape checks, dispatch to a device.
//!
//! Legend of dims: t tokens of a packed row, d hidden width, h query heads, g key/value heads, e head dim, f MLP width,
//! v vocabulary, E experts, m rows, n outputs, k inputs. Forward results are `=`; gradients of parameters are `+=`.
//!
//! Batch invariance: a row of any result depends bitwise on that row's inputs only. It does not depend on the number of
//! rows, on their order, or on the number of threads.
//!
//! An operation panics if shapes, lengths, devices or dtypes do not match, or if an index is out of range.

pub mod adamw;
pub mod attention;
mod attention_shape;
pub mod columns;
pub mod delta;
pub mod embedding;
pub mod experts;
pub mod gelu;
pub mod glu;
mod head_part;
pub mod layernorm;
pub mod linear_divergence;
pub mod linear_logprob;
mod linear_logprob_cuda;
pub mod matmul;
pub mod norm;
pub mod residual;
pub mod ring_attention;
pub mod rmsnorm;
pub mod rope;
pub mod row_gate;
pub mod rows;
pub mod sample;
pub mod scale;
pub mod sinks;
pub mod softcap;
pub mod taps;
pub mod value_head;
pub mod zigzag;

use crate::tensor::Tensor;

/// Checks that `t`, the `what` of operation `op`, has the shape (rows, width).
fn check(op: &str, what: &str, t: &Tensor, rows: usize, width: usize) {
    assert!(
        t.rows() == rows && t.width() == width,
        "{op}: {what} must be ({rows}, {width}), got ({}, {})",
        t.rows(),
        t.width()
    );
}
