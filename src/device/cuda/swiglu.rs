//! y = silu(gate) * up

use super::gpu::gpu;
use super::memory::{View, ViewMut};
use super::shape::{THREADS, check_aligned, check_width, grid_of_eights};
use crate::dtype::DType::Bf16;

/// gate, up, y bf16 of one length, a multiple of 8.
///
/// # Panics
/// If the lengths differ.
pub fn forward(gate: View, up: View, mut y: ViewMut) {
    const OP: &str = "swiglu::forward";
    let len = check_lens(OP, gate.len(), &[("up", up.len()), ("y", y.len())]);
    let args = [gate.arg(Bf16), up.arg(Bf16), y.arg(Bf16)];
    check_aligned(OP, &args);
    gpu().launch("swiglu_forward", grid_of_eights(len), THREADS, 0, &[&args[..], &[len.into()]].concat());
}

/// With s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s. Both overwritten.
///
/// # Panics
/// If the lengths differ.
pub fn backward(gate: View, up: View, dy: View, mut dgate: ViewMut, mut dup: ViewMut) {
    const OP: &str = "swiglu::backward";
    let lens = [("up", up.len()), ("dy", dy.len()), ("dgate", dgate.len()), ("dup", dup.len())];
    let len = check_lens(OP, gate.len(), &lens);
    let args = [gate.arg(Bf16), up.arg(Bf16), dy.arg(Bf16), dgate.arg(Bf16), dup.arg(Bf16)];
    check_aligned(OP, &args);
    gpu().launch("swiglu_backward", grid_of_eights(len), THREADS, 0, &[&args[..], &[len.into()]].concat());
}

fn check_lens(op: &str, len: usize, others: &[(&str, usize)]) -> usize {
    if len > 0 {
        check_width(op, len);
    }
    for (name, other) in others {
        assert!(*other == len, "{op}: {name} has {other} values, gate {len}");
    }
    len
}
