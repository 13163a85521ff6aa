//! Soft caps of logits: y = c tanh(x / c).

use super::gpu::{Arg, gpu};
use super::memory::{View, ViewMut};
use super::shape::{THREADS, check_aligned, grid_of_eights};
use crate::dtype::DType::{Bf16, F32};

/// x = c tanh(x / c), in place; f32 of any length and alignment.
pub fn forward(cap: f32, mut x: ViewMut) {
    let args = [x.arg(F32), Arg::F32(cap), x.len().into()];
    gpu().launch("softcap_forward", [x.len().div_ceil(4 * THREADS), 1, 1], THREADS, 0, &args);
}

/// dx = dy (1 - (y / c)^2), in place of dy; y f32, dy bf16 of its length, a multiple of 8. Where y is no finite number,
/// dx is 0.
pub fn backward(cap: f32, y: View, mut dy: ViewMut) {
    const OP: &str = "softcap::backward";
    let len = y.len();
    assert!(dy.len() == len && len.is_multiple_of(8), "{OP}: {len} values of y, {} of dy", dy.len());
    let both = [y.arg(F32), dy.arg(Bf16)];
    check_aligned(OP, &both);
    gpu().launch("softcap_backward", grid_of_eights(len), THREADS, 0, &[both[0], both[1], Arg::F32(cap), len.into()]);
}
