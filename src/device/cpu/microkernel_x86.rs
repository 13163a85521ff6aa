//! Tiles in AVX-512 (8 rows x 32 lanes in 16 registers, or 4 x 64) and AVX2 (4 rows x 16 lanes in 8 registers).

use super::tile::{Arithmetic, LANES, Prefetch, ROWS, Tile};
use crate::device::simd::Level;
#[allow(clippy::wildcard_imports, reason = "the names of intrinsics stand for themselves")]
use std::arch::x86_64::*;

/// Words to read ahead in a panel that is walked once, by one and by two panels at a time (measured).
const AHEAD: usize = 2048;
const AHEAD_PAIR: usize = 512;

#[inline]
fn lane_mask(columns: usize, vector: usize) -> u16 {
    let left = columns.saturating_sub(16 * vector);
    if left >= 16 { u16::MAX } else { (1u16 << left) - 1 }
}

macro_rules! avx512_tile {
    ($name:ident, $features:literal, |$acc:ident, $x:ident, $w:ident| $step:expr) => {
        /// MR rows of NV vectors; PACKED: rows of `a` interleave; STREAM: `Prefetch::Stream`.
        #[target_feature(enable = $features)]
        unsafe fn $name<const MR: usize, const NV: usize, const PACKED: bool, const STREAM: bool>(t: &Tile) {
            let (mut next, next_step) = match t.prefetch {
                Prefetch::Next { from, step } => (from, step),
                Prefetch::Stream => (t.b, 0),
            };
            let mut acc = [[_mm512_setzero_ps(); NV]; MR];
            // SAFETY: the bounds are promised to `microkernel::run`; masks keep off columns that are not ours, and
            // prefetches may point anywhere.
            unsafe {
                for i in 0..MR {
                    for j in 0..NV {
                        let c = t.c.wrapping_add(i * t.c_row + 16 * j);
                        if t.fresh {
                            _mm_prefetch(c.cast(), _MM_HINT_T0);
                        } else {
                            acc[i][j] = _mm512_maskz_loadu_ps(lane_mask(t.columns, j), c);
                            if PACKED {
                                // The next tile's, right behind.
                                _mm_prefetch(c.wrapping_add(MR * LANES).cast(), _MM_HINT_T0);
                            }
                        }
                    }
                }
                for s in 0..t.steps {
                    let mut w = [_mm512_setzero_si512(); NV];
                    for j in 0..NV {
                        let b = t.b.add(s * LANES + (j / 2) * t.b_panel + (j % 2) * 16);
                        w[j] = _mm512_loadu_si512(b.cast());
                        if STREAM {
                            let ahead = if NV == 4 { AHEAD_PAIR } else { AHEAD };
                            _mm_prefetch(b.wrapping_add(ahead).cast(), _MM_HINT_T0);
                        }
                    }
                    if !STREAM {
                        _mm_prefetch(next.cast(), _MM_HINT_T0);
                        next = next.wrapping_add(next_step);
                    }
                    for i in 0..MR {
                        let $x = if PACKED { *t.a.add(i + ROWS * s) } else { *t.a.add(i * t.a_row + s) };
                        for j in 0..NV {
                            let ($acc, $w) = (acc[i][j], w[j]);
                            acc[i][j] = $step;
                        }
                    }
                }
                // Masked stores are several times slower than whole ones.
                let whole = t.columns == 16 * NV;
                for i in 0..MR {
                    for j in 0..NV {
                        let c = t.c.wrapping_add(i * t.c_row + 16 * j);
                        if whole {
                            _mm512_storeu_ps(c, acc[i][j]);
                        } else {
                            _mm512_mask_storeu_ps(c, lane_mask(t.columns, j), acc[i][j]);
                        }
                    }
                }
            }
        }
    };
}

avx512_tile!(f32_512, "avx512f", |acc, x, w| _mm512_fmadd_ps(
    _mm512_set1_ps(f32::from_bits(x)),
    _mm512_castsi512_ps(w),
    acc
));
avx512_tile!(dot_512, "avx512f,avx512bf16", |acc, x, w| _mm512_dpbf16_ps(
    acc,
    std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(x as i32)),
    std::mem::transmute::<__m512i, __m512bh>(w)
));
avx512_tile!(wide_512, "avx512f", |acc, x, w| {
    let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let odd = _mm512_castsi512_ps(_mm512_and_si512(w, high));
    let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(w));
    let acc = _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(x & 0xffff_0000)), odd, acc);
    _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(x << 16)), even, acc)
});

/// Picks the kernel of the tile's row count.
macro_rules! by_rows {
    ($tile:expr, $name:ident, $nv:literal, $packed:literal, $stream:literal: $($rows:literal)*) => {
        match $tile.rows {
            $($rows => $name::<$rows, $nv, $packed, $stream>($tile),)*
            rows => unreachable!("a tile of {rows} rows over {} vectors", $nv),
        }
    };
}

