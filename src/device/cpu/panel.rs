//! Rearranging operands for the tiles: bf16 pairs, interleaved rows, panels, and the transpose of panels.

use super::microkernel::{Arithmetic, LANES, ROWS};
use crate::device::simd::{Isa, Level, leveled};
use std::ops::Range;

/// The nearest bf16 (ties to even) in the upper half of the word; NaN stays NaN.
#[inline(always)]
fn round_high(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    if x.is_nan() { (bits | 0x0040_0000) & 0xffff_0000 } else { rounded }
}

/// Two bf16 in a word, `even` in the low half.
#[inline(always)]
fn pair(even: f32, odd: f32) -> u32 {
    round_high(even) >> 16 | round_high(odd)
}

leveled! {
    fn row_to_words(x: &[f32], words: &mut [u32]) {
        let (pairs, last) = x.as_chunks::<2>();
        for (word, x) in words.iter_mut().zip(pairs) {
            *word = pair(x[0], x[1]);
        }
        if let [x] = last {
            words[pairs.len()] = pair(*x, 0.0);
        }
    }
}

/// x rounded to bf16, neighbors paired; an odd end is paired with 0.
pub fn to_words(level: Level, x: &[f32], words: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if level.bf16_dot() {
        use std::arch::x86_64::{__m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_storeu_si512};
        #[target_feature(enable = "avx512f,avx512bf16")]
        fn blocks(x: &[[f32; 32]], words: &mut [[u32; 16]]) {
            for (x, words) in x.iter().zip(words) {
                // SAFETY: 32 floats are read, 16 words written.
                unsafe {
                    let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16)));
                    let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                    _mm512_storeu_si512(words.as_mut_ptr().cast(), both);
                }
            }
        }
        let (head, tail) = x.as_chunks::<32>();
        let (head_words, tail_words) = words.split_at_mut(16 * head.len());
        // SAFETY: the level says that the processor has AVX512-BF16.
        unsafe { blocks(head, head_words.as_chunks_mut().0) };
        return row_to_words(level, tail, tail_words);
    }
    row_to_words(level, x, words);
}

leveled! {
    fn pair_rows_anywhere(even: &[f32], odd: &[f32], words: &mut [u32]) {
        for ((word, &even), &odd) in words.iter_mut().zip(even).zip(odd) {
            *word = pair(even, odd);
        }
    }
}

/// Two rows of floats as one row of words.
fn pair_rows(level: Level, even: &[f32], odd: &[f32], words: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if level.bf16_dot() {
        use std::arch::x86_64::{
            __m256bh, __m256i, _mm512_cvtepu16_epi32, _mm512_cvtneps_pbh, _mm512_loadu_ps, _mm512_or_si512,
            _mm512_slli_epi32, _mm512_storeu_si512,
        };
        #[target_feature(enable = "avx512f,avx512bf16")]
        fn blocks(even: &[[f32; 16]], odd: &[[f32; 16]], words: &mut [[u32; 16]]) {
            for ((even, odd), words) in even.iter().zip(odd).zip(words) {
                // SAFETY: 16 floats of each are read, 16 words written; both casts keep 32 bytes of bits.
                unsafe {
                    let even = _mm512_cvtneps_pbh(_mm512_loadu_ps(even.as_ptr()));
                    let odd = _mm512_cvtneps_pbh(_mm512_loadu_ps(odd.as_ptr()));
                    let even = _mm512_cvtepu16_epi32(std::mem::transmute::<__m256bh, __m256i>(even));
                    let odd = _mm512_cvtepu16_epi32(std::mem::transmute::<__m256bh, __m256i>(odd));
                    let both = _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd));
                    _mm512_storeu_si512(words.as_mut_ptr().cast(), both);
                }
            }
        }
        let ((even, even_tail), (odd, odd_tail)) = (even.as_chunks(), odd.as_chunks());
        let (head, tail) = words.split_at_mut(16 * even.len());
        // SAFETY: the level says that the processor has AVX512-BF16.
        unsafe { blocks(even, odd, head.as_chunks_mut().0) };
        return pair_rows_anywhere(level, even_tail, odd_tail, tail);
    }
    pair_rows_anywhere(level, even, odd, words);
}

/// The maximum number of columns for `interleave`.
pub const COLUMNS_MAX: usize = 512;

