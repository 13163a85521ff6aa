//! Attention of new rows over the cache.

use super::gpu::{Arg, gpu};
use super::key_segments;
use super::kv_cache::{KvPages, SPLIT_BLOCKS, SequenceTable, Tiles, kernels, prefill_rows};
use super::memory::{View, ViewMut};
use super::shape::dim;
use crate::device::cpu::attention::AttentionShape;
use crate::dtype::DType;
use crate::sys::lock::lock;
use std::f32::consts::LOG2_E;

const THREADS: usize = 128;
/// Maxima or decays, sums and probabilities of a block of keys: `Exchange` and `Handed` of the kernels.
const EXCHANGE_BYTES: usize = 64 + 256 + 2048;

/// o (t, h*e) = attention of new rows q (t, h*e) over the cache, which already holds the new rows' keys and values.
///
/// # Panics
/// If the shapes do not fit together, or a page is not there.
pub fn forward(q: View, cache: &KvPages, table: &SequenceTable, shape: &AttentionShape, mut o: ViewMut) {
    const OP: &str = "paged_attention";
    cache.check(table, shape);
    assert!(*shape == table.shape, "paged_attention: {shape:?}, the table is for {:?}", table.shape);
    assert!(shape.window != Some(0), "paged_attention: a window of 0 keys sees nothing");
    let (kernels, g, e) = (kernels(shape.head_dim), shape.kv_heads, shape.head_dim);
    let width = shape.heads * e;
    for (name, len) in [("q", q.len()), ("o", o.len())] {
        assert!(len == table.rows * width, "paged_attention: {len} values of {name}, needs {} x {width}", table.rows);
    }
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
        ]
    };
    // Bytes of rows of a tile, which stand 16 bytes further apart than they are long.
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
