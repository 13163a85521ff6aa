//! Forward attention of tiles of 32 query rows over blocks of 32 keys. If the keys of a sequence arrive in several
//! runs, each run's result is merged with that of the previous runs.
//!
//! Dims: r rows of a tile (a row is a query of one head; heads of a group share their keys), j keys of a block, e head
//! dim. Scores are stored as [r][j], keys transposed as [e][j], values as [j][e].

use super::attention_cached::{Block, Cached, Side};
use super::attention_tile::{AttentionShape, PAGE, PagedSequence, Span, TILE, Tile};
use super::exp::{exp_lanes, tanh_lanes};
use super::lanes::fold;
use super::pool::Shares;
use super::product::{Product, Start};
use super::scratch::{Rest, taken};
use super::vector::{Kernel, Vector, copy, prefetch, transpose};
use crate::dtype::KvDtype;
use std::ops::Range;

/// A number below any score that softmax can distinguish from minus infinity. It is finite, so m - m is 0, not NaN.
const LOWEST: f32 = -3.0e38;

/// The layout of keys and values.
#[derive(Clone, Copy, Debug)]
pub(super) enum Keys<'a> {
    /// k and v (t, g*e)
    Packed { k: &'a [f32], v: &'a [f32] },
    /// Pages: keys [g][e][PAGE], values [g][PAGE][e].
    Paged { keys: Cached<'a>, values: Cached<'a>, sequences: &'a [PagedSequence<'a>] },
}

/// One call of forward attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forward<'a> {
    pub q: &'a [f32],
    pub keys: Keys<'a>,
    pub spans: &'a [Span],
    pub shape: &'a AttentionShape,
    pub o: Shares<f32>,
    pub lse: Option<Shares<f32>>,
    /// Whether o and lse hold the result over other keys (lse = -inf: over none), which is merged with the new result.
    pub merge: bool,
}

/// The scratch of a thread: one tile, and the transposed keys of one packed sequence.
struct Work<'a> {
    /// [r][e, whole blocks of lanes]
    q: &'a mut [f32],
    /// Scores, then probabilities, by block [r][j]
    p: &'a mut [f32],
    /// [r][e, whole blocks of lanes]
    o: &'a mut [f32],
    /// Sums of probabilities by lane [r][j]
    sums: &'a mut [f32],
    /// Largest score so far, by block [r]
    max: &'a mut [f32],
    /// exp(old max - new max), by block [r]
    decay: &'a mut [f32],
    /// [block][e][j]; of pages, one block, if they need another form
    keys: &'a mut [f32],
    /// [block][j][e]: a dense copy, because rows of v are so far apart that they share few cache lines; of pages as keys
    values: &'a mut [f32],
    /// The sequence and key head whose blocks up to `.2` are in `keys` and `values`, for packed keys.
    held: (usize, usize, usize),
}

/// The tiles that a thread does, one after the other.
impl Kernel for (&Forward<'_>, &[Tile]) {
    #[inline(always)]
    unsafe fn work<V: Vector>(&self, scratch: &mut [f32]) {
        let (forward, tiles) = *self;
        let wide = forward.shape.head_dim.next_multiple_of(PAGE);
        let mut rest = Rest(scratch);
        let mut work = Work {
            q: rest.take_slice(TILE * wide),
            p: rest.take_slice(TILE * PAGE),
            o: rest.take_slice(TILE * wide),
            sums: rest.take_slice(TILE * PAGE),
            max: rest.take_slice(TILE),
            decay: rest.take_slice(TILE),
            keys: rest.take_slice(forward.keys_len(tiles)),
            values: rest.take_slice(forward.keys_len(tiles)),
            held: (usize::MAX, 0, 0),
        };
        for (i, tile) in tiles.iter().enumerate() {
            // SAFETY: promised by the caller.
            unsafe {
                if let Some(next) = tiles.get(i + 1) {
                    forward.prefetch_queries::<V>(next);
                }
                forward.tile::<V>(tile, &mut work);
            }
        }
    }
}

