//! One tile of a GEMM: up to 8 rows times one panel of 32 lanes (or up to 4 rows times two panels).
//!
//! c[i][j] = chain over s ascending of acc = fma(a[i][s], b[s][j], acc), from 0 or from c. Neither the tile's shape nor
//! the instruction level enters the arithmetic, and a chain may be cut anywhere: c holds the f32 accumulator exactly.
//!
//! A step is one 32-bit word of `a` and of each lane of `b`: an f32, or a pair of bf16 (even index in the low half). A
//! pair is two fused multiply-adds, odd first, then even, as in `vdpbf16ps`. Only that instruction also flushes
//! denormals, so levels may differ there, and nowhere else.
//!
//! AVX-512 computes a tile at once (8 rows x 32 lanes in 16 registers, or 4 x 64). Narrower registers compute parts.

use super::vector::{Kernel, Vector, run_in};
use crate::device::simd::{Isa, Level, leveled};

/// Lanes of a panel.
pub const LANES: usize = 32;
/// Rows of a tile over one panel.
pub const ROWS: usize = 8;
/// Rows of a tile over two panels.
pub const ROWS_PAIR: usize = 4;
/// Words to prefetch in a panel that is read once, by one and by two panels at a time (measured).
const AHEAD: usize = 2048;
const AHEAD_PAIR: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    F32,
    Bf16,
}

/// The words that a tile prefetches.
#[derive(Clone, Copy, Debug)]
pub enum Prefetch {
    /// The panel itself: it is read only once.
    Stream,
    /// Another block that comes next: `step` words further with every step.
    Next { from: *const u32, step: usize },
}

#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// The number of rows: 1 to ROWS; 1 to ROWS_PAIR with `pair`.
    pub rows: usize,
    /// Whether there are two panels at once, `b_panel` words apart (only with `Stream` and without `packed`).
    pub pair: bool,
    pub steps: usize,
    /// Word (i, s) is at i * a_row + s, or with `packed` at i + ROWS * s.
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
    /// Whether chains start from 0 instead of from c.
    pub fresh: bool,
    pub prefetch: Prefetch,
}

/// Computes one tile.
///
/// # Safety
/// All words and values that the tile's fields describe are in bounds, c for writing and by this thread alone.
pub unsafe fn run(level: Level, arithmetic: Arithmetic, tile: &Tile) {
    // SAFETY: promised by the caller.
    unsafe {
        match arithmetic {
            Arithmetic::F32 => by_level::<F32>(level, tile),
            Arithmetic::Bf16 if level.bf16_dot() => by_level::<DOT>(level, tile),
            Arithmetic::Bf16 => by_level::<PAIR>(level, tile),
        }
    }
}

/// The kinds of a step: one multiply-add of f32, two of bf16, or the instruction for two of bf16.
const F32: u8 = 0;
const PAIR: u8 = 1;
const DOT: u8 = 2;

/// Picks the kernel of the row count.
macro_rules! by_rows {
    ($level:ident, $part:ident, $step:ident, $nv:literal, $packed:literal, $stream:literal: $($rows:literal)*) => {
        match $part.rows {
            $($rows => start($level, &Shape::<$step, $rows, $nv, $packed, $stream>($part)),)*
            rows => unreachable!("a tile of {rows} rows over {} vectors", $nv),
        }
    };
}

/// # Safety
/// Same as `run`.
#[inline(always)]
unsafe fn by_level<const STEP: u8>(level: Level, tile: &Tile) {
    // SAFETY: promised by the caller.
    unsafe {
        match level.isa() {
            Isa::Avx512 => by_shape::<STEP>(level, Part { tile, row: 0, rows: tile.rows, lane: 0 }, tile.pair),
            Isa::Avx2 => in_parts::<STEP>(level, tile, 4, 16),
            Isa::Scalar => in_parts::<STEP>(level, tile, 4, 2),
        }
    }
}

/// Computes as many sums at once as there are registers for.
///
/// # Safety
/// Same as `run`.
#[inline(never)]
unsafe fn in_parts<const STEP: u8>(level: Level, tile: &Tile, rows_max: usize, lanes: usize) {
    for lane in (0..tile.columns).step_by(lanes) {
        for row in (0..tile.rows).step_by(rows_max) {
            let part = Part { tile, row, rows: (tile.rows - row).min(rows_max), lane };
            // SAFETY: promised by the caller.
            unsafe { by_shape::<STEP>(level, part, false) };
        }
    }
}

