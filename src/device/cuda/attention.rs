//! Causal grouped-query attention over packed rows, and over blocks of keys that are passed around a ring.
//!
//! Packed rows have one span per sequence (`SpanTable::packed`). A ring has one table for each pass. Equations as in
//! `ops/attention.rs`; gradients in `attention_backward`.

use super::gpu::{Arg, gpu};
use super::key_segments::{self, Run};
use super::key_tiles::KeyTiles;
pub(super) use super::key_tiles::TABLE;
use super::memory::{Memory, View, ViewMut};
pub use super::shape::HEAD_DIMS;
use super::shape::{dim, kernel_of, to_i32};
use crate::device::cpu::attention::{AttentionShape, Span};
use crate::dtype::DType;
use std::sync::OnceLock;

/// Threads of every block, four warps.
const BLOCK: usize = 128;
/// Limit on the keys of a span, rows and positions, so that sums of them fit in an i32.
const LENGTH_MAX: usize = 1 << 28;
/// The value that means no window.
const NO_WINDOW: usize = 1 << 29;

/// Spans that share no row of q and no key, cut into tiles, on the GPU. Made once, for all layers of a shape.
#[derive(Debug)]
pub struct SpanTable {
    tiles: Memory,
    count: usize,
    /// The launches of forward.
    runs: Vec<Run>,
    /// All keys, visible or not.
    spans: Vec<Span>,
    /// Made when gradients are asked for.
    backward: OnceLock<KeyTiles>,
    pub(super) shape: AttentionShape,
}

/// Rows of q and the keys that they may see: the same as `Tile` in `cuda/attention.cuh`.
#[derive(Clone, Copy, Debug)]
struct Tile {
    row: usize,
    rows: usize,
    /// Position of the first row, counted from the first key: negative if the keys begin after it.
    past: i64,
    key_row: usize,
    keys: usize,
}

impl SpanTable {
    /// # Panics
    /// If no kernel supports the shape, or a span has no rows, no keys, or rows that see none of them.
    pub fn new(spans: &[Span], shape: &AttentionShape) -> Self {
        Self::of_block(spans, shape, 0)
    }

    /// The same for a block of `keys` keys. Keys outside all spans get gradients of 0.
    pub fn of_block(spans: &[Span], shape: &AttentionShape, keys: usize) -> Self {
        let head_dim = shape.head_dim;
        assert!(HEAD_DIMS.contains(&head_dim), "attention: head dim {head_dim} is not one of {HEAD_DIMS:?}");
        for span in spans {
            check_span(span, shape);
        }
        let all = [spans, &unseen(spans, keys)].concat();
        let mut tiles = cut_rows(spans, forward_rows(shape));
        // Heaviest first, so that all multiprocessors end together; equal ones in their old order.
        tiles.sort_by_key(|tile| {
            let (first, end) = seen(tile, shape);
            first as i64 - end as i64
        });
        let runs = key_segments::launches(&tiles.iter().map(|tile| seen(tile, shape)).collect::<Vec<_>>());
        let words: Vec<i32> = tiles.iter().flat_map(Tile::as_words).collect();
        Self {
            tiles: Memory::from_values(&words),
            count: tiles.len(),
            runs,
            backward: OnceLock::new(),
            shape: *shape,
            spans: all,
        }
    }

    /// A table with one span per sequence; `cu_seqlens` = [0, end of sequence 0, ...].
    pub fn packed(cu_seqlens: &[usize], shape: &AttentionShape) -> Self {
        Self::new(&Span::whole(cu_seqlens), shape)
    }

    pub(super) fn key_tiles(&self) -> &KeyTiles {
        self.backward.get_or_init(|| KeyTiles::new(&self.spans, &self.shape))
    }

    /// The window of keys, as an argument of kernels.
    pub(super) fn window(&self) -> Arg {
        dim(TABLE, self.shape.window.map_or(NO_WINDOW, |window| window.min(NO_WINDOW)))
    }
}

impl Tile {
    fn as_words(&self) -> [i32; 5] {
        let past = i32::try_from(self.past).expect("positions are counted in 32 bits");
        let [row, rows, key_row, keys] = [self.row, self.rows, self.key_row, self.keys].map(|n| to_i32(TABLE, n));
        [row, rows, past, key_row, keys]
    }
}

/// The cap of scores before they are scaled, as an argument of kernels; 0 if there is none.
pub(super) fn cap(shape: &AttentionShape) -> Arg {
    Arg::F32(shape.softcap.map_or(0.0, |cap| cap / shape.scale))
}

