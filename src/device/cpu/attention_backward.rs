//! Backward attention of one sequence under one key head, or of a part of it: key blocks ascending, and for each block
//! the query tiles that see it, ascending. Probabilities are recomputed from the log-sum-exp (arXiv:2205.14135,
//! algorithm 4).
//!
//! Dims as in `attention_forward`; d = e rounded up to whole blocks of lanes. Every dq[r], dk[j], dv[j] is one chain of
//! multiply-adds, ascending j or ascending r.

use super::attention_tile::{AttentionShape, PAGE, Span, TILE, Tile};
use super::exp::{exp_lanes, tanh_lanes};
use super::lanes;
use super::pool::Shares;
use super::product::{Product, Start, multiply};
use super::scratch::{Rest, taken};
use super::vector::{Kernel, Vector, copy, prefetch, transpose};
use std::ops::Range;

/// One call of backward attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backward<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub o: &'a [f32],
    pub lse: &'a [f32],
    pub d_o: &'a [f32],
    pub spans: &'a [Span],
    pub shape: &'a AttentionShape,
    pub dq: Shares<f32>,
    pub dk: Shares<f32>,
    pub dv: Shares<f32>,
    /// Whether the gradients are added to dq, dk and dv instead of overwriting them.
    pub add: bool,
}

/// The gradients of some key blocks and of some query tiles of a sequence under one key head. A pair of a block and a
/// tile is computed if either of them is wanted.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub sequence: usize,
    kv_head: usize,
    blocks: Range<usize>,
    tiles: Range<usize>,
}

/// The scratch of a thread: all rows of a sequence under one key head, one key block, one tile of scores.
struct Work<'a> {
    /// [row][d], lanes past e are zero
    q: &'a mut [f32],
    /// [row][d]
    d_o: &'a mut [f32],
    /// [row][d]
    dq: &'a mut [f32],
    /// Log-sum-exp, and d_o.o [row]
    lse: &'a mut [f32],
    delta: &'a mut [f32],
    /// Transposed [e][j]
    keys: &'a mut [f32],
    values: &'a mut [f32],
    /// [j][d]
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// [r][j]
    p: &'a mut [f32],
    ds: &'a mut [f32],
}

/// The parts that a thread does, one after the other.
impl Kernel for (&Backward<'_>, &[Part]) {
    #[inline(always)]
    unsafe fn work<V: Vector>(&self, scratch: &mut [f32]) {
        let (backward, parts) = *self;
        let e = backward.shape.head_dim;
        let (d, rows) = (e.next_multiple_of(PAGE), backward.rows_max(parts.iter().map(|part| part.sequence)));
        let mut rest = Rest(scratch);
        let mut work = Work {
            q: rest.take_slice(rows * d),
            d_o: rest.take_slice(rows * d),
            dq: rest.take_slice(rows * d),
            lse: rest.take_slice(rows),
            delta: rest.take_slice(rows),
            keys: rest.take_slice(e * PAGE),
            values: rest.take_slice(e * PAGE),
            dk: rest.take_slice(PAGE * d),
            dv: rest.take_slice(PAGE * d),
            p: rest.take_slice(TILE * PAGE),
            ds: rest.take_slice(TILE * PAGE),
        };
        for part in parts {
            // SAFETY: promised by the caller.
            unsafe {
                backward.gather::<V>(part, &mut work);
                for block in 0..backward.block_count(part.sequence) {
                    backward.block::<V>(part, block, &mut work);
                }
                backward.own_queries::<V>(part, &mut work, false);
            }
        }
    }
}

