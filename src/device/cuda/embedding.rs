//! y[t] = W[token[t]]

use super::gpu::gpu;
use super::memory::{Memory, View, ViewMut};
use super::scatter_lists::ScatterLists;
use super::shape::{THREADS, check, check_aligned, check_width, count, grid_of};
use crate::dtype::DType::{Bf16, F32};

/// y (t, d) bf16 for `tokens` (at least t u32) and W (n, d) bf16, the rows of the tokens from `first` on: 0 for others.
///
/// # Panics
/// If the shapes do not fit.
pub fn forward(tokens: &Memory, first: usize, w: View, d: usize, mut y: ViewMut) {
    const OP: &str = "embedding::forward";
    let n = rows(OP, w.len(), d);
    let t = rows(OP, y.len(), d);
    assert!(tokens.bytes() >= 4 * t, "{OP}: {} bytes of tokens for {t} rows", tokens.bytes());
    let (w, y) = (w.arg(Bf16), y.arg(Bf16));
    check_aligned(OP, &[w, y]);
    let grid = grid_of(OP, t * (d / 8));
    let [t, eights, first, n] = [t, d / 8, first, n].map(|n| count(OP, n));
    gpu().launch("embedding_forward", grid, THREADS, 0, &[tokens.arg(), w, y, t, eights, first, n]);
}

/// dW[token[t] - first] += dy[t] in f32, rows of one token in ascending t; dW (n, d) f32, dy (t, d) bf16, and `tokens` the
/// lists of the t tokens. Tokens outside first..first + n are left.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward(tokens: &ScatterLists, first: usize, dy: View, d: usize, mut dw: ViewMut) {
    const OP: &str = "embedding::backward";
    let n = rows(OP, dw.len(), d);
    check(OP, "dy", dy.len(), tokens.len, d);
    let (dy, dw) = (dy.arg(Bf16), dw.arg(F32));
    check_aligned(OP, &[dy, dw]);
    tokens.launch(OP, "embedding_backward", dy, dw, [first, n, d]);
}

fn rows(op: &str, len: usize, d: usize) -> usize {
    check_width(op, d);
    assert!(len.is_multiple_of(d), "{op}: {len} values are no whole rows of {d}");
    len / d
}
