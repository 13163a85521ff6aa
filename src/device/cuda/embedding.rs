//! y[t] = W[token[t]]

use super::gpu::gpu;
use super::memory::{Memory, View, ViewMut};
use super::scatter_lists::ScatterLists;
use super::shape::{THREADS, check_aligned, check_width, count, grid_of};
use crate::dtype::DType::{Bf16, F32};

/// y (t, d) bf16 for `tokens` (at least t u32) and W (n, d) bf16, the rows of the tokens from `first` on. Other tokens
/// get 0.
pub fn forward(tokens: &Memory, first: usize, w: View, d: usize, mut y: ViewMut) {
    const OP: &str = "embedding::forward";
    check_width(OP, d);
    let [n, t] = [w.len(), y.len()].map(|len| len / d);
    let (w, y) = (w.arg(Bf16), y.arg(Bf16));
    check_aligned(OP, &[w, y]);
    let grid = grid_of(OP, t * (d / 8));
    let [t, eights, first, n] = [t, d / 8, first, n].map(|n| count(OP, n));
    gpu().launch("embedding_forward", grid, THREADS, 0, &[tokens.arg(), w, y, t, eights, first, n]);
}

/// dW[token[t] - first] += dy[t] in f32, rows of one token in ascending t; dW (n, d) f32, dy (t, d) bf16, and `tokens`
/// the lists of the t tokens. Tokens outside first..first + n are skipped.
pub fn backward(tokens: &ScatterLists, first: usize, dy: View, d: usize, mut dw: ViewMut) {
    const OP: &str = "embedding::backward";
    check_width(OP, d);
    let n = dw.len() / d;
    let (dy, dw) = (dy.arg(Bf16), dw.arg(F32));
    check_aligned(OP, &[dy, dw]);
    tokens.launch(OP, "embedding_backward", dy, dw, [first, n, d]);
}