/// Its unsafe functions have the requirements of `Kernel::work`.
impl Backward<'_> {
    /// Rows of the longest of `sequences`, in whole tiles.
    fn rows_max(&self, sequences: impl Iterator<Item = usize>) -> usize {
        let longest = sequences.map(|i| self.spans[i].tokens).max().unwrap_or(0);
        (longest * self.shape.group()).next_multiple_of(TILE)
    }

    pub fn scratch_len(&self, sequences: impl Iterator<Item = usize>) -> usize {
        let e = self.shape.head_dim;
        let d = e.next_multiple_of(PAGE);
        let rows = self.rows_max(sequences);
        3 * taken(rows * d) + 2 * (taken(rows) + taken(e * PAGE) + taken(PAGE * d) + taken(TILE * PAGE))
    }

    fn block_count(&self, sequence: usize) -> usize {
        self.spans[sequence].keys.div_ceil(PAGE)
    }

    /// The tiles with a query that sees the block.
    fn tiles_of(&self, sequence: usize, block: usize) -> Range<usize> {
        let (Span { past, tokens, keys, .. }, group) = (self.spans[sequence], self.shape.group());
        // The queries from the start of the block to the last one that sees the block's last key.
        let start = (block * PAGE).saturating_sub(past);
        let last = |window: usize| keys.min((block + 1) * PAGE).saturating_add(window - 1).saturating_sub(past);
        let end = self.shape.window.map_or(tokens, |window| tokens.min(last(window)));
        start * group / TILE..(end * group).div_ceil(TILE)
    }

    /// Pairs of a block and a tile that sees it: the cost of a sequence under one key head.
    pub fn pairs(&self, sequence: usize) -> usize {
        (0..self.block_count(sequence)).map(|block| self.tiles_of(sequence, block).len()).sum()
    }

    /// The part from `from` / `of` to `to` / `of` of a sequence under one key head: key blocks and tiles with about
    /// that share of the pairs.
    pub fn part(&self, sequence: usize, kv_head: usize, from: usize, to: usize, of: usize) -> Part {
        let count = self.block_count(sequence);
        let tiles: Vec<Range<usize>> = (0..count).map(|block| self.tiles_of(sequence, block)).collect();
        let tile_count = (self.spans[sequence].tokens * self.shape.group()).div_ceil(TILE);
        let of_tile = |tile: usize| tiles.iter().filter(|tiles| tiles.contains(&tile)).count();
        let total = self.pairs(sequence);
        // The first index with the share `at` / `of` of the pairs before it. Both neighbors find the same index.
        let cut = |costs: &mut dyn Iterator<Item = usize>, at: usize| {
            let mut sum = 0;
            costs
                .take_while(|cost| {
                    let before = sum * of < at * total;
                    sum += cost;
                    before
                })
                .count()
        };
        let block_at = |at| cut(&mut tiles.iter().map(Range::len), at);
        let tile_at = |at| cut(&mut (0..tile_count).map(of_tile), at);
        Part { sequence, kv_head, blocks: block_at(from)..block_at(to), tiles: tile_at(from)..tile_at(to) }
    }

    /// Copies the rows of q, d_o and lse, computes delta, and begins dq.
    #[inline(always)]
    unsafe fn gather<V: Vector>(&self, part: &Part, work: &mut Work) {
        const AHEAD: usize = 16;
        let Part { sequence, kv_head, .. } = *part;
        let e = self.shape.head_dim;
        let d = e.next_multiple_of(PAGE);
        let rows = self.spans[sequence].tokens * self.shape.group();
        let [q_rows, d_o_rows] = [&mut work.q[..rows * d], &mut work.d_o[..rows * d]];
        for (r, (q, d_o)) in q_rows.chunks_exact_mut(d).zip(d_o_rows.chunks_exact_mut(d)).enumerate() {
            let at = self.spans[sequence].at(self.shape, kv_head, r);
            let next = self.spans[sequence].at(self.shape, kv_head, r + AHEAD) * e;
            let range = at * e..(at + 1) * e;
            q[e..].fill(0.0);
            d_o[e..].fill(0.0);
            // SAFETY: q and d_o have room for e values, and d_o for whole vectors; instructions as promised.
            unsafe {
                for from in [self.q, self.o, self.d_o] {
                    prefetch::<V>(from.as_ptr().wrapping_add(next), e);
                }
                copy::<V>(self.q[range.clone()].as_ptr(), q.as_mut_ptr(), e);
                copy::<V>(self.d_o[range.clone()].as_ptr(), d_o.as_mut_ptr(), e);
            }
            work.delta[r] = lanes::dot::<16>(&self.o[range], &d_o[..e]);
            work.lse[r] = self.lse[at];
        }
        work.dq[..rows * d].fill(0.0);
        if self.add {
            // SAFETY: promised by the caller.
            unsafe { self.own_queries::<V>(part, work, true) };
        }
    }

    /// Reads the rows of dq that the part wants, or writes them.
    #[inline(always)]
    unsafe fn own_queries<V: Vector>(&self, part: &Part, work: &mut Work, read: bool) {
        let Span { tokens, .. } = self.spans[part.sequence];
        let rows = part.tiles.start * TILE..(tokens * self.shape.group()).min(part.tiles.end * TILE);
        let at = |r| self.spans[part.sequence].at(self.shape, part.kv_head, r) * self.shape.head_dim;
        // SAFETY: the rows of this part belong to this thread alone; instructions as promised.
        unsafe { self.copy_rows::<V>(rows, at, self.dq, work.dq, read) };
    }

    /// Reads `rows` of `held` ([r][d]) from e values at `at` of a gradient, or writes them there.
    ///
    /// # Safety
    /// Same as `Kernel::work`; the rows belong to this thread alone.
    #[inline(always)]
    unsafe fn copy_rows<V: Vector>(
        &self,
        rows: Range<usize>,
        at: impl Fn(usize) -> usize,
        gradient: Shares<f32>,
        held: &mut [f32],
        read: bool,
    ) {
        let e = self.shape.head_dim;
        for r in rows {
            let row = held[r * e.next_multiple_of(PAGE)..][..e].as_mut_ptr();
            // SAFETY: both have e values; promised by the caller.
            unsafe {
                let of = gradient.ptr().add(at(r));
                if read { copy::<V>(of, row, e) } else { copy::<V>(row, of, e) }
            }
        }
    }

    /// Computes dk and dv of a key block, and its contribution to dq, as far as the part wants them.
    #[inline(always)]
    unsafe fn block<V: Vector>(&self, part: &Part, block: usize, work: &mut Work) {
        let mut tiles = self.tiles_of(part.sequence, block);
        if !part.blocks.contains(&block) {
            tiles = tiles.start.max(part.tiles.start)..tiles.end.min(part.tiles.end);
        }
        if tiles.is_empty() {
            return;
        }
        let (g, e) = (self.shape.kv_heads, self.shape.head_dim);
        let place = &self.spans[part.sequence];
        let count = PAGE.min(place.keys - block * PAGE);
        let first = ((place.key_row + block * PAGE) * g + part.kv_head) * e;
        let rows = first..first + (count - 1) * g * e + e;
        for (from, lanes) in [(self.k, &mut *work.keys), (self.v, &mut *work.values)] {
            // SAFETY: `rows` ends with row `count`, `lanes` holds e x PAGE; instructions as promised.
            unsafe {
                transpose::<V>(from[rows.clone()].as_ptr(), g * e, count, e, lanes.as_mut_ptr());
                for next in (0..PAGE).map(|j| first + (PAGE + j) * g * e) {
                    prefetch::<V>(from.as_ptr().wrapping_add(next), e);
                }
            }
        }
        work.dk.fill(0.0);
        work.dv.fill(0.0);
        let wanted = part.blocks.contains(&block);
        let at = |j| first + j * g * e;
        if wanted && self.add {
            // SAFETY: the key blocks of this part belong to this thread alone; instructions as promised.
            unsafe {
                self.copy_rows::<V>(0..count, at, self.dk, work.dk, true);
                self.copy_rows::<V>(0..count, at, self.dv, work.dv, true);
            }
        }
        for tile in tiles {
            // SAFETY: promised by the caller.
            unsafe { self.tile::<V>(part, tile, block, count, work) };
        }
        if wanted {
            // SAFETY: as above.
            unsafe {
                self.copy_rows::<V>(0..count, at, self.dk, work.dk, false);
                self.copy_rows::<V>(0..count, at, self.dv, work.dv, false);
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<V: Vector>(&self, part: &Part, tile: usize, block: usize, count: usize, work: &mut Work) {
        let (g, e) = (self.shape.kv_heads, self.shape.head_dim);
        let d = e.next_multiple_of(PAGE);
        let place = &self.spans[part.sequence];
        let (want_keys, want_queries) = (part.blocks.contains(&block), part.tiles.contains(&tile));
        let rows = tile * TILE..((tile + 1) * TILE).min(place.tokens * self.shape.group());
        let tile = &Tile { sequence: part.sequence, kv_head: part.kv_head, rows };
        let rows = tile.rows.len();
        let (_, last) = tile.positions(place, self.shape.group());
        // A tile that ends before the block sees none of its keys: all of them are masked.
        let count = count.min((last + 1).wrapping_sub(block * PAGE));
        let (q, d_o) = (work.q[tile.rows.start * d..].as_ptr(), work.d_o[tile.rows.start * d..].as_ptr());
        let keys = self.k[((place.key_row + block * PAGE) * g + tile.kv_head) * e..].as_ptr();
        let scores = |a, c: &mut [f32]| Product {
            rows,
            lanes: PAGE,
            k: e,
            a,
            a_stride: d,
            b_stride: PAGE,
            c: c.as_mut_ptr(),
            c_stride: PAGE,
            start: Start::Zero,
        };
        let over_rows = |a: &[f32], c: &mut [f32]| Product {
            rows: count,
            lanes: d,
            k: rows,
            a: a.as_ptr(),
            a_stride: 1,
            b_stride: d,
            c: c.as_mut_ptr(),
            c_stride: d,
            start: Start::Add,
        };
        // SAFETY: q, d_o, dq hold the tile's rows x d; keys and values e x PAGE; p and ds TILE x PAGE, read by columns
        // in over_rows; dk and dv PAGE x d; the key block in place holds `count` rows of e values g * e apart;
        // instructions as promised.
        unsafe {
            multiply::<V, 1, _>(work.keys.as_ptr(), scores(q, work.p));
            multiply::<V, 1, _>(work.values.as_ptr(), scores(d_o, work.ds));
            self.probabilities::<V>(tile, block, work);
            if want_keys {
                multiply::<V, PAGE, _>(d_o, over_rows(work.p, work.dv));
                multiply::<V, PAGE, _>(q, over_rows(work.ds, work.dk));
            }
            if want_queries {
                let slopes = Product {
                    rows,
                    lanes: e,
                    k: count,
                    a: work.ds.as_ptr(),
                    a_stride: PAGE,
                    b_stride: g * e,
                    c: work.dq.as_mut_ptr().add(tile.rows.start * d),
                    c_stride: d,
                    start: Start::Add,
                };
                multiply::<V, 1, _>(keys, slopes);
            }
        }
    }

    /// p = exp(scale s - lse) from p = s; ds = p (ds - delta) scale from ds = d_o.v. With a soft cap c and t = tanh(scale
    /// s / c): p = exp(c t - lse), ds = p (ds - delta) (1 - t^2) scale.
    #[inline(always)]
    unsafe fn probabilities<V: Vector>(&self, tile: &Tile, block: usize, work: &mut Work) {
        let (place, group) = (&self.spans[tile.sequence], self.shape.group());
        let (first, last) = tile.positions(place, group);
        let bits = |position| place.visible_bits(self.shape, position, block);
        let all = bits(first) & bits(last) == u32::MAX;
        // SAFETY: instructions as promised; p and ds hold TILE x PAGE, lse and delta the tile's rows.
        unsafe {
            let (scale, zero) = (V::splat(self.shape.scale), V::splat(0.0));
            for (r, row) in tile.rows.clone().enumerate() {
                let bits = if all { u32::MAX } else { bits(place.past + row / group) };
                let (lse, delta) = (V::splat(-work.lse[row]), V::splat(work.delta[row]));
                for lane in (0..PAGE).step_by(V::LANES) {
                    let p_at = work.p.as_mut_ptr().add(r * PAGE + lane);
                    let ds_at = work.ds.as_mut_ptr().add(r * PAGE + lane);
                    let (mut p, mut slope) = (V::load(p_at), scale);
                    p = exp_lanes(match self.shape.softcap {
                        None => p.fma(scale, lse),
                        Some(cap) => {
                            let t = tanh_lanes(p.mul(scale).div(V::splat(cap)));
                            slope = V::splat(1.0).sub(t.mul(t)).mul(scale);
                            t.fma(V::splat(cap), lse)
                        }
                    });
                    if !all {
                        p = p.keep(bits >> lane, zero);
                    }
                    p.store(p_at);
                    V::load(ds_at).sub(delta).mul(p).mul(slope).store(ds_at);
                }
            }
        }
    }
}
