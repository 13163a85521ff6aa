//! One tile of a product: up to 8 rows times one panel of 32 lanes (or up to 4 rows times two panels).
//!
//! c[i][j] = chain over s ascending of acc = fma(a[i][s], b[s][j], acc), from 0 or from c. Neither the tile's shape nor
//! the instruction level enters the arithmetic, and a chain may be cut anywhere: c holds the f32 accumulator exactly.
//!
//! A step is one 32-bit word of `a` and of each lane of `b`: an f32, or a pair of bf16 (even index in the low half). A
//! pair is two fused multiply-adds, odd first, then even, as `vdpbf16ps` does; that instruction also flushes
//! denormals, the others do not, and in this alone the levels may differ.
//!
//! AVX-512 does a tile at once (8 rows x 32 lanes in 16 registers, or 4 x 64), narrower registers in parts.

use super::vector::{Kernel, Vector, run_in};
use crate::device::simd::{Level, leveled};

/// Lanes of a panel.
pub const LANES: usize = 32;
/// Rows of a tile over one panel.
pub const ROWS: usize = 8;
/// Rows of a tile over two panels.
pub const ROWS_PAIR: usize = 4;
/// Words to read ahead in a panel that is walked once, by one and by two panels at a time (measured).
const AHEAD: usize = 2048;
const AHEAD_PAIR: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    F32,
    Bf16,
}

/// How a tile reads ahead.
#[derive(Clone, Copy, Debug)]
pub enum Prefetch {
    /// The panel itself: nobody else will walk it again.
    Stream,
    /// Another block that comes next: `step` words further with every step.
    Next { from: *const u32, step: usize },
}

#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// 1 to ROWS; 1 to ROWS_PAIR where `pair`.
    pub rows: usize,
    /// Two panels at once, `b_panel` words apart (only with `Stream` and without `packed`).
    pub pair: bool,
    pub steps: usize,
    /// Word (i, s) is at i * a_row + s; where `packed`, at i + ROWS * s.
    pub a: *const u32,
    pub a_row: usize,
    pub packed: bool,
    /// Word (s, j) of a panel is at LANES * s + j.
    pub b: *const u32,
    pub b_panel: usize,
    /// Value (i, j) is at i * c_row + j. Only columns below `columns` are read or written.
    pub c: *mut f32,
    pub c_row: usize,
    pub columns: usize,
    /// Start from 0 rather than from c.
    pub fresh: bool,
    pub prefetch: Prefetch,
}

/// Computes one tile.
///
/// # Safety
/// All words and values that the tile's fields describe are in bounds, c for writing and by this thread alone.
pub unsafe fn run(level: Level, arithmetic: Arithmetic, tile: &Tile) {
    match arithmetic {
        Arithmetic::F32 => run_in(level, &Steps::<F32>(tile), &mut []),
        #[cfg(target_arch = "x86_64")]
        Arithmetic::Bf16 if level.bf16_dot() => {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
            fn dot(tile: &Tile) {
                // SAFETY: this function is compiled for, and called with, AVX512-BF16; bounds are promised to `run`.
                unsafe { Steps::<DOT>(tile).work::<std::arch::x86_64::__m512>(&mut []) }
            }
            // SAFETY: the level says that the processor has AVX512-BF16.
            unsafe { dot(tile) }
        }
        Arithmetic::Bf16 => run_in(level, &Steps::<PAIR>(tile), &mut []),
    }
}

/// A step: one multiply-add of f32, two of bf16, or the instruction for those.
const F32: u8 = 0;
const PAIR: u8 = 1;
const DOT: u8 = 2;

struct Steps<'a, const STEP: u8>(&'a Tile);

/// Picks the kernel of the row count.
macro_rules! by_rows {
    ($part:expr, $v:ident, $step:ident, $nv:literal, $packed:literal, $stream:literal: $($rows:literal)*) => {
        match $part.rows {
            $($rows => $part.run::<$v, $step, $rows, $nv, $packed, $stream>(),)*
            rows => unreachable!("a tile of {rows} rows over {} vectors", $nv),
        }
    };
}

impl<const STEP: u8> Kernel for Steps<'_, STEP> {
    #[inline(always)]
    unsafe fn work<V: Vector>(&self, _: &mut [f32]) {
        let tile = self.0;
        // As many sums as there are registers for.
        let (rows_max, vectors) = if V::LANES == 16 { (ROWS, if tile.pair { 4 } else { 2 }) } else { (4, 2) };
        for lane in (0..tile.columns).step_by(vectors * V::LANES) {
            for row in (0..tile.rows).step_by(rows_max) {
                let part = Part { tile, row, rows: (tile.rows - row).min(rows_max), lane };
                // SAFETY: promised to `microkernel::run`; instructions as promised.
                unsafe {
                    match (tile.packed, tile.prefetch) {
                        _ if vectors == 4 => by_rows!(part, V, STEP, 4, false, true: 1 2 3 4),
                        (true, _) => by_rows!(part, V, STEP, 2, true, false: 1 2 3 4 5 6 7 8),
                        (_, Prefetch::Stream) => by_rows!(part, V, STEP, 2, false, true: 1 2 3 4 5 6 7 8),
                        (_, Prefetch::Next { .. }) => by_rows!(part, V, STEP, 2, false, false: 1 2 3 4 5 6 7 8),
                    }
                }
            }
        }
    }
}