/// Step `step` of columns `columns` of x (m, k): the values of that row, or rows 2 `step` and 2 `step` + 1 rounded and
/// paired in `line`, a missing last row as zeros.
#[inline]
fn words_at<'a>(
    level: Level,
    arithmetic: Arithmetic,
    x: &'a [f32],
    k: usize,
    step: usize,
    columns: &Range<usize>,
    line: &'a mut [u32],
) -> &'a [u32] {
    let row = |r: usize| x.get(r * k + columns.start..r * k + columns.end);
    match arithmetic {
        Arithmetic::F32 => bytemuck::cast_slice(row(step).expect("the row of a step exists")),
        Arithmetic::Bf16 => {
            let (even, line) = (row(2 * step).expect("the first row of a pair exists"), &mut line[..columns.len()]);
            pair_rows(level, even, row(2 * step + 1).unwrap_or(&[0.0; COLUMNS_MAX][..even.len()]), line);
            line
        }
    }
}

/// Steps `steps` and columns `columns` (at most COLUMNS_MAX) of x (m, k) as tiles of 8 columns, `tile` words apart:
/// word (c, step) of a tile at step * 8 + c. Missing columns of the last tile are 0.
pub fn interleave(
    level: Level,
    arithmetic: Arithmetic,
    x: &[f32],
    k: usize,
    steps: Range<usize>,
    columns: &Range<usize>,
    tiles: &mut [u32],
    tile: usize,
) {
    let mut line = [0u32; COLUMNS_MAX];
    // Row by row, because the hardware prefetches long rows, and the tiles stay in the second-level cache.
    for (at, step) in steps.enumerate() {
        let (whole, rest) = words_at(level, arithmetic, x, k, step, columns, &mut line).as_chunks::<ROWS>();
        for (words, to) in whole.iter().zip(tiles[at * ROWS..].chunks_mut(tile)) {
            to[..ROWS].copy_from_slice(words);
        }
        if !rest.is_empty() {
            let to = &mut tiles[whole.len() * tile + at * ROWS..][..ROWS];
            to.fill(0);
            to[..rest.len()].copy_from_slice(rest);
        }
    }
}

/// Starts to fetch `len` values into the second-level cache. The address may be invalid.
#[inline]
pub fn prefetch(from: *const f32, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..len).step_by(16) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that the program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, len);
}

/// Steps `steps` of columns `columns` (at most 32) of y (m, n) as a panel; missing lanes are 0.
pub fn panel(
    level: Level,
    arithmetic: Arithmetic,
    y: &[f32],
    n: usize,
    steps: Range<usize>,
    columns: &Range<usize>,
    panel: &mut [[u32; LANES]],
) {
    let mut line = [0u32; LANES];
    for (words, step) in panel.iter_mut().zip(steps) {
        let row = words_at(level, arithmetic, y, n, step, columns, &mut line);
        if let Ok(row) = <&[u32; LANES]>::try_from(row) {
            *words = *row;
        } else {
            words.fill(0);
            words[..row.len()].copy_from_slice(row);
        }
    }
}