/// Rows of q that a block of forward works on.
fn forward_rows(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 128 { 128 } else { 64 }
}

/// Keys of a block of the forward.
fn forward_keys(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 128 { 64 } else { 32 }
}

fn cut_rows(spans: &[Span], rows: usize) -> Vec<Tile> {
    let cut = |span: &Span| {
        let Span { row, tokens, past, key_row, keys } = *span;
        (0..tokens).step_by(rows).map(move |at| Tile {
            row: row + at,
            rows: rows.min(tokens - at),
            past: (past + at) as i64,
            key_row,
            keys,
        })
    };
    spans.iter().flat_map(cut).collect()
}

/// The keys of 0..`keys` that are in no span, as spans without rows.
fn unseen(spans: &[Span], keys: usize) -> Vec<Span> {
    let mut seen: Vec<(usize, usize)> = spans.iter().map(|span| (span.key_row, span.key_row + span.keys)).collect();
    seen.sort_unstable();
    seen.push((keys, keys));
    let mut from = 0;
    let mut left = Vec::new();
    for (start, end) in seen {
        if start > from {
            left.push(Span { row: 0, tokens: 0, past: 0, key_row: from, keys: start - from });
        }
        from = from.max(end);
    }
    left
}

/// The first key that a row of the tile sees, and one past the last.
fn seen(tile: &Tile, shape: &AttentionShape) -> (usize, usize) {
    let end = (tile.past + tile.rows as i64).min(tile.keys as i64);
    let first = shape.window.map_or(0, |window| (tile.past + 1 - window as i64).max(0));
    (first as usize, end as usize)
}

fn check_span(span: &Span, shape: &AttentionShape) {
    let small = [span.tokens, span.past, span.keys].iter().all(|&x| x < LENGTH_MAX);
    let last = (span.past + span.tokens).saturating_sub(1);
    let sees = span.tokens > 0 && span.keys > 0 && shape.visible(last).start < span.keys;
    assert!(small && sees, "attention: {span:?} has rows that see no key, or is too long");
}

/// The form of a kernel's result: overwritten, or merged with the previous values.
pub(super) fn form(op: &str, dtype: DType, joined: bool) -> Arg {
    Arg::I32(match (dtype, joined) {
        (DType::Bf16, false) => 0,
        (DType::F32, false) => 1,
        (DType::F32, true) => 2,
        (DType::Bf16, true) => panic!("{op}: results are merged in f32, not in bf16"),
    })
}

/// o = softmax(scale q k^T) v and lse, its natural log-sum-exp, for the rows of the table's spans. Other rows are
/// unchanged. q (t, h*e), k and v (t', g*e) bf16; lse (t, h) f32; o (t, h*e) bf16 or f32. With `merge`, o is f32, and
/// (o, lse) are merged with the result over other keys that they hold (lse = -inf: over none).
///
/// # Panics
/// If results in bf16 are to be merged.
pub fn forward(q: View, k: View, v: View, table: &SpanTable, merge: bool, mut o: ViewMut, mut lse: ViewMut) {
    const OP: &str = "attention forward";
    let form = form(OP, o.dtype(), merge);
    let shape = &table.shape;
    let heads = q.len() / shape.head_dim;
    let dtype = o.dtype();
    let [q, k, v] = [q, k, v].map(|view| view.arg(DType::Bf16));
    let [first, of_heads, group] = [0, shape.heads, shape.heads / shape.kv_heads].map(|n| dim(OP, n));
    let (window, scale, cap) = (table.window(), Arg::F32(shape.scale), cap(shape));
    let (o, lse) = (o.arg(dtype), lse.arg(DType::F32));
    // A row in shared memory is 8 values longer than the head.
    let shared = (forward_rows(shape) + 2 * forward_keys(shape)) * (shape.head_dim + 8) * 2;
    // f32 results cover a block of keys of the ring: no other kernel computes the same rows.
    let whole = [Run::whole(table.count)];
    let runs = if dtype == DType::Bf16 { &table.runs[..] } else { &whole };
    let mut before = key_segments::between(runs, heads, shape.head_dim);
    for run in runs {
        let [from, to, before] = run.args(before.as_mut());
        let tiles = table.tiles.arg();
        let args = [q, k, v, tiles, first, of_heads, group, window, scale, cap, o, lse, form, from, to, before];
        gpu().launch(
            kernel_of!("attention_forward_", shape.head_dim),
            [run.tiles * shape.heads, 1, 1],
            BLOCK,
            shared,
            &args,
        );
    }
}
