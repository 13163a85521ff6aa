//! Backward attention of one sequence under one key head: key blocks ascending, and for each the query tiles that see
//! it, ascending; probabilities are recomputed from the log-sum-exp (arXiv:2205.14135, algorithm 4).
//!
//! Dims as in `attention_forward`; d = e rounded up to whole blocks of lanes. Every dq[r], dk[j], dv[j] is one chain of
//! multiply-adds, ascending j or ascending r.

use super::attention::{AttentionShape, PAGE};
use super::attention_forward::{Sequence, TILE, Tile, visible_bits};
use super::pool::Shares;
use super::scratch::{take, taken, with_scratch};
use super::vector::{Product, Start, Vector, copy, prefetch, transpose};
use crate::device::simd::{Isa, Level};

/// One call of backward attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backward<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub o: &'a [f32],
    pub lse: &'a [f32],
    pub d_o: &'a [f32],
    pub sequences: &'a [Sequence<'a>],
    pub shape: &'a AttentionShape,
    pub dq: Shares<f32>,
    pub dk: Shares<f32>,
    pub dv: Shares<f32>,
}

/// What a thread works in: all rows of a sequence under one key head, one key block, one tile of scores.
struct Work<'a> {
    /// [row][d], lanes behind e zero
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

impl Backward<'_> {
    /// Does the (sequence, key head) of `items`, one after the other.
    pub fn run(&self, level: Level, items: &[(usize, usize)]) {
        // The scratch comes first: closures of the standard library are not compiled for the level.
        with_scratch(self.scratch_len(items), |scratch| self.run_in(level, items, scratch));
    }

    fn run_in(&self, level: Level, items: &[(usize, usize)], scratch: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m256, __m512};
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512(backward: &Backward, items: &[(usize, usize)], scratch: &mut [f32]) {
                // SAFETY: this function is compiled for, and called with, AVX-512.
                unsafe { backward.items::<__m512>(items, scratch) }
            }
            #[target_feature(enable = "avx2,fma")]
            fn avx2(backward: &Backward, items: &[(usize, usize)], scratch: &mut [f32]) {
                // SAFETY: this function is compiled for, and called with, AVX2 and FMA.
                unsafe { backward.items::<__m256>(items, scratch) }
            }
            match level.isa() {
                // SAFETY: a Level exists only where the processor has its instructions.
                Isa::Avx512 => return unsafe { avx512(self, items, scratch) },
                // SAFETY: as above.
                Isa::Avx2 => return unsafe { avx2(self, items, scratch) },
                Isa::Scalar => {}
            }
        }
        let _ = level;
        // SAFETY: needs no instructions beyond the baseline.
        unsafe { self.items::<super::vector::Plain>(items, scratch) }
    }

    /// Rows of the longest sequence, in whole tiles.
    fn rows_max(&self, items: &[(usize, usize)]) -> usize {
        let longest = items.iter().map(|item| self.sequences[item.0].tokens).max().unwrap_or(0);
        (longest * self.shape.group()).next_multiple_of(TILE)
    }

    fn scratch_len(&self, items: &[(usize, usize)]) -> usize {
        let e = self.shape.head_dim;
        let d = e.next_multiple_of(PAGE);
        let rows = self.rows_max(items);
        3 * taken(rows * d) + 2 * (taken(rows) + taken(e * PAGE) + taken(PAGE * d) + taken(TILE * PAGE))
    }

    /// # Safety
    /// The processor has the instructions of `V`; no other thread does any of `items`; `scratch` is `scratch_len` long.
    #[inline(always)]
    unsafe fn items<V: Vector>(&self, items: &[(usize, usize)], mut scratch: &mut [f32]) {
        let e = self.shape.head_dim;
        let (d, rows) = (e.next_multiple_of(PAGE), self.rows_max(items));
        let rest = &mut scratch;
        let mut work = Work {
            q: take(rest, rows * d),
            d_o: take(rest, rows * d),
            dq: take(rest, rows * d),
            lse: take(rest, rows),
            delta: take(rest, rows),
            keys: take(rest, e * PAGE),
            values: take(rest, e * PAGE),
            dk: take(rest, PAGE * d),
            dv: take(rest, PAGE * d),
            p: take(rest, TILE * PAGE),
            ds: take(rest, TILE * PAGE),
        };
        for &(sequence, kv_head) in items {
            // SAFETY: promised by the caller.
            unsafe { self.gather::<V>(sequence, kv_head, &mut work) };
            for block in 0..self.sequences[sequence].tokens.div_ceil(PAGE) {
                // SAFETY: promised by the caller.
                unsafe { self.block::<V>(sequence, kv_head, block, &mut work) };
            }
            // SAFETY: promised by the caller.
            unsafe { self.scatter::<V>(sequence, kv_head, &work) };
        }
    }

    /// The row of q, in units of head dims, of row r of a sequence.
    #[inline(always)]
    fn at(&self, sequence: usize, kv_head: usize, r: usize) -> usize {
        let group = self.shape.group();
        (self.sequences[sequence].row + r / group) * self.shape.heads + kv_head * group + r % group
    }

    /// Copies the rows of q, d_o and lse, computes delta, and clears dq.
    ///
    /// # Safety
    /// As `items`.
    #[inline(always)]
    unsafe fn gather<V: Vector>(&self, sequence: usize, kv_head: usize, work: &mut Work) {
        const AHEAD: usize = 16;
        let e = self.shape.head_dim;
        let d = e.next_multiple_of(PAGE);
        let rows = self.sequences[sequence].tokens * self.shape.group();
        let [q_rows, d_o_rows] = [&mut work.q[..rows * d], &mut work.d_o[..rows * d]];
        for (r, (q, d_o)) in q_rows.chunks_exact_mut(d).zip(d_o_rows.chunks_exact_mut(d)).enumerate() {
            let at = self.at(sequence, kv_head, r);
            let next = self.at(sequence, kv_head, r + AHEAD) * e;
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
                work.delta[r] = dot::<V>(&self.o[range], d_o);
            }
            work.lse[r] = self.lse[at];
        }
        work.dq[..rows * d].fill(0.0);
    }

    /// # Safety
    /// As `items`.
    #[inline(always)]
    unsafe fn scatter<V: Vector>(&self, sequence: usize, kv_head: usize, work: &Work) {
        let e = self.shape.head_dim;
        let d = e.next_multiple_of(PAGE);
        for r in 0..self.sequences[sequence].tokens * self.shape.group() {
            let at = self.at(sequence, kv_head, r) * e;
            let dq = &work.dq[r * d..r * d + e];
            // SAFETY: the rows of this sequence and key head belong to this thread alone; instructions as promised.
            unsafe { copy::<V>(dq.as_ptr(), self.dq.ptr().add(at), e) };
        }
    }

    /// dk and dv of a key block, and what it adds to dq.
    ///
    /// # Safety
    /// As `items`.
    #[inline(always)]
    unsafe fn block<V: Vector>(&self, sequence: usize, kv_head: usize, block: usize, work: &mut Work) {
        let (g, e, group) = (self.shape.kv_heads, self.shape.head_dim, self.shape.group());
        let d = e.next_multiple_of(PAGE);
        let place = &self.sequences[sequence];
        let count = PAGE.min(place.tokens - block * PAGE);
        let first = ((place.row + block * PAGE) * g + kv_head) * e;
        let rows = first..first + (count - 1) * g * e + e;
        for (from, lanes) in [(self.k, &mut *work.keys), (self.v, &mut *work.values)] {
            // SAFETY: `rows` ends with row `count`, `lanes` holds e x PAGE; instructions as promised.
            unsafe { transpose::<V>(from[rows.clone()].as_ptr(), g * e, count, e, lanes.as_mut_ptr()) };
            for next in (0..PAGE).map(|j| first + (PAGE + j) * g * e) {
                // SAFETY: instructions as promised.
                unsafe { prefetch::<V>(from.as_ptr().wrapping_add(next), e) };
            }
        }
        work.dk.fill(0.0);
        work.dv.fill(0.0);
        let rows = place.tokens * group;
        // The last query that sees the block's last key.
        let end = self.shape.window.map_or(rows, |window| rows.min(((block + 1) * PAGE + window - 1) * group));
        for start in (block * PAGE * group..end).step_by(TILE) {
            let tile = Tile { sequence, kv_head, rows: start..(start + TILE).min(rows) };
            // SAFETY: promised by the caller.
            unsafe { self.tile::<V>(&tile, block, count, work) };
        }
        for j in 0..count {
            let at = first + j * g * e;
            let (dk, dv) = (&work.dk[j * d..j * d + e], &work.dv[j * d..j * d + e]);
            // SAFETY: the keys of this sequence and key head belong to this thread alone; instructions as promised.
            unsafe {
                copy::<V>(dk.as_ptr(), self.dk.ptr().add(at), e);
                copy::<V>(dv.as_ptr(), self.dv.ptr().add(at), e);
            }
        }
    }

    /// # Safety
    /// As `items`.
    #[inline(always)]
    unsafe fn tile<V: Vector>(&self, tile: &Tile, block: usize, count: usize, work: &mut Work) {
        let (g, e) = (self.shape.kv_heads, self.shape.head_dim);
        let d = e.next_multiple_of(PAGE);
        let place = &self.sequences[tile.sequence];
        let rows = tile.rows.len();
        let (_, last) = tile.positions(place, self.shape.group());
        let count = count.min(last + 1 - block * PAGE);
        let (q, d_o) = (work.q[tile.rows.start * d..].as_ptr(), work.d_o[tile.rows.start * d..].as_ptr());
        let keys = self.k[((place.row + block * PAGE) * g + tile.kv_head) * e..].as_ptr();
        let scores = |a, b: &[f32], c: &mut [f32]| Product {
            rows,
            lanes: PAGE,
            k: e,
            a,
            a_stride: d,
            b: b.as_ptr(),
            b_stride: PAGE,
            c: c.as_mut_ptr(),
            c_stride: PAGE,
            start: Start::Zero,
        };
        let over_rows = |a: &[f32], b, c: &mut [f32]| Product {
            rows: count,
            lanes: d,
            k: rows,
            a: a.as_ptr(),
            a_stride: 1,
            b,
            b_stride: d,
            c: c.as_mut_ptr(),
            c_stride: d,
            start: Start::Add,
        };
        // SAFETY: q, d_o, dq hold the tile's rows x d; keys and values e x PAGE; p and ds TILE x PAGE, read by columns in
        // over_rows; dk and dv PAGE x d; the key block in place holds `count` rows of e values g * e apart;
        // instructions as promised.
        unsafe {
            V::product::<1>(&scores(q, work.keys, work.p));
            V::product::<1>(&scores(d_o, work.values, work.ds));
            self.probabilities::<V>(tile, block, work);
            V::product::<PAGE>(&over_rows(work.p, d_o, work.dv));
            V::product::<PAGE>(&over_rows(work.ds, q, work.dk));
            V::product::<1>(&Product {
                rows,
                lanes: e,
                k: count,
                a: work.ds.as_ptr(),
                a_stride: PAGE,
                b: keys,
                b_stride: g * e,
                c: work.dq.as_mut_ptr().add(tile.rows.start * d),
                c_stride: d,
                start: Start::Add,
            });
        }
    }

    /// p = exp(scale s - lse) from p = s; ds = p (ds - delta) scale from ds = d_o.v.
    ///
    /// # Safety
    /// As `items`.
    #[inline(always)]
    unsafe fn probabilities<V: Vector>(&self, tile: &Tile, block: usize, work: &mut Work) {
        let group = self.shape.group();
        let (first, last) = tile.positions(&self.sequences[tile.sequence], group);
        let all = visible_bits(self.shape, first, block) & visible_bits(self.shape, last, block) == u32::MAX;
        // SAFETY: instructions as promised; p and ds hold TILE x PAGE, lse and delta the tile's rows.
        unsafe {
            let (scale, zero) = (V::splat(self.shape.scale), V::splat(0.0));
            for (r, row) in tile.rows.clone().enumerate() {
                let bits = if all { u32::MAX } else { visible_bits(self.shape, row / group, block) };
                let (lse, delta) = (V::splat(-work.lse[row]), V::splat(work.delta[row]));
                for lane in (0..PAGE).step_by(V::LANES) {
                    let p_at = work.p.as_mut_ptr().add(r * PAGE + lane);
                    let ds_at = work.ds.as_mut_ptr().add(r * PAGE + lane);
                    let mut p = V::load(p_at).fma(scale, lse).exp();
                    if !all {
                        p = p.keep(bits >> lane, zero);
                    }
                    p.store(p_at);
                    V::load(ds_at).sub(delta).mul(p).mul(scale).store(ds_at);
                }
            }
        }
    }
}

/// a.b, in sixteen lanes modulo PAGE / 2, each one chain, folded by halves.
///
/// # Safety
/// The processor has the instructions of `V`; `b` holds a.len() values, rounded up to whole vectors.
#[inline(always)]
unsafe fn dot<V: Vector>(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = PAGE / 2;
    // SAFETY: offsets lie below a.len(), those of b below whole vectors.
    unsafe {
        let mut sums = [V::splat(0.0); LANES / 8];
        let count = LANES / V::LANES;
        for at in (0..a.len()).step_by(V::LANES) {
            let sum = &mut sums[at / V::LANES % count];
            *sum = V::load_part(a.as_ptr().add(at), a.len() - at).fma(V::load(b.as_ptr().add(at)), *sum);
        }
        if count == 2 { sums[0].add(sums[1]).reduce_add() } else { sums[0].reduce_add() }
    }
}
