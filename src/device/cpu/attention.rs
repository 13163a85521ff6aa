//! Causal grouped-query attention: what is attended to, the KV cache, and the division of the work over threads.

use super::attention_backward::Backward;
use super::attention_forward::{Forward, Keys, Sequence, TILE, Tile};
use super::pool::{Shares, pool};
use super::vector::BLOCK;
use crate::device::simd::level;
use std::ops::Range;

/// Tokens of one KV page, and keys of one block of the softmax.
pub const PAGE: usize = BLOCK;

/// Heads, window and scale of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// A query sees at most this many keys, itself included; `None`: all before it.
    pub window: Option<usize>,
    /// Usually 1 / sqrt(head_dim).
    pub scale: f32,
}

/// One sequence of a paged batch: `tokens` new rows after `past` cached ones; `blocks[i]` is the page of tokens
/// i*PAGE .. (i+1)*PAGE, and covers past + tokens.
#[derive(Clone, Debug)]
pub struct PagedSequence<'a> {
    pub past: usize,
    pub tokens: usize,
    pub blocks: &'a [u32],
}

impl AttentionShape {
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

/// Multiply-adds, in units of a key block times a row, below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 64;

pub fn forward_packed(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    cu_seqlens: &[usize],
    shape: &AttentionShape,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let sequences = packed(cu_seqlens);
    let (o, lse) = (Shares::new(o), Some(Shares::new(lse)));
    forward(&Forward { q, keys: Keys::Packed { k, v }, sequences: &sequences, shape, o, lse });
}

pub fn forward_paged(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    sequences: &[PagedSequence],
    shape: &AttentionShape,
    o: &mut [f32],
) {
    let sequences = paged(sequences);
    let o = Shares::new(o);
    forward(&Forward { q, keys: Keys::Paged { keys, values }, sequences: &sequences, shape, o, lse: None });
}

fn packed(cu_seqlens: &[usize]) -> Vec<Sequence<'_>> {
    let ends = cu_seqlens.windows(2);
    ends.map(|ends| Sequence { row: ends[0], past: 0, tokens: ends[1] - ends[0], blocks: &[] }).collect()
}

fn paged<'a>(sequences: &[PagedSequence<'a>]) -> Vec<Sequence<'a>> {
    let mut next = 0;
    let place = sequences.iter().map(|sequence| {
        let PagedSequence { past, tokens, blocks } = *sequence;
        let row = next;
        next += tokens;
        Sequence { row, past, tokens, blocks }
    });
    place.collect()
}

/// Cuts the rows into tiles, and the tiles into shares of equal work.
fn forward(forward: &Forward) {
    let shape = forward.shape;
    let mut tiles = Vec::new();
    for (i, sequence) in forward.sequences.iter().enumerate() {
        let rows = sequence.tokens * shape.group();
        for kv_head in 0..shape.kv_heads {
            let starts = (0..rows).step_by(TILE);
            tiles.extend(starts.map(|at| Tile { sequence: i, kv_head, rows: at..(at + TILE).min(rows) }));
        }
    }
    let cost = |tile: &Tile| tile.rows.len() * tile.blocks(&forward.sequences[tile.sequence], shape).len();
    let level = level();
    balanced(&tiles, &cost, &|tiles| forward.run(level, tiles));
}

/// Runs `f` on one contiguous part of `items` a thread, parts of about equal cost.
fn balanced<T: Sync>(items: &[T], cost: &dyn Fn(&T) -> usize, f: &(dyn Fn(&[T]) + Sync)) {
    let pool = pool();
    let ends: Vec<usize> = items
        .iter()
        .scan(0, |sum, item| {
            *sum += cost(item);
            Some(*sum)
        })
        .collect();
    let total = ends.last().copied().unwrap_or(0);
    if total < SERIAL_MAX || pool.threads() == 1 {
        f(items);
        return;
    }
    let threads = pool.threads();
    // An item belongs to the share in which its middle lies.
    let cut = |share: usize| {
        let at = total * share / threads;
        let middle = |i: usize| (ends[i] + if i == 0 { 0 } else { ends[i - 1] }) / 2;
        if share == threads { items.len() } else { partition(items.len(), |i| middle(i) < at) }
    };
    pool.run(&|id| f(&items[cut(id)..cut(id + 1)]));
}

/// The first index below `len` at which `before` is false; it is true up to there.
fn partition(len: usize, before: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, len);
    while low < high {
        let middle = usize::midpoint(low, high);
        if before(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

pub fn backward_packed(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    o: &[f32],
    lse: &[f32],
    d_o: &[f32],
    cu_seqlens: &[usize],
    shape: &AttentionShape,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    let sequences = packed(cu_seqlens);
    let (dq, dk, dv) = (Shares::new(dq), Shares::new(dk), Shares::new(dv));
    let backward = Backward { q, k, v, o, lse, d_o, sequences: &sequences, shape, dq, dk, dv };
    let items: Vec<(usize, usize)> =
        (0..sequences.len()).flat_map(|sequence| (0..shape.kv_heads).map(move |kv_head| (sequence, kv_head))).collect();
    let cost = |&(sequence, _): &(usize, usize)| {
        let tokens = sequences[sequence].tokens;
        tokens * shape.group() * tokens.min(shape.window.unwrap_or(tokens)).div_ceil(PAGE)
    };
    let level = level();
    balanced(&items, &cost, &|items| backward.run(level, items));
}

/// Elements of one page of keys, or of values.
pub fn page_len(shape: &AttentionShape) -> usize {
    shape.kv_heads * shape.head_dim * PAGE
}

pub fn kv_append(
    keys: &mut [f32],
    values: &mut [f32],
    k: &[f32],
    v: &[f32],
    sequences: &[PagedSequence],
    shape: &AttentionShape,
) {
    let (g, e) = (shape.kv_heads, shape.head_dim);
    let rows = sequences.iter().flat_map(|s| (s.past..s.past + s.tokens).map(move |at| (s, at)));
    for (row, (sequence, at)) in rows.enumerate() {
        let page = sequence.blocks[at / PAGE] as usize * page_len(shape);
        for head in 0..g {
            let from = (row * g + head) * e;
            let to = page + head * e * PAGE;
            for lane in 0..e {
                keys[to + lane * PAGE + at % PAGE] = k[from + lane];
            }
            let to = to + at % PAGE * e;
            values[to..to + e].copy_from_slice(&v[from..from + e]);
        }
    }
}
