//! The kernels of paged attention by head dim, and the memory between the two of a split decoding.

use super::key_segments::{self, RUN};
use super::memory::Memory;
use super::shape::kernel_of;
use crate::device::cpu::attention::AttentionShape;
use std::sync::Mutex;

/// Blocks of keys of a stage where decoding is split.
pub(super) const SPLIT_BLOCKS: usize = 4;

/// The kernels of a head dim.
pub(super) struct Kernels {
    pub decode: &'static str,
    pub prefill: &'static str,
    pub scores: &'static str,
    pub values: &'static str,
    /// Keys of a block of the softmax.
    pub keys: usize,
    /// Columns of the result that a block of threads computes, where decoding is split.
    pub columns: usize,
}

pub(super) fn kernels(head_dim: usize) -> Kernels {
    Kernels {
        decode: kernel_of!("paged_decode_", head_dim),
        prefill: kernel_of!("paged_prefill_", head_dim),
        scores: kernel_of!("paged_scores_", head_dim),
        values: kernel_of!("paged_values_", head_dim),
        keys: if head_dim <= 128 { 64 } else { 32 },
        columns: if head_dim == 80 { 16 } else { 32 },
    }
}

/// Scores of decoding tiles, between the kernel that makes them and the one that reads them.
#[derive(Debug)]
pub(super) struct Split {
    /// One launch at a time writes and reads them: scores, maxima, and results of runs.
    pub between: Mutex<[Memory; 3]>,
    pub rows: usize,
    /// Keys of a row, whole stages.
    pub stride: usize,
    pub stages: usize,
    /// Runs of a tile, at most.
    pub runs: usize,
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
        let parts = if runs > 1 { key_segments::bytes(tiles * runs * rows, shape.head_dim) } else { 0 };
        let between = Mutex::new([floats(rows * stride), floats(maxima), Memory::scratch(parts)]);
        Self { between, rows, stride, stages, runs }
    }
}
