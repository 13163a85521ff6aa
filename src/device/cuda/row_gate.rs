//! y[i] = sigmoid(g[i]) x[i]

use super::gpu::gpu;
use super::memory::{View, ViewMut};
use super::shape::{THREADS, check_aligned, check_width, count, grid_of};
use crate::dtype::DType::{Bf16, F32};

/// Rows of a block in the backward, one per warp.
const ROWS: usize = THREADS / 32;

/// gate (t) f32; x and y (t, width) bf16.
pub fn forward(gate: View, x: View, width: usize, mut y: ViewMut) {
    const OP: &str = "row_gate::forward";
    check_width(OP, width);
    let (t, eights) = (gate.len(), width / 8);
    let [x, y] = [x.arg(Bf16), y.arg(Bf16)];
    check_aligned(OP, &[x, y]);
    let args = [gate.arg(F32), x, y, count(OP, t), count(OP, eights)];
    gpu().launch("row_gate_forward", grid_of(OP, t * eights), THREADS, 0, &args);
}

/// dx in place of dy (t, width) bf16, and the gradient of the gate (t) f32.
pub fn backward(gate: View, x: View, width: usize, mut dy: ViewMut, mut dgate: ViewMut) {
    const OP: &str = "row_gate::backward";
    check_width(OP, width);
    let t = gate.len();
    let [x, dy] = [x.arg(Bf16), dy.arg(Bf16)];
    check_aligned(OP, &[x, dy]);
    let args = [gate.arg(F32), x, dy, dgate.arg(F32), count(OP, t), count(OP, width)];
    gpu().launch("row_gate_backward", [t.div_ceil(ROWS), 1, 1], THREADS, 0, &args);
}