macro_rules! by_shape {
    ($tile:expr, $name:ident) => {
        match ($tile.pair, $tile.packed, $tile.prefetch) {
            (true, ..) => by_rows!($tile, $name, 4, false, true: 1 2 3 4),
            (false, true, _) => by_rows!($tile, $name, 2, true, false: 1 2 3 4 5 6 7 8),
            (false, false, Prefetch::Stream) => by_rows!($tile, $name, 2, false, true: 1 2 3 4 5 6 7 8),
            (false, false, Prefetch::Next { .. }) => by_rows!($tile, $name, 2, false, false: 1 2 3 4 5 6 7 8),
        }
    };
}

/// # Safety
/// As `microkernel::run`; the processor has AVX-512, and AVX512-BF16 where the level says so.
pub unsafe fn avx512(level: Level, arithmetic: Arithmetic, tile: &Tile) {
    // SAFETY: promised by the caller.
    unsafe {
        match arithmetic {
            Arithmetic::F32 => by_shape!(tile, f32_512),
            Arithmetic::Bf16 if level.bf16_dot() => by_shape!(tile, dot_512),
            Arithmetic::Bf16 => by_shape!(tile, wide_512),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn f32_256(acc: __m256, x: u32, w: __m256i) -> __m256 {
    _mm256_fmadd_ps(_mm256_set1_ps(f32::from_bits(x)), _mm256_castsi256_ps(w), acc)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn wide_256(acc: __m256, x: u32, w: __m256i) -> __m256 {
    let odd = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(0xffff_0000_u32 as i32)));
    let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w));
    let acc = _mm256_fmadd_ps(_mm256_set1_ps(f32::from_bits(x & 0xffff_0000)), odd, acc);
    _mm256_fmadd_ps(_mm256_set1_ps(f32::from_bits(x << 16)), even, acc)
}

/// MR rows of 16 lanes: `a` and `c` point at the first row, `b` and `c` at the first lane; `columns` of ours are valid.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile_256<const MR: usize, const BF16: bool>(
    t: &Tile,
    a: *const u32,
    b: *const u32,
    c: *mut f32,
    columns: usize,
) {
    let (row_step, step) = if t.packed { (1, ROWS) } else { (t.a_row, 1) };
    let mut acc = [[_mm256_setzero_ps(); 2]; MR];
    // SAFETY: the bounds are promised to `microkernel::run`; masks keep off columns that are not ours.
    unsafe {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let mask = |j: i32| _mm256_cmpgt_epi32(_mm256_set1_epi32(columns as i32 - 8 * j), lanes);
        let masks = [mask(0), mask(1)];
        if !t.fresh {
            for (i, acc) in acc.iter_mut().enumerate() {
                for j in 0..2 {
                    acc[j] = _mm256_maskload_ps(c.wrapping_add(i * t.c_row + 8 * j), masks[j]);
                }
            }
        }
        for s in 0..t.steps {
            let w = b.add(s * LANES);
            let w = [_mm256_loadu_si256(w.cast()), _mm256_loadu_si256(w.add(8).cast())];
            for (i, acc) in acc.iter_mut().enumerate() {
                let x = *a.add(i * row_step + s * step);
                for j in 0..2 {
                    acc[j] = if BF16 { wide_256(acc[j], x, w[j]) } else { f32_256(acc[j], x, w[j]) };
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            for j in 0..2 {
                _mm256_maskstore_ps(c.wrapping_add(i * t.c_row + 8 * j), masks[j], acc[j]);
            }
        }
    }
}

/// # Safety
/// As `microkernel::run`; the processor has AVX2 and FMA.
pub unsafe fn avx2(arithmetic: Arithmetic, t: &Tile) {
    let row_step = if t.packed { 1 } else { t.a_row };
    for lane in (0..t.columns).step_by(16) {
        let columns = (t.columns - lane).min(16);
        for row in (0..t.rows).step_by(4) {
            // SAFETY: promised by the caller.
            unsafe {
                let a = t.a.add(row * row_step);
                let b = t.b.add(lane / LANES * t.b_panel + lane % LANES);
                let c = t.c.add(row * t.c_row + lane);
                match ((t.rows - row).min(4), arithmetic) {
                    (1, Arithmetic::F32) => tile_256::<1, false>(t, a, b, c, columns),
                    (2, Arithmetic::F32) => tile_256::<2, false>(t, a, b, c, columns),
                    (3, Arithmetic::F32) => tile_256::<3, false>(t, a, b, c, columns),
                    (_, Arithmetic::F32) => tile_256::<4, false>(t, a, b, c, columns),
                    (1, Arithmetic::Bf16) => tile_256::<1, true>(t, a, b, c, columns),
                    (2, Arithmetic::Bf16) => tile_256::<2, true>(t, a, b, c, columns),
                    (3, Arithmetic::Bf16) => tile_256::<3, true>(t, a, b, c, columns),
                    (_, Arithmetic::Bf16) => tile_256::<4, true>(t, a, b, c, columns),
                }
            }
        }
    }
}