type Block = [[u32; LANES]; LANES];

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::LANES;
    #[allow(clippy::wildcard_imports, reason = "the names of intrinsics explain themselves")]
    use std::arch::x86_64::*;

    /// 16 x 16 words from rows `row..` and columns `column..`, transposed in registers.
    ///
    /// # Safety
    /// `from` has row + 16 rows, and column + 16 is at most LANES.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn turned(from: &[[u32; LANES]], row: usize, column: usize) -> [__m512; 16] {
        let mut a = [_mm512_setzero_ps(); 16];
        for (i, a) in a.iter_mut().enumerate() {
            // SAFETY: promised by the caller.
            *a = unsafe { _mm512_loadu_ps(from.as_ptr().add(row + i).cast::<f32>().add(column)) };
        }
        // 2 x 2 within pairs of rows, then 4 x 4 within fours, each inside 128-bit lanes; then the lanes themselves.
        let mut b = a;
        for i in (0..16).step_by(2) {
            b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
        }
        for i in (0..16).step_by(4) {
            for h in 0..2 {
                let (x, y) = (_mm512_castps_pd(b[i + h]), _mm512_castps_pd(b[i + h + 2]));
                a[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
                a[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
            }
        }
        for c in 0..4 {
            let low = _mm512_shuffle_f32x4::<0x88>(a[c], a[c + 4]);
            let high = _mm512_shuffle_f32x4::<0xdd>(a[c], a[c + 4]);
            let low2 = _mm512_shuffle_f32x4::<0x88>(a[c + 8], a[c + 12]);
            let high2 = _mm512_shuffle_f32x4::<0xdd>(a[c + 8], a[c + 12]);
            b[c] = _mm512_shuffle_f32x4::<0x88>(low, low2);
            b[c + 4] = _mm512_shuffle_f32x4::<0x88>(high, high2);
            b[c + 8] = _mm512_shuffle_f32x4::<0xdd>(low, low2);
            b[c + 12] = _mm512_shuffle_f32x4::<0xdd>(high, high2);
        }
        b
    }

    /// 32 x 32 words.
    #[target_feature(enable = "avx512f")]
    pub fn transpose(from: &super::Block, to: &mut super::Block) {
        for (row, column) in [(0, 0), (0, 16), (16, 0), (16, 16)] {
            // SAFETY: 32 rows of 32 words.
            let block = unsafe { turned(from, row, column) };
            for (i, b) in block.iter().enumerate() {
                // SAFETY: 16 words of row `column + i` from `row` on.
                unsafe { _mm512_storeu_ps(to[column + i].as_mut_ptr().cast::<f32>().add(row), *b) };
            }
        }
    }

    /// 16 rows (pairs of inputs) of 32 lanes to 16 rows (pairs of lanes) of 32 inputs.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub fn transpose_pairs(from: &[[u32; LANES]; LANES / 2], to: &mut [[u32; LANES]; LANES / 2]) {
        let ones = _mm512_set1_epi32(0x0001_0001);
        // Half-words 0, 32, 1, 33, ...: a lane's inputs interleaved with the next lane's.
        let steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let both = _mm512_or_si512(steps, _mm512_slli_epi32::<16>(steps));
        let low = _mm512_add_epi16(both, _mm512_set1_epi32(32 << 16));
        let high = _mm512_add_epi16(low, _mm512_slli_epi16::<4>(ones));
        for column in [0, 16] {
            // SAFETY: 16 rows of 32 words.
            let block = unsafe { turned(from, 0, column) };
            for i in (0..16).step_by(2) {
                let (even, odd) = (_mm512_castps_si512(block[i]), _mm512_castps_si512(block[i + 1]));
                let row = to[column / 2 + i / 2].as_mut_ptr();
                // SAFETY: 32 words of one row.
                unsafe {
                    _mm512_storeu_si512(row.cast(), _mm512_permutex2var_epi16(even, low, odd));
                    _mm512_storeu_si512(row.add(16).cast(), _mm512_permutex2var_epi16(even, high, odd));
                }
            }
        }
    }
}

/// Transposes up to 32 inputs of one panel, for as many lanes as `to` has; missing inputs become 0. f32:
/// `from[c][lane]` to `to[lane][c]`. bf16: `from[c / 2][lane]` pairs inputs, `to[lane / 2][c]` pairs lanes.
pub fn transpose(level: Level, arithmetic: Arithmetic, from: &[[u32; LANES]], to: &mut [[u32; LANES]]) {
    #[cfg(target_arch = "x86_64")]
    if level.isa() == Isa::Avx512 {
        match arithmetic {
            Arithmetic::F32 => {
                if let (Ok(from), Ok(to)) = (from.try_into(), <&mut Block>::try_from(&mut *to)) {
                    // SAFETY: the level says that the processor has AVX-512.
                    return unsafe { x86::transpose(from, to) };
                }
            }
            Arithmetic::Bf16 => {
                if let (Ok(from), Ok(to)) = (from.try_into(), <&mut [_; LANES / 2]>::try_from(&mut *to)) {
                    // SAFETY: the level says that the processor has AVX-512 (BW included).
                    return unsafe { x86::transpose_pairs(from, to) };
                }
            }
        }
    }
    let _ = level;
    for (lane, words) in to.iter_mut().enumerate() {
        *words = [0; LANES];
        match arithmetic {
            Arithmetic::F32 => words.iter_mut().zip(from).for_each(|(word, from)| *word = from[lane]),
            Arithmetic::Bf16 => {
                for (pair, from) in words.as_chunks_mut::<2>().0.iter_mut().zip(from) {
                    let (even, odd) = (from[2 * lane], from[2 * lane + 1]);
                    *pair = [even & 0xffff | odd << 16, even >> 16 | odd & 0xffff_0000];
                }
            }
        }
    }
}
