//! Causal grouped-query attention: visible keys, the KV cache, and the division of the work over threads.

use super::attention_backward::{Backward, Part};
use super::attention_cached::head_len;
pub use super::attention_cached::{Cached, CachedValue};
use super::attention_forward::{Forward, Keys};
pub use super::attention_tile::{AttentionShape, PAGE, PagedSequence, Span};
use super::attention_tile::{TILE, Tile};
use super::pool::{Shares, pool};
use super::scratch;
use super::vector::run;
use crate::device::null;
use crate::device::simd::level;
use std::ops::Range;

/// The work below which one thread is faster than waking the others: multiply-adds of a key block times a row.
const SERIAL_MAX: usize = 64;

/// The number of values of keys below which one thread appends them.
const APPEND_SERIAL_BELOW: usize = 1024;

/// Attention of `spans` that share no row of q. Overwrites (o, lse), or merges the result into their values.
pub fn forward_rows(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    spans: &[Span],
    merge: bool,
    shape: &AttentionShape,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let (o, lse) = (Shares::new(o), Some(Shares::new(lse)));
    forward(&Forward { q, keys: Keys::Packed { k, v }, spans, shape, o, lse, merge });
}

pub fn forward_paged(
    q: &[f32],
    [keys, values]: [Cached; 2],
    sequences: &[PagedSequence],
    shape: &AttentionShape,
    o: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    let mut row = 0;
    let span = |&PagedSequence { past, tokens, .. }: &PagedSequence| {
        row += tokens;
        Span { row: row - tokens, tokens, past, key_row: 0, keys: past + tokens }
    };
    let spans: Vec<_> = sequences.iter().map(span).collect();
    let keys = Keys::Paged { keys, values, sequences };
    let (o, lse) = (Shares::new(o), lse.map(Shares::new));
    forward(&Forward { q, keys, spans: &spans, shape, o, lse, merge: false });
}

/// Cuts the rows into tiles, and the tiles into contiguous shares of about equal work, one per thread.
fn forward(forward: &Forward) {
    let shape = forward.shape;
    let mut tiles = Vec::new();
    if null::is_active() {
        tiles.extend((0..forward.spans.len()).map(|sequence| Tile { sequence, kv_head: 0, rows: 0..1 }));
        return null::work_in(scratch::bytes(forward.scratch_len(&tiles)));
    }
    for (i, sequence) in forward.spans.iter().enumerate() {
        let rows = sequence.tokens * shape.group();
        for kv_head in 0..shape.kv_heads {
            let starts = (0..rows).step_by(TILE);
            tiles.extend(starts.map(|at| Tile { sequence: i, kv_head, rows: at..(at + TILE).min(rows) }));
        }
    }
    let cost = |tile: &Tile| tile.rows.len() * tile.blocks(&forward.spans[tile.sequence], shape).len();
    let ends = cumulated(tiles.iter().map(cost));
    let (level, pool) = (level(), pool());
    let work = |tiles: &[Tile]| run(level, forward.scratch_len(tiles), &(forward, tiles));
    if ends[tiles.len()] < SERIAL_MAX || pool.threads() == 1 {
        return work(&tiles);
    }
    let cuts = cuts(&ends, pool.threads());
    pool.run(&|id| work(&tiles[cuts[id]..cuts[id + 1]]));
}

/// Sums of the first 0, 1, ... costs.
fn cumulated(costs: impl Iterator<Item = usize>) -> Vec<usize> {
    let sums = costs.scan(0, |sum, cost| {
        *sum += cost;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

/// The indices at which to cut items with cumulated costs `ends` into `threads` shares. An item belongs to the share
/// that contains its middle.
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

/// Gradients of `forward_rows`, of spans that share no row of k either: overwrites dq, dk and dv, or adds to them.
pub fn backward_rows(
    [q, k, v]: [&[f32]; 3],
    [o, lse, d_o]: [&[f32]; 3],
    spans: &[Span],
    add: bool,
    shape: &AttentionShape,
    [dq, dk, dv]: [&mut [f32]; 3],
) {
    let [dq, dk, dv] = [dq, dk, dv].map(Shares::new);
    backward(&Backward { q, k, v, o, lse, d_o, spans, shape, dq, dk, dv, add });
}

fn backward(backward: &Backward) {
    let (level, pool) = (level(), pool());
    if null::is_active() {
        return null::work_in(scratch::bytes(backward.scratch_len(0..backward.spans.len())));
    }
    let shares = divided(backward, pool.threads());
    let work = |id: usize| {
        let parts = &shares[id][..];
        run(level, backward.scratch_len(parts.iter().map(|part| part.sequence)), &(backward, parts));
    };
    if shares.len() == 1 { work(0) } else { pool.run(&work) }
}

/// The parts of each thread: whole sequences and key heads if that is balanced to a quarter. Otherwise some are cut in
/// two or more, and the scores of those are computed twice.
fn divided(backward: &Backward, threads: usize) -> Vec<Vec<Part>> {
    let shape = backward.shape;
    let heads = 0..shape.kv_heads;
    let items: Vec<(usize, usize)> =
        (0..backward.spans.len()).flat_map(|i| heads.clone().map(move |kv_head| (i, kv_head))).collect();
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
pub fn page_len<T: CachedValue>(shape: &AttentionShape) -> usize {
    shape.kv_heads * head_len::<T>(shape.head_dim)
}

/// Stores the rows k and v (t, g*e) after the cached tokens of their sequences. If values are keys, only v is stored.
pub fn kv_append<T: CachedValue>(
    [keys, values]: [&mut [T]; 2],
    [k, v]: [&[f32]; 2],
    sequences: &[PagedSequence],
    shape: &AttentionShape,
) {
    if null::is_active() {
        return;
    }
    let (g, e) = (shape.kv_heads, shape.head_dim);
    let ends = cumulated(sequences.iter().map(|sequence| sequence.tokens));
    let has_keys = !shape.values_are_keys;
    let (keys, values) = (Shares::new(keys), Shares::new(values));
    let small = k.len() < APPEND_SERIAL_BELOW;
    // These are about the threads that read the sequences' pages next, so the new values are in their caches.
    pool().ranges(sequences.len(), 1, small, &|part| {
        for (sequence, start) in sequences[part.clone()].iter().zip(&ends[part]) {
            for (row, at) in (sequence.past..sequence.past + sequence.tokens).enumerate() {
                let page = sequence.blocks[at / PAGE] as usize * page_len::<T>(shape);
                for head in 0..g {
                    let from = ((start + row) * g + head) * e;
                    let to = page + head * head_len::<T>(e);
                    // SAFETY: keys and values hold this page, and place `at` of it is this sequence's alone.
                    unsafe {
                        if has_keys {
                            append(&k[from..from + e], keys.ptr().add(to), at % PAGE, [PAGE, 1]);
                        }
                        append(&v[from..from + e], values.ptr().add(to), at % PAGE, [1, e]);
                    }
                }
            }
        }
    });
}

/// Stores a vector as the `token`-th of a head of a page, whose dims and tokens are `strides` apart.
///
/// # Safety
/// The head may be written at these places.
#[inline]
unsafe fn append<T: CachedValue>(vector: &[f32], head: *mut T, token: usize, [of_dims, of_tokens]: [usize; 2]) {
    let power = T::power(vector);
    // SAFETY: promised by the caller.
    unsafe {
        for (i, x) in vector.iter().enumerate() {
            *head.add(i * of_dims + token * of_tokens) = T::of(*x, power);
        }
        if T::POWERS > 0 {
            *head.add(vector.len() * PAGE + token) = T::of_power(power);
        }
    }
}
