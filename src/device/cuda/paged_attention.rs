//! Attention of new rows over the cache.

use super::gpu::{Arg, gpu};
use super::kv_cache::{KvPages, SequenceTable, Tiles, prefill_rows};
use super::memory::{Memory, View, ViewMut};
use super::runs::{self, RUN};
use super::shape::dim;
use crate::device::cpu::attention::AttentionShape;
use crate::dtype::DType;
use std::f32::consts::LOG2_E;
use std::sync::{Mutex, PoisonError};

const THREADS: usize = 128;
/// Blocks of keys of a decoding stage, and of one where decoding is split.
const BLOCKS: usize = 2;
const SPLIT_BLOCKS: usize = 4;
/// Maxima or decays, sums and probabilities of a block of keys: `Exchange` and `Handed` of the kernels.
const EXCHANGE_BYTES: usize = 64 + 256 + 2048;

/// The kernels of a head dim.
struct Kernels {
    decode: &'static str,
    prefill: &'static str,
    scores: &'static str,
    values: &'static str,
    /// Keys of a block of the softmax.
    keys: usize,
    /// Columns of the result that a block of threads computes, where decoding is split.
    columns: usize,
}

macro_rules! kernels {
    ($head_dim:expr, $($dim:literal: $keys:literal, $columns:literal;)*) => {
        match $head_dim {
            $($dim => Kernels {
                decode: concat!("paged_decode_", $dim),
                prefill: concat!("paged_prefill_", $dim),
                scores: concat!("paged_scores_", $dim),
                values: concat!("paged_values_", $dim),
                keys: $keys,
                columns: $columns,
            },)*
            other => panic!("paged_attention: heads of {other} values, needs 32, 64, 80, 96, 128 or 256"),
        }
    };
}

fn kernels(head_dim: usize) -> Kernels {
    kernels!(head_dim, 32: 64, 32; 64: 64, 32; 80: 64, 16; 96: 64, 32; 128: 64, 32; 256: 32, 32;)
}

/// Scores of decoding tiles, between the kernel that makes them and the one that reads them.
#[derive(Debug)]
pub(super) struct Split {
    /// One launch at a time writes and reads them: scores, maxima, and results of runs.
    between: Mutex<[Memory; 3]>,
    rows: usize,
    /// Keys of a row, whole stages.
    stride: usize,
    stages: usize,
    /// Runs of a tile, at most.
    runs: usize,
}

impl Split {
    /// For tiles of up to `rows` rows, and up to `longest` keys.
    pub fn new(tiles: usize, rows: usize, longest: usize, shape: &AttentionShape) -> Self {
        let stage = kernels(shape.head_dim).keys * SPLIT_BLOCKS;
        // Keys before the window are left out, up to the start of a stage; the rows of a tile are up to 16 tokens.
        let seen = shape.window.map_or(longest, |window| longest.min(window.saturating_add(2 * stage)));
        let runs = longest.div_ceil(RUN).min(seen.div_ceil(RUN) + 1);
        let stages = seen.div_ceil(stage);
        let stride = stages * stage;
        let maxima = stride / (stage / SPLIT_BLOCKS) * 16;
        let tiles = tiles * shape.kv_heads;
        let floats = |each: usize| Memory::scratch(tiles * each * size_of::<f32>());
        let parts = if runs > 1 { runs::bytes(tiles * runs * rows, shape.head_dim) } else { 0 };
        let between = Mutex::new([floats(rows * stride), floats(maxima), Memory::scratch(parts)]);
        Self { between, rows, stride, stages, runs }
    }
}

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
            window.into(),
            (shape.scale * LOG2_E).into(),
        ]
    };
    // Bytes of rows of a tile, which stand 16 bytes further apart than they are long.
    let bytes = |rows: usize, columns: usize| rows * (columns + 8) * DType::Bf16.bytes();
    let grid = |tiles: &Tiles| [tiles.count, g, 1];
    let shared = bytes(2 * kernels.keys + prefill_rows(shape), e);
    let mut before = runs::between(&table.runs, table.rows * shape.heads, e);
    for run in &table.runs {
        let all = [&args(&table.prefill)[..], &run.args(before.as_mut())].concat();
        gpu().launch(kernels.prefill, [run.tiles, g, 1], THREADS, shared, &all);
    }
    let Some(split) = &table.split else {
        let shared = bytes(2 * BLOCKS * kernels.keys, e) + BLOCKS * EXCHANGE_BYTES;
        return gpu().launch(kernels.decode, grid(&table.decode), THREADS, shared, &args(&table.decode));
    };
    let mut between = split.between.lock().unwrap_or_else(PoisonError::into_inner);
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
