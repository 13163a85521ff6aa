//! The causal convolution of each channel, then silu. Equations as in `device::cpu::conv`.

use super::column_sums;
use super::gpu::{Arg, gpu};
use super::memory::{Memory, View, ViewMut};
use super::shape::{check_aligned, check_width, count, dim};
use super::states::{StatePages, StateTable};
use crate::dtype::DType::Bf16;

/// The most inputs of a convolution.
pub const TAPS_MAX: usize = 4;
/// Tokens of a block of threads, and channels of a warp.
const TOKENS: usize = 32;
const CHANNELS: usize = 256;
/// Blocks of the backward that write a sum of dw each.
const BLOCKS_MAX: usize = 512;

/// The number of taps of w (channels, n).
fn taps(op: &str, channels: usize, w: View) -> usize {
    check_width(op, channels);
    let n = w.len() / channels;
    assert!(
        w.len() == n * channels && (1..=TAPS_MAX).contains(&n),
        "{op}: {} taps do not fit {channels} channels of up to {TAPS_MAX}",
        w.len()
    );
    n
}

fn grid(table: &StateTable, channels: usize) -> [usize; 3] {
    [table.count, table.longest.div_ceil(TOKENS), channels.div_ceil(CHANNELS)]
}

/// y (t, channels) of x (t, channels) and w (channels, n) bf16. The last n - 1 inputs of a sequence are kept in its page.
pub fn forward(x: View, w: View, channels: usize, table: &StateTable, pages: Option<StatePages>, mut y: ViewMut) {
    const OP: &str = "conv::forward";
    let (n, keeps) = (taps(OP, channels, w), pages.is_some());
    let (x, w, y) = (x.arg(Bf16), w.arg(Bf16), y.arg(Bf16));
    check_aligned(OP, &[x, y]);
    let tables = [&[table.sequences.arg(), table.slots()][..], &StatePages::args(pages)].concat();
    let sizes = [dim(OP, channels), dim(OP, n)];
    let args = [&[x, w][..], &tables, &[y], &sizes].concat();
    gpu().launch("conv_forward", grid(table, channels), CHANNELS, 0, &args);
    if keeps && n > 1 {
        let args = [&[x][..], &tables, &sizes].concat();
        gpu().launch("conv_keep", [table.count, channels.div_ceil(8 * 128), 1], 128, 0, &args);
    }
}

/// dx from dy, which is overwritten, for whole sequences; dw (channels, n) f32 += its gradient, in an order that depends on
/// the number of rows alone.
pub fn backward(x: View, w: View, channels: usize, table: &StateTable, mut dy: ViewMut, mut dx: ViewMut, dw: ViewMut) {
    const OP: &str = "conv::backward";
    let n = taps(OP, channels, w);
    let each = table.rows.div_ceil(BLOCKS_MAX).max(TOKENS);
    let blocks = table.rows.div_ceil(each);
    let mut parts = Memory::scratch(blocks * channels * n * size_of::<f32>());
    let (x, w, dy, dx) = (x.arg(Bf16), w.arg(Bf16), dy.arg(Bf16), dx.arg(Bf16));
    check_aligned(OP, &[x, dy, dx]);
    let sizes = [dim(OP, channels), dim(OP, n)];
    let args = [&[x, w, table.sequences.arg(), dy][..], &sizes].concat();
    gpu().launch("conv_slope", grid(table, channels), CHANNELS, 0, &args);
    let rows: [Arg; 2] = [count(OP, table.rows), count(OP, each)];
    let args = [&[x, w, table.bounds().arg(), dy, dx, parts.arg_mut()][..], &rows, &sizes].concat();
    gpu().launch("conv_backward", [blocks, channels.div_ceil(CHANNELS), 1], 32, 0, &args);
    column_sums::add(OP, &parts, blocks, dw);
}
