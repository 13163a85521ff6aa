//! y = act(gate) * up

use super::gpu::gpu;
use super::memory::{View, ViewMut};
use super::shape::{THREADS, check_aligned, grid_of_eights};
use crate::device::cpu::glu::Activation;
use crate::dtype::DType::Bf16;

/// gate, up, y bf16 of one length, a multiple of 8.
pub fn forward(activation: Activation, gate: View, up: View, mut y: ViewMut) {
    const OP: &str = "glu::forward";
    let args = [gate.arg(Bf16), up.arg(Bf16), y.arg(Bf16)];
    check_aligned(OP, &args);
    let len = check_len(OP, gate);
    let kernel = match activation {
        Activation::Silu => "swiglu_forward",
        Activation::GeluTanh => "geglu_forward",
        Activation::Sigmoid => "sigmoid_forward",
        Activation::ClampedSilu { .. } => panic!("{OP}: there is no kernel for {activation:?}"),
    };
    gpu().launch(kernel, grid_of_eights(len), THREADS, 0, &[&args[..], &[len.into()]].concat());
}

/// dgate = dy up act'(gate) and dup = dy act(gate). Both are overwritten.
pub fn backward(activation: Activation, gate: View, up: View, dy: View, mut dgate: ViewMut, mut dup: ViewMut) {
    const OP: &str = "glu::backward";
    let args = [gate.arg(Bf16), up.arg(Bf16), dy.arg(Bf16), dgate.arg(Bf16), dup.arg(Bf16)];
    check_aligned(OP, &args);
    let len = check_len(OP, gate);
    let kernel = match activation {
        Activation::Silu => "swiglu_backward",
        Activation::GeluTanh => "geglu_backward",
        Activation::Sigmoid => "sigmoid_backward",
        Activation::ClampedSilu { .. } => panic!("{OP}: there is no kernel for {activation:?}"),
    };
    gpu().launch(kernel, grid_of_eights(len), THREADS, 0, &[&args[..], &[len.into()]].concat());
}

fn check_len(op: &str, gate: View) -> usize {
    let len = gate.len();
    assert!(len.is_multiple_of(8), "{op}: the length must be a multiple of 8 (got {len})");
    len
}
