//! Causal grouped-query attention: what is attended to, the KV cache, and the division of the work over threads.

use super::attention_backward::{Backward, Part};
use super::attention_forward::{Forward, Keys};
pub use super::attention_tile::{AttentionShape, PAGE};
use super::attention_tile::{Sequence, TILE, Tile};
use super::pool::{Shares, pool};
use super::scratch;
use crate::device::null;
use crate::device::simd::level;
use std::ops::Range;

/// One sequence of a paged batch: `tokens` new rows after `past` cached ones; `blocks[i]` is the page of tokens
/// i*PAGE .. (i+1)*PAGE, and covers past + tokens.
#[derive(Clone, Debug)]
pub struct PagedSequence<'a> {
    pub past: usize,
    pub tokens: usize,
    pub blocks: &'a [u32],
}

/// Rows of q and a run of keys of the same sequence, of which every row sees at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first row of q.
    pub row: usize,
    pub tokens: usize,
    /// Position of the first row, counted from the first key.
    pub past: usize,
    /// The first row of k and v.
    pub key_row: usize,
    pub keys: usize,
}

/// Multiply-adds, in units of a key block times a row, below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 64;

/// Which rows of q see which rows of k and v.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// Whole sequences, one behind the other: [0, end of sequence 0, ...]. Results are overwritten.
    Packed(&'a [usize]),
    /// Spans that share no row of q and, in a backward, no row of k. Forward merges into (o, lse), backward adds.
    Spans(&'a [Span]),
}

impl Rows<'_> {
    fn sequences(&self) -> Vec<Sequence<'_>> {
        let of = |Span { row, tokens, past, key_row, keys }| Sequence { row, past, tokens, key_row, keys, blocks: &[] };
        let whole = |ends: &[usize]| {
            let (row, tokens) = (ends[0], ends[1] - ends[0]);
            of(Span { row, tokens, past: 0, key_row: row, keys: tokens })
        };
        match self {
            Self::Packed(cu_seqlens) => cu_seqlens.windows(2).map(whole).collect(),
            Self::Spans(spans) => spans.iter().copied().map(of).collect(),
        }
    }

    fn are_added(&self) -> bool {
        matches!(self, Self::Spans(_))
    }
}

pub fn forward_rows(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    rows: Rows,
    shape: &AttentionShape,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let (sequences, merge) = (&rows.sequences()[..], rows.are_added());
    let (o, lse) = (Shares::new(o), Some(Shares::new(lse)));
    forward(&Forward { q, keys: Keys::Packed { k, v }, sequences, shape, o, lse, merge });
}

pub fn forward_paged<'a>(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    sequences: &[PagedSequence<'a>],
    shape: &AttentionShape,
    o: &mut [f32],
) {
    let mut next = 0;
    let place = |&PagedSequence { past, tokens, blocks }: &PagedSequence<'a>| {
        let row = next;
        next += tokens;
        Sequence { row, past, tokens, key_row: 0, keys: past + tokens, blocks }
    };
    let sequences: Vec<_> = sequences.iter().map(place).collect();
    let o = Shares::new(o);
    let keys = Keys::Paged { keys, values };
    forward(&Forward { q, keys, sequences: &sequences, shape, o, lse: None, merge: false });
}

/// Cuts the rows into tiles, and the tiles into shares of equal work.
fn forward(forward: &Forward) {
    let shape = forward.shape;
    let mut tiles = Vec::new();
    if null::is_active() {
        tiles.extend((0..forward.sequences.len()).map(|sequence| Tile { sequence, kv_head: 0, rows: 0..1 }));
        return null::work_in(scratch::bytes(forward.scratch_len(&tiles)));
    }
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
    let ends = cumulated(items.iter().map(cost));
    if ends[items.len()] < SERIAL_MAX || pool.threads() == 1 {
        f(items);
        return;
    }
    let cuts = cuts(&ends, pool.threads());
    pool.run(&|id| f(&items[cuts[id]..cuts[id + 1]]));
}

/// Sums of the first 0, 1, ... costs.
fn cumulated(costs: impl Iterator<Item = usize>) -> Vec<usize> {
    let sums = costs.scan(0, |sum, cost| {
        *sum += cost;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

/// Where to cut the items, of cumulated costs `ends`, for `threads` shares. An item belongs to the share in which its
/// middle lies.
fn cuts(ends: &[usize], threads: usize) -> Vec<usize> {
    let (items, total) = (ends.len() - 1, ends[ends.len() - 1]);
    let middles: Vec<usize> = ends.windows(2).map(|ends| usize::midpoint(ends[0], ends[1])).collect();
    let cut = |share: usize| match share {
        0 => 0,
        _ if share == threads => items,
        _ => middles.partition_point(|&middle| middle < total * share / threads),
    };
    (0..=threads).map(cut).collect()
}

pub fn backward_rows(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    o: &[f32],
    lse: &[f32],
    d_o: &[f32],
    rows: Rows,
    shape: &AttentionShape,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    let (sequences, add) = (&rows.sequences()[..], rows.are_added());
    let (dq, dk, dv) = (Shares::new(dq), Shares::new(dk), Shares::new(dv));
    backward(&Backward { q, k, v, o, lse, d_o, sequences, shape, dq, dk, dv, add });
}

fn backward(backward: &Backward) {
    let (level, pool) = (level(), pool());
    if null::is_active() {
        return null::work_in(scratch::bytes(backward.scratch_len(0..backward.sequences.len())));
    }
    let shares = divided(backward, pool.threads());
    if let [share] = &shares[..] {
        backward.run(level, share);
    } else {
        pool.run(&|id| backward.run(level, &shares[id]));
    }
}

/// The parts that each thread does. Whole sequences and key heads where that is balanced to a quarter; else some are cut
/// in two or more, at the price that scores of the cut ones are computed twice.
fn divided(backward: &Backward, threads: usize) -> Vec<Vec<Part>> {
    let shape = backward.shape;
    let heads = 0..shape.kv_heads;
    let items: Vec<(usize, usize)> =
        (0..backward.sequences.len()).flat_map(|i| heads.clone().map(move |kv_head| (i, kv_head))).collect();
    let ends = cumulated(items.iter().map(|item| backward.pairs(item.0)));
    let total = ends[items.len()];
    if total * TILE < SERIAL_MAX || threads == 1 {
        return vec![items.iter().map(|item| backward.part(item.0, item.1, 0, 1, 1)).collect()];
    }
    let cuts = cuts(&ends, threads);
    let largest = cuts.windows(2).map(|cuts| ends[cuts[1]] - ends[cuts[0]]).max().unwrap_or(0);
    if largest * threads * 4 <= total * 5 {
        let whole = |range: Range<usize>| range.map(|i| backward.part(items[i].0, items[i].1, 0, 1, 1));
        return cuts.windows(2).map(|cuts| whole(cuts[0]..cuts[1]).collect()).collect();
    }
    let share = |id: usize| {
        let (from, to) = (total * id / threads, total * (id + 1) / threads);
        let mut parts = Vec::new();
        for (i, item) in items.iter().enumerate() {
            let (start, end) = (ends[i], ends[i + 1]);
            let (from, to) = (from.clamp(start, end), to.clamp(start, end));
            if from < to {
                parts.push(backward.part(item.0, item.1, from - start, to - start, end - start));
            }
        }
        parts
    };
    (0..threads).map(share).collect()
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
    if null::is_active() {
        return;
    }
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
