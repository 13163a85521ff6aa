//! y = x * rstd * (w + offset) over groups of w.len() values; a row may hold several (qk-norm: one per head).

use super::column_sums;
use super::gpu::{Arg, gpu};
use super::memory::{Memory, View, ViewMut};
use super::shape::{THREADS, block, check_aligned, check_width, count, dim};
use crate::dtype::DType::{Bf16, F32};

/// Widths up to which a group's lanes are in one warp.
const NARROW_MAX: usize = 256;
/// Widths that a block holds in registers.
pub const WIDTH_MAX: usize = 16 << 10;
/// The minimum number of groups that a block sums dw over. Fewer groups would write more sums than they read values.
const EACH_MIN: usize = 8;

/// y = x * rstd * (w + offset); x, y (groups, w.len()) and w bf16, rstd (groups) f32. A group's result depends on that group
/// alone.
pub fn forward(x: View, w: View, [offset, eps]: [f32; 2], mut y: ViewMut, mut rstd: ViewMut) {
    const OP: &str = "rmsnorm::forward";
    let (n, groups) = (width(OP, w), rstd.len());
    let (y, rstd) = (y.arg(Bf16), rstd.arg(F32));
    let (x, w) = (x.arg(Bf16), w.arg(Bf16));
    check_aligned(OP, &[x, w, y]);
    let (offset, eps, width, over) = (Arg::F32(offset), Arg::F32(eps), dim(OP, n), reciprocal(n));
    if n <= NARROW_MAX {
        let shift = shift(n);
        let args = [x, w, offset, eps, y, rstd, width, over, Arg::U32(shift), count(OP, groups)];
        return gpu().launch("rmsnorm_forward_narrow", [groups.div_ceil(THREADS >> shift), 1, 1], THREADS, 0, &args);
    }
    // Up to two times eight values per thread. If eight are enough, the block is wide enough to hide its latency.
    let threads = if n <= 2048 { n / 8 } else { (n / 8).div_ceil(2) };
    let args = [x, w, offset, eps, y, rstd, width, over];
    gpu().launch("rmsnorm_forward", [groups, 1, 1], block(threads, 1024), 0, &args);
}

/// With v = w + offset: dx += rstd (v dy - x rstd^2 mean(v dy x)), rounded once; dw (f32) += the sum over groups of dy x rstd, in an order
/// that depends on their number alone.
pub fn backward(x: View, (w, offset): (View, f32), rstd: View, dy: View, mut dx: ViewMut, dw: ViewMut) {
    const OP: &str = "rmsnorm::backward";
    let (n, groups) = (width(OP, w), rstd.len());
    let Share { kernel, threads, each } = share(n, groups);
    let blocks = groups.div_ceil(each);
    let mut sums = Memory::scratch(4 * blocks * n);
    let [x, w, dy, dx] = [x.arg(Bf16), w.arg(Bf16), dy.arg(Bf16), dx.arg(Bf16)];
    check_aligned(OP, &[x, w, dy, dx]);
    let (rstd, to, width, over) = (rstd.arg(F32), sums.arg_mut(), dim(OP, n), reciprocal(n));
    let offset = Arg::F32(offset);
    let (groups, each) = (count(OP, groups), count(OP, each));
    let launch = |args: &[Arg]| gpu().launch(kernel, [blocks, 1, 1], threads, 0, args);
    if n <= NARROW_MAX {
        launch(&[x, w, offset, rstd, dy, dx, to, width, over, Arg::U32(shift(n)), groups, each]);
    } else {
        launch(&[x, w, offset, rstd, dy, dx, to, width, over, groups, each]);
    }
    column_sums::add(OP, &sums, blocks, dw);
}

/// 2^shift lanes share a group of n values.
fn shift(n: usize) -> u32 {
    (n / 8).next_power_of_two().trailing_zeros()
}

fn reciprocal(n: usize) -> Arg {
    Arg::F32(1.0 / n as f32)
}

/// The division of the backward: blocks of `threads` threads, with `each` groups per block.
struct Share {
    kernel: &'static str,
    threads: usize,
    each: usize,
}

/// The division with enough blocks to fill a GPU. More blocks cost time, because each writes a sum of n values.
fn share(n: usize, groups: usize) -> Share {
    let each = |blocks_max: usize| groups.div_ceil(blocks_max).max(EACH_MIN);
    let eights = n / 8;
    if n <= NARROW_MAX {
        let together = THREADS >> shift(n);
        let each = groups.div_ceil(864).max(4 * together).next_multiple_of(together);
        return Share { kernel: "rmsnorm_backward_narrow", threads: THREADS, each };
    }
    let (kernel, threads) = match n {
        ..=2048 => ("rmsnorm_backward_2", block(eights, 512)),
        2049..=8192 => ("rmsnorm_backward_2", block(eights.div_ceil(2), 512)),
        _ => ("rmsnorm_backward_4", block(eights.div_ceil(4), 512)),
    };
    Share { kernel, threads, each: each((320 * THREADS / threads).clamp(320, 1280)) }
}

/// Values of a group.
fn width(op: &str, w: View) -> usize {
    let n = w.len();
    check_width(op, n);
    assert!(n <= WIDTH_MAX, "{op}: a group may have at most {WIDTH_MAX} values (got {n})");
    n
}
