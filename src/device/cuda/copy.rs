//! Copies, casts and sums of flat runs, columns and rows.

use super::gpu::{Arg, gpu};
use super::memory::{Memory, View, ViewMut};
use super::scatter_lists::ScatterLists;
use super::shape::{THREADS, check_aligned, check_width, count, grid_of, grid_of_eights, is_aligned};
use crate::dtype::DType::{self, Bf16, F32};

/// y = y + x in f32; any length and alignment.
pub fn add(x: View, mut y: ViewMut) {
    assert!(x.len() == y.len(), "copy::add: {} values cannot be added to {}", x.len(), y.len());
    gpu().launch("add_f32", grid_of_eights(x.len()), THREADS, 0, &[x.arg(F32), y.arg(F32), x.len().into()]);
}

/// x = s x for bf16 values, rounded once; any length and alignment.
pub fn scale(s: f32, mut x: ViewMut) {
    gpu().launch("scale_bf16", grid_of_eights(x.len()), THREADS, 0, &[Arg::F32(s), x.arg(Bf16), x.len().into()]);
}

/// y = y + s x for bf16 values, rounded once; any length and alignment.
pub fn add_scaled(s: f32, x: View, mut y: ViewMut) {
    assert!(x.len() == y.len(), "copy::add_scaled: {} values cannot be added to {}", x.len(), y.len());
    let args = [Arg::F32(s), x.arg(Bf16), y.arg(Bf16), x.len().into()];
    gpu().launch("add_scaled_bf16", grid_of_eights(x.len()), THREADS, 0, &args);
}

/// to = from, rounded where it is bf16; dtypes may be the same. Any length and alignment.
pub fn cast(from: View, mut to: ViewMut) {
    let len = from.len();
    assert!(to.len() == len, "copy::cast: {len} values cannot be cast into {}", to.len());
    // The values past the last eight go one by one.
    let whole = len / 8 * 8;
    columns(from.part(0..whole), whole, to.reborrow().part(0..whole), whole, 1, whole);
    columns(from.part(whole..len), len - whole, to.part(whole..len), len - whole, 1, len - whole);
}

/// to[r][c] = from[r][c] for `rows` rows of `width` columns, whose rows are a stride apart: a run of columns of a wider
/// tensor, whose view begins at its first value. Dtypes may differ. Copies sixteen bytes at a time if width, strides
/// and beginnings are multiples of 8 values.
pub fn columns(from: View, from_stride: usize, mut to: ViewMut, to_stride: usize, rows: usize, width: usize) {
    const OP: &str = "copy::columns";
    if rows == 0 || width == 0 {
        return;
    }
    for (name, len, stride) in [("from", from.len(), from_stride), ("to", to.len(), to_stride)] {
        let fits = stride >= width && (rows - 1) * stride + width <= len;
        assert!(fits, "{OP}: {rows} rows of {width} with stride {stride} exceed the {len} values of {name}");
    }
    let kernel = match (from.dtype(), to.dtype()) {
        (Bf16, Bf16) => "columns_bf16",
        (F32, F32) => "columns_f32",
        (F32, Bf16) => "columns_to_bf16",
        (Bf16, F32) => "columns_to_f32",
    };
    let (of, into): (DType, DType) = (from.dtype(), to.dtype());
    let (from, to) = (from.arg(of), to.arg(into));
    let strided = rows == 1 || (from_stride.is_multiple_of(8) && to_stride.is_multiple_of(8));
    let each = if width.is_multiple_of(8) && strided && is_aligned(from) && is_aligned(to) { 8 } else { 1 };
    let threads = rows * (width / each);
    let across = if rows == 1 {
        count(OP, 1)
    } else {
        let _ = count(OP, threads);
        count(OP, width / each)
    };
    let (strides, width) = ([from_stride, to_stride].map(Arg::from), Arg::from(width));
    let args = [from, strides[0], to, strides[1], count(OP, rows), width, count(OP, each), across];
    gpu().launch(kernel, [threads.div_ceil(THREADS), 1, 1], THREADS, 0, &args);
}

/// y[i] = x[rows[i]], rows of `width` bf16 values; `rows` holds at least as many u32 as y has rows, all below those of
/// x.
pub fn gather(x: View, width: usize, rows: &Memory, mut y: ViewMut) {
    const OP: &str = "copy::gather";
    check_width(OP, width);
    let n = y.len() / width;
    let (x, y) = (x.arg(Bf16), y.arg(Bf16));
    check_aligned(OP, &[x, y]);
    let args = [x, rows.arg(), y, count(OP, n), count(OP, width / 8)];
    gpu().launch("gather_rows", grid_of(OP, n * (width / 8)), THREADS, 0, &args);
}

/// The transpose of `gather`: x[rows[i]] += y[i], for `rows` as lists. The values for one row are summed in f32 in
/// ascending i and rounded once. All rows are below those of x.
pub fn scatter(y: View, width: usize, rows: &ScatterLists, mut x: ViewMut) {
    const OP: &str = "copy::scatter";
    check_width(OP, width);
    let n = x.len() / width;
    let (y, x) = (y.arg(Bf16), x.arg(Bf16));
    check_aligned(OP, &[y, x]);
    rows.launch(OP, "scatter_rows", y, x, [0, n, width]);
}
