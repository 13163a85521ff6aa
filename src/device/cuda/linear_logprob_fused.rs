//! Statistics of logits = h W^T that are never stored (scoring): bitwise those of `linear_logprob::stats` over the
//! logits of the exact GEMM.

use super::gpu::{Arg, gpu};
use super::linear_logprob::{SPAN, STATS_BYTES};
use super::memory::{Memory, View};
use super::shape::dim;
use crate::dtype::DType;

/// Rows of a tile, and tiles of rows that run over the same part of W.
const TILE_ROWS: usize = 128;
const GROUP: usize = 8;
/// Four stages of copies, and the sums of each lane of each row.
const SHARED_BYTES: usize = 4 * (TILE_ROWS + 256) * 32 * 2 + TILE_ROWS * 32 * STATS_BYTES;
const WIDE_SHARED_BYTES: usize = 4 * (TILE_ROWS + 128) * 64 * 2 + TILE_ROWS * 32 * STATS_BYTES;
/// Rows of a block of the second kernel, a warp each.
const FINISH_ROWS: usize = 4;

/// Whether this GPU has enough shared memory for the kernel.
pub fn fits() -> bool {
    gpu().properties().shared_bytes_max >= SHARED_BYTES
}

/// Bytes of scratch for `rows` rows: the sums of their spans, and the targets' logits.
pub fn scratch_bytes(rows: usize, v: usize) -> usize {
    rows * (v.div_ceil(SPAN) * STATS_BYTES + size_of::<f32>())
}

/// The statistics of each row of h W^T * `inverse_temperature` and the logit at its place (`linear_logprob::places`),
/// from h (rows, k) and W (v, k), bf16; k is a multiple of 8.
pub fn stats(
    h: View,
    w: View,
    k: usize,
    inverse_temperature: f32,
    places: &Memory,
    scratch: &mut Memory,
    stats: &mut Memory,
) {
    const OP: &str = "linear_logprob_fused::stats";
    assert!(k > 0 && k.is_multiple_of(8), "{OP}: the row width must be a multiple of 8 (got {k})");
    let (rows, v) = (h.len() / k, w.len() / k);
    let spans = v.div_ceil(SPAN);
    let mut all = scratch.view_mut(DType::F32);
    let sums = all.reborrow().part(0..rows * spans * 4).arg(DType::F32);
    let targets = all.part(rows * spans * 4..rows * (spans * 4 + 1)).arg(DType::F32);
    let args = [
        h.arg(DType::Bf16),
        w.arg(DType::Bf16),
        rows.into(),
        dim(OP, v),
        dim(OP, k),
        Arg::F32(inverse_temperature),
        places.arg(),
        sums,
        targets,
    ];
    let blocks = rows.div_ceil(TILE_ROWS).next_multiple_of(GROUP) * spans;
    let (kernel, shared_bytes) = if gpu().properties().has_wgmma() {
        ("linear_logprob_fused_wide", WIDE_SHARED_BYTES)
    } else {
        ("linear_logprob_fused", SHARED_BYTES)
    };
    gpu().launch(kernel, [blocks, 1, 1], 256, shared_bytes, &args);
    let args = [sums, dim(OP, spans), targets, places.arg(), rows.into(), dim(OP, v), stats.arg_mut()];
    gpu().launch("linear_logprob_finish", [rows.div_ceil(FINISH_ROWS), 1, 1], 32 * FINISH_ROWS, 0, &args);
}
