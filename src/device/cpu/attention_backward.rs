//! Backward attention of one sequence under one key head: key blocks ascending, and for each the query tiles that see
//! it, ascending; probabilities are recomputed from the log-sum-exp (arXiv:2205.14135, algorithm 4).
//!
//! Dims as in `attention_forward`; d = e rounded up to whole blocks of lanes. Every dq[r], dk[j], dv[j] is one chain of
//! multiply-adds, ascending j or ascending r.

use super::attention::{AttentionShape, PAGE};
use super::attention_forward::{Sequence, TILE, Tile, transpose, visible_bits};
use super::pool::Shares;
use super::scratch::{take, with_scratch};
use super::vector::{Product, Start, Vector};
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
        self.rows_max(items) * (3 * d + 2) + 2 * PAGE * (e + d) + 2 * TILE * PAGE
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
            self.gather(sequence, kv_head, &mut work);
            for block in 0..self.sequences[sequence].tokens.div_ceil(PAGE) {
                // SAFETY: promised by the caller.
                unsafe { self.block::<V>(sequence, kv_head, block, &mut work) };
            }
            self.scatter(sequence, kv_head, &work);
        }
    }

    /// The row of q, in units of head dims, of row r of a sequence.
    #[inline(always)]
    fn at(&self, sequence: usize, kv_head: usize, r: usize) -> usize {
        let group = self.shape.group();
        (self.sequences[sequence].row + r / group) * self.shape.heads + kv_head * group + r % group
    }

    /// Copies the rows of q, d_o and lse, computes delta, and clears dq.
    #[inline(always)]
    fn gather(&self, sequence: usize, kv_head: usize, work: &mut Work) {
        let e = self.shape.head_dim;
        let d = e.next_multiple_of(PAGE);
        let rows = self.sequences[sequence].tokens * self.shape.group();
        for r in 0..rows {
            let at = self.at(sequence, kv_head, r);
            let (o, d_o) = (&self.o[at * e..(at + 1) * e], &self.d_o[at * e..(at + 1) * e]);
            let rest = work.q[r * d..(r + 1) * d].split_at_mut(e);
            rest.0.copy_from_slice(&self.q[at * e..(at + 1) * e]);
            rest.1.fill(0.0);
            let rest = work.d_o[r * d..(r + 1) * d].split_at_mut(e);
            rest.0.copy_from_slice(d_o);
            rest.1.fill(0.0);
            let mut sums = [0.0f32; 16];
            for (o, d_o) in o.chunks(16).zip(d_o.chunks(16)) {
                for ((sum, o), d_o) in sums.iter_mut().zip(o).zip(d_o) {
                    *sum = o.mul_add(*d_o, *sum);
                }
            }
            for half in [8, 4, 2, 1] {
                for i in 0..half {
                    sums[i] += sums[i + half];
                }
            }
            work.delta[r] = sums[0];
            work.lse[r] = self.lse[at];
        }
        work.dq[..rows * d].fill(0.0);
    }

    #[inline(always)]
    fn scatter(&self, sequence: usize, kv_head: usize, work: &Work) {
        let e = self.shape.head_dim;
        for (r, dq) in work.dq.chunks_exact(e.next_multiple_of(PAGE)).enumerate() {
            if r == self.sequences[sequence].tokens * self.shape.group() {
                break;
            }
            let at = self.at(sequence, kv_head, r);
            // SAFETY: the rows of this sequence and key head belong to this thread alone.
            unsafe { self.dq.slice(at * e..(at + 1) * e) }.copy_from_slice(&dq[..e]);
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
        transpose(&self.k[first..], g * e, count, e, work.keys);
        transpose(&self.v[first..], g * e, count, e, work.values);
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
            // SAFETY: the keys of this sequence and key head belong to this thread alone.
            let (dk, dv) = unsafe { (self.dk.slice(at..at + e), self.dv.slice(at..at + e)) };
            dk.copy_from_slice(&work.dk[j * d..j * d + e]);
            dv.copy_from_slice(&work.dv[j * d..j * d + e]);
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
