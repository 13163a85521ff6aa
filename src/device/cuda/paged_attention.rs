//! Attention of new rows over the cache.

use super::attention::cap;
use super::gpu::{Arg, gpu};
use super::key_segments;
use super::kv_cache::{KvPages, SPLIT_BLOCKS, SequenceTable, Tiles, kernels, prefill_rows};
use super::memory::{View, ViewMut};
use super::shape::dim;
use crate::dtype::DType;
use crate::sys::lock::lock;
use std::f32::consts::LOG2_E;

const THREADS: usize = 128;
/// Maxima or decays, sums and probabilities of a block of keys: `Exchange` and `Handed` of the kernels.
const EXCHANGE_BYTES: usize = 64 + 256 + 2048;

/// o (t, h*e) = attention of new rows q (t, h*e) over the cache, which already holds the new rows' keys and values.
pub fn forward(q: View, cache: &KvPages, table: &SequenceTable, mut o: ViewMut) {
    const OP: &str = "paged_attention";
    let shape = &table.shape;
    let (kernels, g, e) = (kernels(shape), shape.kv_heads, shape.head_dim);
    assert!(cache.kv == shape.kv, "{OP}: the cache is in another dtype");
    let window = shape.window.map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX));
    let mut args = |tiles: &Tiles| {
        [
            q.arg(DType::Bf16),
            cache.keys.arg(),
            cache.values.arg(),
            o.arg(DType::Bf16),
            table.sequences.arg(),
            table.blocks.arg(),
            tiles.memory.arg(),
            dim(OP, g),
            dim(OP, shape.heads / g),
            Arg::I32(window),
            Arg::F32(shape.scale * LOG2_E),
            cap(shape),
        ]
    };
    // Bytes of rows of a tile, which are padded by 16 bytes.
    let bytes = |rows: usize, columns: usize| rows * (columns + 8) * DType::Bf16.bytes();
    let grid = |tiles: &Tiles| [tiles.count, g, 1];
    let shared = bytes(2 * kernels.keys + prefill_rows(shape), e);
    let mut before = key_segments::between(&table.runs, table.rows * shape.heads, e);
    for run in &table.runs {
        let all = [&args(&table.prefill)[..], &run.args(before.as_mut())].concat();
        gpu().launch(kernels.prefill, [run.tiles, g, 1], THREADS, shared, &all);
    }
    let Some(split) = &table.split else {
        let shared = bytes(2 * kernels.blocks * kernels.keys, e) + kernels.blocks * EXCHANGE_BYTES;
        return gpu().launch(kernels.decode, grid(&table.decode), THREADS, shared, &args(&table.decode));
    };
    let mut between = lock(&split.between);
    let [scores, max, parts] = &mut *between;
    let (of_tiles, rows, runs) = (args(&table.decode), dim(OP, split.rows), dim(OP, split.runs));
    let parts = parts.arg_mut();
    let mut all: Vec<Arg> = of_tiles.to_vec();
    all.extend([scores.arg_mut(), max.arg_mut(), parts, rows, split.stride.into(), runs]);
    let (tiles, stage) = (table.decode.count, kernels.keys * SPLIT_BLOCKS);
    gpu().launch(kernels.scores, [split.stages, g, tiles], THREADS, bytes(stage, e), &all);
    let shared = bytes(3 * stage, kernels.columns) + 2 * SPLIT_BLOCKS * EXCHANGE_BYTES;
    gpu().launch(kernels.values, [e / kernels.columns, g, tiles * split.runs], 2 * THREADS, shared, &all);
    if split.runs > 1 {
        let all = [&of_tiles[..], &[parts, rows, runs, dim(OP, e)]].concat();
        gpu().launch("paged_join", [tiles, g, (split.rows * e).div_ceil(4 * THREADS)], THREADS, 0, &all);
    }
}
