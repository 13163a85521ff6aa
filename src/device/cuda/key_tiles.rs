//! The tiles of keys that blocks of the attention backward work on.

use super::memory::Memory;
use super::shape::to_i32;
use crate::device::cpu::attention::{AttentionShape, Span};

/// The operation that error messages about table entries name.
pub(super) const TABLE: &str = "attention";
/// Rows of a step, which share a counter for each head.
pub(super) const ROWS: usize = 64;
/// Rows that are stored together in the partial sums of dq.
pub(super) const EIGHT: usize = 8;

/// The keys of a table's spans, cut into tiles; and counters, one for all blocks and one for each `ROWS` of rows and
/// head. Each backward leaves the counters as it found them: 0.
#[derive(Debug)]
pub struct KeyTiles {
    pub tiles: Memory,
    pub counters: Memory,
    pub count: usize,
    /// Rows of the spans that are cut, by eights.
    pub eights: usize,
}

impl KeyTiles {
    pub(super) fn new(spans: &[Span], shape: &AttentionShape) -> Self {
        let step = keys(shape.head_dim);
        let mut sorted: Vec<&Span> = spans.iter().collect();
        // The heaviest spans are first, so that all multiprocessors end together. Tiles of a span are adjacent, because
        // they share rows in the cache. They ascend, because a tile waits only for earlier ones.
        sorted.sort_by_key(|span| std::cmp::Reverse(span.tokens * span.keys));
        let (mut blocks, mut eights) = (0, 0);
        let mut words = Vec::new();
        for span in sorted {
            for at in (0..span.keys).step_by(step) {
                let past = i32::try_from(span.past as i64 - at as i64).expect("positions are counted in 32 bits");
                let [row, tokens, key_row] = [span.row, span.tokens, span.key_row + at].map(|n| to_i32(TABLE, n));
                words.extend([row, tokens, past, key_row]);
                words.extend([span.keys - at, at, blocks, eights].map(|n| to_i32(TABLE, n)));
            }
            // A single tile waits for no other tile, and has the whole sum.
            if span.keys > step {
                blocks += span.tokens.div_ceil(ROWS);
                eights += span.tokens.div_ceil(EIGHT);
            }
        }
        let count = words.len() / 8;
        let counters = Memory::zeros((1 + blocks * shape.heads) * 4);
        Self { tiles: Memory::from_values(&words), counters, count, eights }
    }
}

/// Keys of a tile.
pub(super) fn keys(head_dim: usize) -> usize {
    if head_dim <= 128 { 128 } else { 64 }
}
