//! The units of attention: rows of a sequence with a run of its keys, cut into tiles of rows and blocks of keys.

use super::vector::BLOCK;
use crate::dtype::KvDtype;
use std::ops::Range;

/// Tokens of one KV page, and keys of one block of the softmax.
pub const PAGE: usize = BLOCK;

/// Heads, window and scale of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The number of keys that a query sees at most, itself included. `None`: all earlier keys.
    pub window: Option<usize>,
    /// Usually 1 / sqrt(head_dim).
    pub scale: f32,
    /// Scaled scores s become c tanh(s / c), with this c (arXiv:2408.00118, section 2).
    pub softcap: Option<f32>,
    /// Whether values are the same vectors as keys, and a cache has them once. No GPU kernel supports it.
    pub values_are_keys: bool,
    /// The dtype to which keys and values are rounded, in a cache and in training.
    pub kv: KvDtype,
}

impl AttentionShape {
    /// The values of a token in a cache.
    pub fn cached_values(&self) -> usize {
        self.kv_heads * self.head_dim * if self.values_are_keys { 1 } else { 2 }
    }

    /// The bytes of a token in a cache for weights of `bytes` each.
    pub fn cached_bytes(&self, bytes: usize) -> usize {
        let values = self.cached_values();
        match self.kv {
            KvDtype::Model => values * bytes,
            // A power for each vector.
            KvDtype::Fp8 => values + values / self.head_dim,
        }
    }

    /// The keys that the query at `position` of its sequence sees.
    pub fn visible(&self, position: usize) -> Range<usize> {
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        first..position + 1
    }

    /// Query heads of a key head.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// One sequence of a paged batch: `tokens` new rows after `past` cached ones; `blocks[i]` is the page of tokens
/// i*PAGE .. (i+1)*PAGE, and covers past + tokens. Pages before the window may be any of the cache, because no result
/// depends on them.
#[derive(Clone, Debug)]
pub struct PagedSequence<'a> {
    pub past: usize,
    pub tokens: usize,
    pub blocks: &'a [u32],
}

/// Rows of a tile.
pub(super) const TILE: usize = 32;

/// Rows of q and a run of keys of the same sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first row of q.
    pub row: usize,
    pub tokens: usize,
    /// Position of the first row, counted from the first key.
    pub past: usize,
    /// The first row of k and v; 0 if keys are paged.
    pub key_row: usize,
    pub keys: usize,
}

impl Span {
    /// The spans of whole sequences, one after the other: `cu_seqlens` = [0, end of sequence 0, ...].
    pub fn whole(cu_seqlens: &[usize]) -> Vec<Self> {
        let of = |ends: &[usize]| {
            let (row, tokens) = (ends[0], ends[1] - ends[0]);
            Self { row, tokens, past: 0, key_row: row, keys: tokens }
        };
        cu_seqlens.windows(2).map(of).filter(|span| span.tokens > 0).collect()
    }

    /// One past the last key that the query at `position` may see.
    #[inline(always)]
    pub(super) fn end(&self, position: usize) -> usize {
        self.keys.min(position + 1)
    }

    /// The row of q and o, in units of head dims, of row `r` under a key head.
    #[inline(always)]
    pub(super) fn at(&self, shape: &AttentionShape, kv_head: usize, r: usize) -> usize {
        let group = shape.group();
        (self.row + r / group) * shape.heads + kv_head * group + r % group
    }

    /// The lanes of key block `block` that the query at `position` sees.
    #[inline(always)]
    pub(super) fn visible_bits(&self, shape: &AttentionShape, position: usize, block: usize) -> u32 {
        let visible = shape.visible(position).start..self.end(position);
        let (start, end) = (block * PAGE, (block + 1) * PAGE);
        if visible.end <= start || visible.start >= end {
            return 0;
        }
        let below = visible.start.saturating_sub(start);
        let above = end.saturating_sub(visible.end);
        (u32::MAX << below) & (u32::MAX >> above)
    }
}

/// Up to `TILE` rows of a sequence under one key head: row r is head r % group of token r / group.
#[derive(Clone, Debug)]
pub(super) struct Tile {
    pub sequence: usize,
    pub kv_head: usize,
    pub rows: Range<usize>,
}

impl Tile {
    /// Positions of the first and of the last row.
    pub fn positions(&self, sequence: &Span, group: usize) -> (usize, usize) {
        (sequence.past + self.rows.start / group, sequence.past + (self.rows.end - 1) / group)
    }

    /// The key blocks that any row sees.
    pub fn blocks(&self, sequence: &Span, shape: &AttentionShape) -> Range<usize> {
        let (first, last) = self.positions(sequence, shape.group());
        shape.visible(first).start / PAGE..sequence.end(last).div_ceil(PAGE)
    }
}