/// Its unsafe functions have the requirements of `Kernel::work`.
impl Forward<'_> {
    /// Transposed keys, or values, of the longest run.
    fn keys_len(&self, tiles: &[Tile]) -> usize {
        match self.keys {
            Keys::Packed { .. } => {
                let longest = tiles.iter().map(|tile| self.spans[tile.sequence].keys).max().unwrap_or(0);
                longest.next_multiple_of(PAGE) * self.shape.head_dim
            }
            Keys::Paged { .. } if self.shape.values_are_keys || self.shape.kv == KvDtype::Fp8 => {
                PAGE * self.shape.head_dim
            }
            Keys::Paged { .. } => 0,
        }
    }

    pub fn scratch_len(&self, tiles: &[Tile]) -> usize {
        let wide = self.shape.head_dim.next_multiple_of(PAGE);
        2 * (taken(TILE * wide) + taken(TILE * PAGE) + taken(TILE)) + 2 * taken(self.keys_len(tiles))
    }

    #[inline(always)]
    unsafe fn tile<V: Vector>(&self, tile: &Tile, work: &mut Work) {
        let (shape, e) = (self.shape, self.shape.head_dim);
        let sequence = &self.spans[tile.sequence];
        let rows = tile.rows.len();
        let wide = e.next_multiple_of(PAGE);
        for (r, q) in tile.rows.clone().zip(work.q.chunks_exact_mut(wide)) {
            let at = sequence.at(self.shape, tile.kv_head, r) * e;
            let from = &self.q[at..at + e];
            // SAFETY: both hold e values; instructions as promised.
            unsafe { copy::<V>(from.as_ptr(), q.as_mut_ptr(), e) };
        }
        work.max.fill(LOWEST);
        work.sums[..rows * PAGE].fill(0.0);
        work.o[..rows * wide].fill(0.0);
        // A tile of few rows (decode) computes several blocks at once, because their chains are independent.
        let together = TILE / rows;
        let Range { start, end } = tile.blocks(sequence, shape);
        for first in (start..end).step_by(together) {
            let blocks = first..end.min(first + together);
            // SAFETY: promised by the caller.
            unsafe {
                self.scores::<V>(tile, blocks.clone(), work);
                self.softmax::<V>(tile, blocks.clone(), work);
                self.values::<V>(tile, blocks, work);
            }
        }
        // SAFETY: promised by the caller.
        unsafe { self.finish::<V>(tile, work) };
    }

    /// Keys of a block up to the last one that the tile sees.
    #[inline(always)]
    fn count(&self, tile: &Tile, block: usize) -> usize {
        let sequence = &self.spans[tile.sequence];
        let (_, last) = tile.positions(sequence, self.shape.group());
        PAGE.min(sequence.end(last) - block * PAGE)
    }

    /// p = q k^T for each block.
    #[inline(always)]
    unsafe fn scores<V: Vector>(&self, tile: &Tile, blocks: Range<usize>, work: &mut Work) {
        let (rows, e) = (tile.rows.len(), self.shape.head_dim);
        let end = blocks.end;
        for (i, block) in blocks.enumerate() {
            if let (Keys::Paged { keys, values, sequences }, false) = (self.keys, self.shape.values_are_keys)
                && rows < TILE / 2
            {
                // Decode waits for memory, so values and the next block's keys are prefetched while scores are
                // computed. SAFETY: instructions as promised.
                unsafe {
                    values.prefetch::<V>(self.head_at(sequences, tile, block), e);
                    if block + 1 < end {
                        keys.prefetch::<V>(self.head_at(sequences, tile, block + 1), e);
                    }
                }
            }
            // SAFETY: promised by the caller.
            let keys = unsafe { self.block::<V>(Side::Keys, tile, block, work) };
            // SAFETY: q holds rows x e, the key block e x PAGE, p rows x PAGE for each of the blocks; instructions as
            // promised.
            unsafe {
                keys.product::<V>(Product {
                    rows,
                    // Often only half of a block is visible: the block on the diagonal.
                    lanes: self.count(tile, block).next_multiple_of(PAGE / 2),
                    k: e,
                    a: work.q.as_ptr(),
                    a_stride: e.next_multiple_of(PAGE),
                    b_stride: PAGE,
                    c: work.p.as_mut_ptr().add(i * rows * PAGE),
                    c_stride: PAGE,
                    start: Start::Zero,
                });
            }
        }
    }

    /// o = o decay + p v for each block.
    #[inline(always)]
    unsafe fn values<V: Vector>(&self, tile: &Tile, blocks: Range<usize>, work: &mut Work) {
        let (rows, e) = (tile.rows.len(), self.shape.head_dim);
        for (i, block) in blocks.enumerate() {
            // SAFETY: promised by the caller.
            let values = unsafe { self.block::<V>(Side::Values, tile, block, work) };
            // SAFETY: the value block holds `count` rows of e values, p rows x PAGE and decay rows for each of the
            // blocks, o rows x e rounded up to PAGE; instructions as promised.
            unsafe {
                values.product::<V>(Product {
                    rows,
                    lanes: e,
                    k: self.count(tile, block),
                    a: work.p.as_ptr().add(i * rows * PAGE),
                    a_stride: PAGE,
                    b_stride: e,
                    c: work.o.as_mut_ptr(),
                    c_stride: e.next_multiple_of(PAGE),
                    start: Start::Scaled(work.decay.as_ptr().add(i * rows)),
                });
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch_queries<V: Vector>(&self, tile: &Tile) {
        let e = self.shape.head_dim;
        for r in tile.rows.clone() {
            let at = self.spans[tile.sequence].at(self.shape, tile.kv_head, r) * e;
            // SAFETY: instructions as promised.
            unsafe { prefetch::<V>(self.q.as_ptr().wrapping_add(at), e) };
        }
    }

    /// The place of a block among the heads of all pages.
    #[inline(always)]
    fn head_at(&self, sequences: &[PagedSequence], tile: &Tile, block: usize) -> usize {
        sequences[tile.sequence].blocks[block] as usize * self.shape.kv_heads + tile.kv_head
    }

    /// The keys or the values of a block.
    #[inline(always)]
    unsafe fn block<V: Vector>(&self, side: Side, tile: &Tile, block: usize, work: &mut Work) -> Block {
        let e = self.shape.head_dim;
        match (self.keys, side) {
            (Keys::Packed { k, v }, _) => {
                // SAFETY: promised by the caller.
                unsafe { self.hold::<V>([k, v], tile, block, work) };
                let held = if side == Side::Keys { &work.keys } else { &work.values };
                Block::F32(held[block * PAGE * e..].as_ptr())
            }
            (Keys::Paged { values, sequences, .. }, Side::Keys) if self.shape.values_are_keys => {
                let at = self.head_at(sequences, tile, block);
                // SAFETY: promised by the caller.
                unsafe { self.hold_page::<V>(values, at, (tile, block), work) };
                Block::F32(work.keys.as_ptr())
            }
            (Keys::Paged { keys, sequences, .. }, Side::Keys) => {
                // SAFETY: promised by the caller.
                unsafe { keys.block::<V>(self.head_at(sequences, tile, block), e, side, work.keys) }
            }
            (Keys::Paged { values, sequences, .. }, Side::Values) => {
                // SAFETY: promised by the caller.
                unsafe { values.block::<V>(self.head_at(sequences, tile, block), e, side, work.values) }
            }
        }
    }

    /// Transposes a page of vectors that are keys and values.
    #[inline(always)]
    unsafe fn hold_page<V: Vector>(&self, page: Cached, at: usize, (tile, block): (&Tile, usize), work: &mut Work) {
        let (e, place) = (self.shape.head_dim, (tile.sequence, tile.kv_head, block));
        if work.held == place {
            return;
        }
        work.held = place;
        // SAFETY: the rows are PAGE rows of e values, and `keys` holds them; instructions as promised.
        unsafe { transpose::<V>(page.widened::<V>(at, e, work.values), e, PAGE, e, work.keys.as_mut_ptr()) };
    }

    /// Transposes the keys of packed rows up to those of `block`, and lays their values side by side.
    #[inline(always)]
    unsafe fn hold<V: Vector>(&self, [k, v]: [&[f32]; 2], tile: &Tile, block: usize, work: &mut Work) {
        let (g, e) = (self.shape.kv_heads, self.shape.head_dim);
        let sequence = &self.spans[tile.sequence];
        if (work.held.0, work.held.1) != (tile.sequence, tile.kv_head) {
            work.held = (tile.sequence, tile.kv_head, tile.blocks(sequence, self.shape).start);
        }
        let start = |block: usize| ((sequence.key_row + block * PAGE) * g + tile.kv_head) * e;
        while work.held.2 <= block {
            let at = work.held.2;
            let count = PAGE.min(sequence.keys - at * PAGE);
            let rows = &k[start(at)..start(at) + (count - 1) * g * e + e];
            let lanes = &mut work.keys[at * PAGE * e..(at + 1) * PAGE * e];
            let values = &mut work.values[at * PAGE * e..(at + 1) * PAGE * e];
            // SAFETY: `rows` ends with row `count`, `lanes` and `values` hold e x PAGE; instructions as promised.
            unsafe {
                transpose::<V>(rows.as_ptr(), g * e, count, e, lanes.as_mut_ptr());
                for (j, values) in values.chunks_exact_mut(e).take(count).enumerate() {
                    let from = start(at) + j * g * e;
                    copy::<V>(v[from..from + e].as_ptr(), values.as_mut_ptr(), e);
                }
                for next in (0..PAGE).map(|j| start(at + 1) + j * g * e) {
                    prefetch::<V>(k.as_ptr().wrapping_add(next), e);
                    prefetch::<V>(v.as_ptr().wrapping_add(next), e);
                }
            }
            work.held.2 += 1;
        }
    }

    /// Scores to probabilities, by the new maximum of each row; sums them up by lane.
    #[inline(always)]
    unsafe fn softmax<V: Vector>(&self, tile: &Tile, blocks: Range<usize>, work: &mut Work) {
        let rows = tile.rows.len();
        // SAFETY: instructions as promised; p holds rows x PAGE and decay rows for each of the blocks, at most TILE
        // rows in all, sums rows x PAGE.
        unsafe {
            for (i, block) in blocks.clone().enumerate() {
                self.maxima::<V>(tile, block, i * rows, work);
            }
            for r in (0..blocks.len() * rows).step_by(V::LANES) {
                let at = work.decay.as_mut_ptr().add(r);
                exp_lanes(V::load(at)).store(at);
            }
            for i in 0..blocks.len() {
                // A later block may raise the maximum of a row, so it is kept per block.
                for r in 0..rows {
                    let (max, decay) = (V::splat(work.max[i * rows + r]), V::splat(work.decay[i * rows + r]));
                    for lane in (0..PAGE).step_by(V::LANES) {
                        let at = work.p.as_mut_ptr().add((i * rows + r) * PAGE + lane);
                        let sum = work.sums.as_mut_ptr().add(r * PAGE + lane);
                        let p = exp_lanes(V::load(at).sub(max));
                        p.store(at);
                        V::load(sum).fma(decay, p).store(sum);
                    }
                }
            }
            let last = (blocks.len() - 1) * rows;
            work.max.copy_within(last..last + rows, 0);
        }
    }

    /// Scales and masks the scores of a block, whose rows start at `base`. Computes their maximum with those of earlier
    /// blocks, and old maximum - new maximum.
    #[inline(always)]
    unsafe fn maxima<V: Vector>(&self, tile: &Tile, block: usize, base: usize, work: &mut Work) {
        let (rows, group) = (tile.rows.len(), self.shape.group());
        let sequence = &self.spans[tile.sequence];
        let (first, last) = tile.positions(sequence, group);
        let bits = |position| sequence.visible_bits(self.shape, position, block);
        let all = bits(first) & bits(last) == u32::MAX;
        // SAFETY: instructions as promised; p holds rows x PAGE from row `base` on.
        unsafe {
            let (scale, nothing) = (V::splat(self.shape.scale), V::splat(f32::NEG_INFINITY));
            for r in 0..rows {
                let bits = if all { u32::MAX } else { bits(sequence.past + (tile.rows.start + r) / group) };
                let mut max = nothing;
                for lane in (0..PAGE).step_by(V::LANES) {
                    let at = work.p.as_mut_ptr().add((base + r) * PAGE + lane);
                    let mut score = V::load(at).mul(scale);
                    if let Some(cap) = self.shape.softcap {
                        score = tanh_lanes(score.div(V::splat(cap))).mul(V::splat(cap));
                    }
                    if !all {
                        score = score.keep(bits >> lane, nothing);
                    }
                    score.store(at);
                    max = max.max(score);
                }
                let old = work.max[if base == 0 { r } else { base - rows + r }];
                let max = max.reduce_max();
                let max = if max > old { max } else { old };
                work.decay[base + r] = old - max;
                work.max[base + r] = max;
            }
        }
    }

    /// Writes o / sum of probabilities, and the log-sum-exp. Two results (o0, l0) and (o1, l1) merge to
    /// l = ln(exp l0 + exp l1), o = exp(l0 - l) o0 + exp(l1 - l) o1.
    #[inline(always)]
    unsafe fn finish<V: Vector>(&self, tile: &Tile, work: &mut Work) {
        let e = self.shape.head_dim;
        let wide = e.next_multiple_of(PAGE);
        let sequence = &self.spans[tile.sequence];
        for (i, r) in tile.rows.clone().enumerate() {
            let at = sequence.at(self.shape, tile.kv_head, r);
            // SAFETY: instructions as promised; sums hold rows x PAGE, o rows x wide; this row of o and lse belongs to
            // this tile alone.
            unsafe {
                let sum = fold(work.sums.as_chunks::<PAGE>().0[i]);
                let (inverse, zero) = (V::splat(1.0 / sum), V::splat(0.0));
                for lane in (0..wide).step_by(V::LANES) {
                    let at = work.o.as_mut_ptr().add(i * wide + lane);
                    // Adding zero turns the -0 of an underflow into 0, the result after a masked block.
                    V::load(at).fma(inverse, zero).store(at);
                }
                if let Some(lse) = self.lse {
                    let mut total = work.max[i] + sum.ln();
                    if self.merge {
                        let o = &mut work.o[i * wide..(i + 1) * wide];
                        total = self.merged::<V>(at, *lse.ptr().add(at), total, o);
                    }
                    *lse.ptr().add(at) = total;
                }
                copy::<V>(work.o[i * wide..].as_ptr(), self.o.ptr().add(at * e), e);
            }
        }
    }

    /// Merges the result in row `at`, with log-sum-exp `old`, into `o`, with log-sum-exp `new`. Returns the log-sum-exp
    /// of both.
    ///
    /// # Safety
    /// Same as `Kernel::work`; the row belongs to the caller alone, and `o` has room for whole vectors.
    #[inline(always)]
    unsafe fn merged<V: Vector>(&self, at: usize, old: f32, new: f32, o: &mut [f32]) -> f32 {
        if old == f32::NEG_INFINITY {
            return new;
        }
        let e = self.shape.head_dim;
        let max = if old > new { old } else { new };
        let total = max + ((old - max).exp() + (new - max).exp()).ln();
        // SAFETY: instructions as promised; row `at` of the result holds e values, o whole vectors.
        unsafe {
            let (old, new) = (V::splat((old - total).exp()), V::splat((new - total).exp()));
            for lane in (0..e).step_by(V::LANES) {
                let to = o.as_mut_ptr().add(lane);
                let held = V::load_part(self.o.ptr().add(at * e + lane), e - lane);
                held.fma(old, V::load(to).mul(new)).store(to);
            }
        }
        total
    }
}