/// # Safety
/// Same as `run`, for a part that the level has registers for.
#[inline(always)]
unsafe fn by_shape<const STEP: u8>(level: Level, part: Part, pair: bool) {
    // SAFETY: promised by the caller.
    unsafe {
        match (part.tile.packed, part.tile.prefetch) {
            _ if pair => by_rows!(level, part, STEP, 4, false, true: 1 2 3 4),
            (true, _) => by_rows!(level, part, STEP, 2, true, false: 1 2 3 4 5 6 7 8),
            (_, Prefetch::Stream) => by_rows!(level, part, STEP, 2, false, true: 1 2 3 4 5 6 7 8),
            (_, Prefetch::Next { .. }) => by_rows!(level, part, STEP, 2, false, false: 1 2 3 4 5 6 7 8),
        }
    }
}

/// Rows of a tile from `row` on, and as many lanes from `lane` on as fill some vectors.
#[derive(Clone, Copy)]
struct Part<'a> {
    tile: &'a Tile,
    row: usize,
    rows: usize,
    lane: usize,
}

/// MR rows of NV vectors; PACKED: rows of `a` interleave; STREAM: `Prefetch::Stream`.
struct Shape<'a, const STEP: u8, const MR: usize, const NV: usize, const PACKED: bool, const STREAM: bool>(Part<'a>);

impl<const STEP: u8, const MR: usize, const NV: usize, const PACKED: bool, const STREAM: bool> Kernel
    for Shape<'_, STEP, MR, NV, PACKED, STREAM>
{
    #[inline(always)]
    unsafe fn work<V: Vector>(&self, _: &mut [f32]) {
        assert!(V::LANES == 16 || MR <= 4 && NV == 2 && STEP != DOT, "more sums than registers");
        let Part { tile: t, row, lane, .. } = self.0;
        // Wide registers take a tile at once.
        let (row, lane) = if V::LANES == 16 { (0, 0) } else { (row, lane) };
        let (mut next, next_step) = match t.prefetch {
            Prefetch::Next { from, step } => (from, step),
            Prefetch::Stream => (t.b, 0),
        };
        let (row_step, step) = if PACKED { (1, ROWS) } else { (t.a_row, 1) };
        let left = t.columns - lane;
        // SAFETY: the bounds are promised to `microkernel::run`; masks keep off columns that are not ours, and
        // prefetches may point anywhere.
        unsafe {
            let a = t.a.add(row * row_step);
            let c = t.c.add(row * t.c_row + lane);
            let mut b = [t.b; NV];
            for (j, b) in b.iter_mut().enumerate() {
                let lane = lane + j * V::LANES;
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
                            // Prefetches the words of the next tile, which follow.
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
                    V::prefetch_far(next.cast());
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

/// # Safety
/// Same as `run`, for a step and a shape of the level.
#[inline(always)]
unsafe fn start<const STEP: u8, const MR: usize, const NV: usize, const PACKED: bool, const STREAM: bool>(
    level: Level,
    shape: &Shape<'_, STEP, MR, NV, PACKED, STREAM>,
) {
    #[cfg(target_arch = "x86_64")]
    if STEP == DOT {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
        fn dot(shape: &impl Kernel) {
            // SAFETY: this function is compiled for, and called with, AVX512-BF16; bounds are promised to `run`.
            unsafe { shape.work::<std::arch::x86_64::__m512>(&mut []) }
        }
        // SAFETY: this kind of step exists only if the processor has AVX512-BF16.
        return unsafe { dot(shape) };
    }
    run_in(level, shape, &mut []);
}

/// sum + x w
///
/// # Safety
/// Same as `Vector`.
#[inline(always)]
unsafe fn added<V: Vector, const STEP: u8>(sum: V, x: u32, w: V) -> V {
    // SAFETY: promised by the caller.
    unsafe {
        match STEP {
            F32 => V::splat(f32::from_bits(x)).fma(w, sum),
            DOT => sum.add_pairs(V::splat(f32::from_bits(x)), w),
            _ => {
                // The pair is split in the vector unit: scalar shifts would move both halves there one by one.
                let x = V::splat(f32::from_bits(x));
                x.even().fma(w.even(), x.odd().fma(w.odd(), sum))
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