/// Rows of a tile from `row` on, and as many lanes from `lane` on as fill some vectors.
struct Part<'a> {
    tile: &'a Tile,
    row: usize,
    rows: usize,
    lane: usize,
}

impl Part<'_> {
    /// MR rows of NV vectors; PACKED: rows of `a` interleave; STREAM: `Prefetch::Stream`.
    ///
    /// # Safety
    /// As `microkernel::run`, and the processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn run<
        V: Vector,
        const STEP: u8,
        const MR: usize,
        const NV: usize,
        const PACKED: bool,
        const STREAM: bool,
    >(
        &self,
    ) {
        let t = self.tile;
        let (mut next, next_step) = match t.prefetch {
            Prefetch::Next { from, step } => (from, step),
            Prefetch::Stream => (t.b, 0),
        };
        let (row_step, step) = if PACKED { (1, ROWS) } else { (t.a_row, 1) };
        let left = t.columns - self.lane;
        // SAFETY: the bounds are promised to `microkernel::run`; masks keep off columns that are not ours, and
        // prefetches may point anywhere.
        unsafe {
            let a = t.a.add(self.row * row_step);
            let c = t.c.add(self.row * t.c_row + self.lane);
            let mut b = [t.b; NV];
            for (j, b) in b.iter_mut().enumerate() {
                let lane = self.lane + j * V::LANES;
                *b = b.wrapping_add(lane / LANES * t.b_panel + lane % LANES);
            }
            let mut acc = [[V::splat(0.0); NV]; MR];
            for (i, acc) in acc.iter_mut().enumerate() {
                for (j, acc) in acc.iter_mut().enumerate() {
                    let c = c.wrapping_add(i * t.c_row + j * V::LANES);
                    if t.fresh {
                        V::prefetch(c);
                    } else {
                        *acc = V::load_part(c, left.saturating_sub(j * V::LANES));
                        if PACKED {
                            // The next tile's, right behind.
                            V::prefetch(c.wrapping_add(MR * LANES));
                        }
                    }
                }
            }
            for s in 0..t.steps {
                let mut w = [V::splat(0.0); NV];
                for (w, b) in w.iter_mut().zip(b) {
                    let b = b.add(s * LANES).cast();
                    *w = V::load(b);
                    if STREAM {
                        V::prefetch(b.wrapping_add(if NV == 4 { AHEAD_PAIR } else { AHEAD }));
                    }
                }
                if !STREAM {
                    V::prefetch(next.cast());
                    next = next.wrapping_add(next_step);
                }
                for (i, acc) in acc.iter_mut().enumerate() {
                    let x = *a.add(i * row_step + s * step);
                    for (acc, w) in acc.iter_mut().zip(w) {
                        *acc = added::<V, STEP>(*acc, x, w);
                    }
                }
            }
            // Masked stores are several times slower than whole ones.
            let whole = left >= NV * V::LANES;
            for (i, acc) in acc.iter().enumerate() {
                for (j, acc) in acc.iter().enumerate() {
                    let c = c.wrapping_add(i * t.c_row + j * V::LANES);
                    if whole { acc.store(c) } else { acc.store_part(c, left.saturating_sub(j * V::LANES)) }
                }
            }
        }
    }
}

/// sum + x w
///
/// # Safety
/// As `Vector`.
#[inline(always)]
unsafe fn added<V: Vector, const STEP: u8>(sum: V, x: u32, w: V) -> V {
    // SAFETY: promised by the caller.
    unsafe {
        match STEP {
            F32 => V::splat(f32::from_bits(x)).fma(w, sum),
            DOT => sum.add_pairs(V::splat(f32::from_bits(x)), w),
            _ => {
                let sum = V::splat(f32::from_bits(x & 0xffff_0000)).fma(w.odd(), sum);
                V::splat(f32::from_bits(x << 16)).fma(w.even(), sum)
            }
        }
    }
}

leveled! {
    /// The end of a row of a tile: value = chain + bias; y = value or y + value.
    pub fn finish_row(chain: &[f32], bias: Option<&[f32]>, y: &mut [f32], add: bool) {
        for (j, (y, &chain)) in y.iter_mut().zip(chain).enumerate() {
            let value = chain + bias.map_or(0.0, |b| b[j]);
            *y = if add { *y + value } else { value };
        }
    }
}
