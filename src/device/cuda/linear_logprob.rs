//! Selective log-softmax over logits: statistics of rows, values that are read from them, and the gradient.
//!
//! Logits are (rows, v), f32 or bf16. Statistics stay on the GPU: `rows` times (max, sum_exp, dot, the target's logit),
//! f32. `combine` merges the statistics of a vocabulary's parts. Cross-entropy is a logprob whose gradient is -weight.

use super::gpu::{Arg, gpu};
use super::matmul::Matrix;
use super::memory::{Memory, View, ViewMut};
use super::shape::{check_aligned, dim, to_i32};
use crate::dtype::DType;

/// Columns of a row per warp.
pub(super) const SPAN: usize = 2048;
/// Bytes of a span's sums in shared memory, and of a row's statistics.
pub(super) const STATS_BYTES: usize = 16;
/// Columns per block of the gradient.
pub(super) const GRADIENT_COLUMNS: usize = 8192;
/// Rows per block, if each thread has one row.
const ROWS: usize = 128;
/// The largest vocabulary: wider rows need more shared memory than a block has.
pub const VOCABULARY_MAX: usize = 1 << 20;

pub(super) fn check(op: &str, logits: Matrix) {
    let v = logits.width;
    assert!((1..=VOCABULARY_MAX).contains(&v), "{op}: columns must be 1 to {VOCABULARY_MAX} (got {v})");
}

/// The kernel for logits of this dtype, and their argument.
fn kernel(logits: Matrix, f32: &'static str, bf16: &'static str) -> (&'static str, Arg) {
    let dtype = logits.values.dtype();
    (if dtype == DType::F32 { f32 } else { bf16 }, logits.values.arg(dtype))
}

/// The positions of targets among v columns, for kernels: -1 if another part of the vocabulary has it.
pub fn places(places: &[usize], v: usize) -> Memory {
    let places: Vec<i32> =
        places.iter().map(|&place| if place < v { to_i32("linear_logprob::places", place) } else { -1 }).collect();
    Memory::from_values(&places)
}

/// Memory for the statistics of `rows` rows.
pub fn stats_room(rows: usize) -> Memory {
    Memory::scratch(rows * STATS_BYTES)
}

/// The statistics of each row of z = logits * `inverse_temperature`, and the logit at its target (0 if there is none).
/// A row's bits depend only on the row.
pub fn stats(logits: Matrix, inverse_temperature: f32, places: &Memory, stats: &mut Memory) {
    const OP: &str = "linear_logprob::stats";
    check(OP, logits);
    let (kernel, values) = kernel(logits, "linear_logprob_stats_f32", "linear_logprob_stats_bf16");
    let (v, spans) = (logits.width, logits.width.div_ceil(SPAN));
    let args = [values, logits.stride.into(), dim(OP, v), Arg::F32(inverse_temperature), places.arg(), stats.arg_mut()];
    gpu().launch(kernel, [logits.rows, 1, 1], 32 * spans.min(8), STATS_BYTES * spans, &args);
}

/// The statistics of whole rows from those of `parts` parts of the vocabulary, one after the other, left to right. The
/// bits are those of `RowStats::combined`.
pub fn combine(of_parts: &Memory, parts: usize, rows: usize, stats: &mut Memory) {
    const OP: &str = "linear_logprob::combine";
    let args = [of_parts.arg(), dim(OP, parts), rows.into(), stats.arg_mut()];
    gpu().launch("linear_logprob_combine", [rows.div_ceil(ROWS), 1, 1], ROWS, 0, &args);
}

/// Log-probabilities of the targets, and optionally entropies, of `logprobs.len()` rows. The sampler computes its
/// log-probability by the same device function; a host's logarithm may differ in the last bit.
pub fn read(stats: &Memory, inverse_temperature: f32, mut logprobs: ViewMut, entropy: Option<ViewMut>) {
    let rows = logprobs.len();
    let entropy = entropy.map_or(Arg::Address(0), |mut view| view.arg(DType::F32));
    let args = [stats.arg(), rows.into(), Arg::F32(inverse_temperature), logprobs.arg(DType::F32), entropy];
    gpu().launch("linear_logprob_read", [rows.div_ceil(ROWS), 1, 1], ROWS, 0, &args);
}

/// Writes to `top`, for each row, 1 if no token is likelier than the target, else 0.
pub fn top(stats: &Memory, inverse_temperature: f32, mut top: ViewMut) {
    let rows = top.len();
    let args = [stats.arg(), rows.into(), Arg::F32(inverse_temperature), top.arg(DType::F32)];
    gpu().launch("linear_logprob_top", [rows.div_ceil(ROWS), 1, 1], ROWS, 0, &args);
}

/// dlogits[v] = (dlogprob (1[v = target] - s_v) - dentropy s_v (log s_v + entropy)) * `inverse_temperature`, rounded to
/// bf16, with 0 in columns past v; (rows, dstride) with `dstride` a multiple of 8.
pub fn gradient(
    logits: Matrix,
    inverse_temperature: f32,
    stats: &Memory,
    places: &Memory,
    dlogprobs: View,
    dentropy: View,
    mut dlogits: ViewMut,
    dstride: usize,
) {
    const OP: &str = "linear_logprob::gradient";
    check(OP, logits);
    let (rows, v) = (logits.rows, logits.width);
    let dlogits = dlogits.arg(DType::Bf16);
    check_aligned(OP, &[dlogits]);
    let (kernel, values) = kernel(logits, "linear_logprob_gradient_f32", "linear_logprob_gradient_bf16");
    let args = [
        values,
        logits.stride.into(),
        dim(OP, v),
        Arg::F32(inverse_temperature),
        stats.arg(),
        places.arg(),
        dlogprobs.arg(DType::F32),
        dentropy.arg(DType::F32),
        dlogits,
        dstride.into(),
    ];
    gpu().launch(kernel, [rows, dstride.div_ceil(GRADIENT_COLUMNS), 1], 256, 0, &args);
}
