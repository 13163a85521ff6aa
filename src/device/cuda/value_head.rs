//! values[t] = sum_d h[t][d] w[d]

use super::column_sums;
use super::gpu::gpu;
use super::memory::{Memory, View, ViewMut};
use super::shape::{THREADS, block, check_aligned, check_width, count};
use crate::dtype::DType::{Bf16, F32};

/// Rows of a block in the forward, one per warp.
const ROWS: usize = THREADS / 32;
/// The maximum blocks that write a sum of dw each, and the minimum rows that they sum over.
const BLOCKS_MAX: usize = 320;
const EACH_MIN: usize = 16;

/// values (t) f32 of h (t, d) and w (d) bf16. The order of summation in a row does not depend on the number of rows.
pub fn forward(h: View, w: View, mut values: ViewMut) {
    const OP: &str = "value_head::forward";
    let (t, d) = (values.len(), w.len());
    check_width(OP, d);
    let (h, w) = (h.arg(Bf16), w.arg(Bf16));
    check_aligned(OP, &[h, w]);
    let args = [h, w, values.arg(F32), count(OP, t), count(OP, d)];
    gpu().launch("value_head_forward", [t.div_ceil(ROWS), 1, 1], THREADS, 0, &args);
}

/// dh[t][d] = dvalues[t] w[d] (overwritten, bf16), dw[d] (f32) += sum_t dvalues[t] h[t][d], in an order that depends on
/// the number of rows alone.
pub fn backward(h: View, w: View, dvalues: View, mut dh: ViewMut, dw: ViewMut) {
    const OP: &str = "value_head::backward";
    let (t, d) = (dvalues.len(), w.len());
    check_width(OP, d);
    let each = t.div_ceil(BLOCKS_MAX).max(EACH_MIN);
    let blocks = t.div_ceil(each);
    let mut sums = Memory::scratch(4 * blocks * d);
    let (h, w, dh) = (h.arg(Bf16), w.arg(Bf16), dh.arg(Bf16));
    check_aligned(OP, &[h, w, dh]);
    let dims = [t, d, each].map(|n| count(OP, n));
    let args = [&[h, w, dvalues.arg(F32), dh, sums.arg_mut()][..], &dims].concat();
    let threads = block(d / 8, THREADS);
    gpu().launch("value_head_backward", [blocks, (d / 8).div_ceil(threads), 1], threads, 0, &args);
    column_sums::add(OP, &sums, blocks, dw);
}
