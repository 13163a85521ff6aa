//! Vectors of f32 as registers, for kernels written once and compiled per instruction set.
//!
//! Every operation acts on each lane separately. So the result of a kernel whose sums run in lanes modulo `BLOCK`,
//! folded by halves, has the same bits for every width.

use super::kv_codes::value;
use super::scratch::with_scratch;
use crate::device::simd::{Isa, Level};
use crate::dtype::round_bf16;

/// The number of lanes in a row of scores, a multiple of every vector's width.
pub const BLOCK: usize = 32;
/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the sum.
pub const ROUND: f32 = 12_582_912.0;

/// A register of `LANES` floats.
///
/// # Safety
/// Every function needs a processor with the instructions of the implementing type; pointers are valid for the lanes
/// that are touched, at any alignment.
pub trait Vector: Copy {
    const LANES: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// Loads the first `n` lanes; the others are zero, and their memory is not touched. `n` may exceed `LANES`.
    unsafe fn load_part(from: *const f32, n: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Stores the first `n` lanes; memory past them is not touched. `n` may exceed `LANES`.
    unsafe fn store_part(self, to: *mut f32, n: usize);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `other` if either is NaN, as in `min`.
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn min(self, other: Self) -> Self;
    /// self * factor + sum, rounded once.
    unsafe fn fma(self, factor: Self, sum: Self) -> Self;
    /// self * 2^n for n = shifted - ROUND, rounded once.
    unsafe fn times_power(self, shifted: Self) -> Self;
    /// The odd values of words that are pairs of bf16, in the high halves, as floats.
    unsafe fn odd(self) -> Self;
    /// The even values of such words.
    unsafe fn even(self) -> Self;
    /// Words whose even halves are these; the odd ones are zero.
    unsafe fn load_halves(from: *const u16) -> Self;
    /// The first `n` of them, as `load_part`.
    unsafe fn load_part_halves(from: *const u16, n: usize) -> Self;
    /// The numbers of codes of 8 bits (`kv_codes::value`).
    unsafe fn load_codes(from: *const u8) -> Self;
    /// self + odd * odd, then + even * even, of two words of bf16, by the instruction for that.
    unsafe fn add_pairs(self, _x: Self, _w: Self) -> Self {
        unreachable!("only AVX-512 has the instruction")
    }
    /// The values of `table` at the index in bits `shift` to `shift + 3` of each lane.
    unsafe fn select(self, shift: u32, table: &[f32; 16]) -> Self;
    /// The nearest bf16, ties to even, of finite lanes.
    unsafe fn round_bf16(self) -> Self;
    /// Words that are pairs of bf16: the even ones from lanes that are bf16, the odd ones from `odd`.
    unsafe fn join(self, odd: Self) -> Self;
    /// The lanes whose bit is set, the others from `other`.
    unsafe fn keep(self, bits: u32, other: Self) -> Self;
    unsafe fn reduce_max(self) -> f32;
    /// to[i * to_stride + j] = from[j * from_stride + i] for i, j < 8.
    unsafe fn transpose8(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);
    /// Prefetches the cache line of an address, which may be invalid.
    unsafe fn prefetch(at: *const f32);
    /// Same as `prefetch`, into the second-level cache, for values that are needed later.
    unsafe fn prefetch_far(at: *const f32);
    /// Runs `kernel` in a function of its own that is compiled for these instructions. Calls from other functions save
    /// their registers only once.
    unsafe fn call<K: Kernel>(kernel: &K, scratch: &mut [f32]);
}

/// Work that is written once for all registers.
pub trait Kernel {
    /// # Safety
    /// The processor has the instructions of `V`; no other thread does this work; `scratch` has the length passed to
    /// `run`.
    unsafe fn work<V: Vector>(&self, scratch: &mut [f32]);
}

/// Runs `kernel` with the registers of `level`, in `scratch_len` values of scratch.
pub fn run(level: Level, scratch_len: usize, kernel: &impl Kernel) {
    // The scratch is taken first, because closures of the standard library are not compiled for the level.
    with_scratch(scratch_len, |scratch| run_in(level, kernel, scratch));
}

/// `run` without scratch.
pub fn run_in<K: Kernel>(level: Level, kernel: &K, scratch: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m256, __m512};
        match level.isa() {
            // SAFETY: a Level exists only where the processor has its instructions.
            Isa::Avx512 => return unsafe { __m512::call(kernel, scratch) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { __m256::call(kernel, scratch) },
            Isa::Scalar => {}
        }
    }
    let _ = level;
    // SAFETY: needs no instructions beyond the baseline.
    unsafe { f32::call(kernel, scratch) }
}

/// Copies the first `n` values of a row.
///
/// # Safety
/// Same as `Vector`, for `n` values on either side.
#[inline(always)]
pub unsafe fn copy<V: Vector>(from: *const f32, to: *mut f32, n: usize) {
    let whole = n / V::LANES * V::LANES;
    // SAFETY: all offsets lie below n.
    unsafe {
        for at in (0..whole).step_by(V::LANES) {
            V::load(from.add(at)).store(to.add(at));
        }
        for at in whole..n {
            *to.add(at) = *from.add(at);
        }
    }
}

/// Prefetches the cache lines of `n` values, some of which may be outside of any allocation.
///
/// # Safety
/// Same as `Vector`, except for the address.
#[inline(always)]
pub unsafe fn prefetch<V: Vector>(from: *const f32, n: usize) {
    for at in (0..n).step_by(16) {
        // SAFETY: a prefetch touches no memory.
        unsafe { V::prefetch(from.wrapping_add(at)) };
    }
}

/// Same as `prefetch`, into the second-level cache.
///
/// # Safety
/// Same as `Vector`, except for the address.
#[inline(always)]
pub unsafe fn prefetch_far<V: Vector>(from: *const f32, n: usize) {
    for at in (0..n).step_by(16) {
        // SAFETY: a prefetch touches no memory.
        unsafe { V::prefetch_far(from.wrapping_add(at)) };
    }
}

/// The lanes [e][BLOCK] of a block from `count` rows of `e` values, `stride` apart; lanes without a row are zero.
///
/// # Safety
/// Same as `Vector`; `rows` may be read and `block` written as described.
#[inline(always)]
pub unsafe fn transpose<V: Vector>(rows: *const f32, stride: usize, count: usize, e: usize, block: *mut f32) {
    let (eights, e_eights) = (count / 8 * 8, e / 8 * 8);
    // SAFETY: i < e and j < count throughout.
    unsafe {
        for j in (0..eights).step_by(8) {
            for i in (0..e_eights).step_by(8) {
                V::transpose8(rows.add(j * stride + i), stride, block.add(i * BLOCK + j), BLOCK);
            }
        }
        for i in 0..e {
            for j in if i < e_eights { eights } else { 0 }..count {
                *block.add(i * BLOCK + j) = *rows.add(j * stride + i);
            }
            for j in count..BLOCK {
                *block.add(i * BLOCK + j) = 0.0;
            }
        }
    }
}

/// One method of an implementation: its body may be intrinsics of the implementing type's instruction set.
macro_rules! method {
    ($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block) => {
        #[inline(always)]
        #[allow(unused_unsafe, reason = "some bodies are safe")]
        unsafe fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the caller promises the instructions, and pointers valid for the lanes touched.
            unsafe { $body }
        }
    };
    ($name:ident(self $(, $arg:ident: $ty:ty)*) -> $ret:ty = $this:ident $body:block) => {
        #[inline(always)]
        #[allow(unused_unsafe, reason = "some bodies are safe")]
        unsafe fn $name(self $(, $arg: $ty)*) -> $ret {
            let $this = self;
            // SAFETY: the caller promises the instructions, and pointers valid for the lanes touched.
            unsafe { $body }
        }
    };
}

impl Vector for f32 {
    const LANES: usize = 1;
    method! { splat(x: f32) -> Self { x } }
    method! { load(from: *const f32) -> Self { from.read_unaligned() } }
    method! { load_part(from: *const f32, n: usize) -> Self { if n > 0 { *from } else { 0.0 } } }
    method! { store(self, to: *mut f32) -> () = x { *to = x } }
    method! { store_part(self, to: *mut f32, n: usize) -> () = x { if n > 0 { *to = x } } }
    method! { add(self, other: Self) -> Self = x { x + other } }
    method! { sub(self, other: Self) -> Self = x { x - other } }
    method! { mul(self, other: Self) -> Self = x { x * other } }
    method! { div(self, other: Self) -> Self = x { x / other } }
    method! { max(self, other: Self) -> Self = x { if x > other { x } else { other } } }
    method! { min(self, other: Self) -> Self = x { if x < other { x } else { other } } }
    method! { fma(self, factor: Self, sum: Self) -> Self = x { x.mul_add(factor, sum) } }
    method! { times_power(self, shifted: Self) -> Self = x {
        // Two factors, each a normal number: the first product is exact, the second rounds once.
        let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
        let half = n >> 1;
        let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
        x * power(half) * power(n.wrapping_sub(half))
    } }
    method! { odd(self) -> Self = x { f32::from_bits(x.to_bits() & 0xffff_0000) } }
    method! { even(self) -> Self = x { f32::from_bits(x.to_bits() << 16) } }
    method! { select(self, shift: u32, table: &[f32; 16]) -> Self = x { table[(x.to_bits() >> shift & 15) as usize] } }
    method! { round_bf16(self) -> Self = x { f32::from_bits(u32::from(round_bf16(x)) << 16) } }
    method! { join(self, odd: Self) -> Self = even { f32::from_bits(even.to_bits() >> 16 | odd.to_bits()) } }
    method! { keep(self, bits: u32, other: Self) -> Self = x { if bits & 1 == 1 { x } else { other } } }
    method! { reduce_max(self) -> f32 = x { x } }
    method! { transpose8(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) -> () {
        for (i, j) in (0..8).flat_map(|i| (0..8).map(move |j| (i, j))) {
            *to.add(i * to_stride + j) = *from.add(j * from_stride + i);
        }
    } }
    method! { prefetch(_at: *const f32) -> () {} }
    method! { prefetch_far(_at: *const f32) -> () {} }
    method! { load_halves(from: *const u16) -> Self { f32::from_bits(u32::from(*from)) } }
    method! { load_part_halves(from: *const u16, n: usize) -> Self { if n > 0 { Self::load_halves(from) } else { 0.0 } } }
    method! { load_codes(from: *const u8) -> Self { value(*from) } }
    // A separate function, so that callers with wider registers do not save its registers.
    #[inline(never)]
    unsafe fn call<K: Kernel>(kernel: &K, scratch: &mut [f32]) {
        // SAFETY: promised by the caller.
        unsafe { kernel.work::<Self>(scratch) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Kernel, ROUND, Vector};
    #[allow(clippy::wildcard_imports, reason = "an instruction set is imported whole")]
    use std::arch::x86_64::*;

    /// The first `n` of sixteen lanes.
    #[inline(always)]
    fn first16(n: usize) -> u16 {
        if n < 16 { (1 << n) - 1 } else { u16::MAX }
    }

    /// The first `n` of eight lanes.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn first8(n: usize) -> __m256i {
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(8) as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
    }

    /// # Safety
    /// The processor has AVX2; 8 x 8 values may be read and written.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn transpose8(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        let mut x = [_mm256_setzero_ps(); 8];
        for (j, x) in x.iter_mut().enumerate() {
            // SAFETY: rows j < 8 of eight values, as promised.
            *x = unsafe { _mm256_loadu_ps(from.add(j * from_stride)) };
        }
        // Pairs of rows, then fours, within each half of eight lanes.
        let pair = |j: usize| [_mm256_unpacklo_ps(x[j], x[j + 1]), _mm256_unpackhi_ps(x[j], x[j + 1])];
        let fours = |a: [__m256; 2], b: [__m256; 2]| {
            [
                _mm256_shuffle_ps::<0b01_00_01_00>(a[0], b[0]),
                _mm256_shuffle_ps::<0b11_10_11_10>(a[0], b[0]),
                _mm256_shuffle_ps::<0b01_00_01_00>(a[1], b[1]),
                _mm256_shuffle_ps::<0b11_10_11_10>(a[1], b[1]),
            ]
        };
        let (low, high) = (fours(pair(0), pair(2)), fours(pair(4), pair(6)));
        for i in 0..4 {
            // SAFETY: rows i and i + 4 of eight values, as promised.
            unsafe {
                let at = to.add(i * to_stride);
                _mm256_storeu_ps(at, _mm256_permute2f128_ps::<0x20>(low[i], high[i]));
                _mm256_storeu_ps(at.add(4 * to_stride), _mm256_permute2f128_ps::<0x31>(low[i], high[i]));
            }
        }
    }

    impl Vector for __m512 {
        const LANES: usize = 16;
        method! { splat(x: f32) -> Self { _mm512_set1_ps(x) } }
        method! { load(from: *const f32) -> Self { _mm512_loadu_ps(from) } }
        method! { load_part(from: *const f32, n: usize) -> Self { _mm512_maskz_loadu_ps(first16(n), from) } }
        method! { store(self, to: *mut f32) -> () = x { _mm512_storeu_ps(to, x) } }
        method! { store_part(self, to: *mut f32, n: usize) -> () = x { _mm512_mask_storeu_ps(to, first16(n), x) } }
        method! { add(self, other: Self) -> Self = x { _mm512_add_ps(x, other) } }
        method! { sub(self, other: Self) -> Self = x { _mm512_sub_ps(x, other) } }
        method! { mul(self, other: Self) -> Self = x { _mm512_mul_ps(x, other) } }
        method! { div(self, other: Self) -> Self = x { _mm512_div_ps(x, other) } }
        method! { max(self, other: Self) -> Self = x { _mm512_max_ps(x, other) } }
        method! { min(self, other: Self) -> Self = x { _mm512_min_ps(x, other) } }
        method! { fma(self, factor: Self, sum: Self) -> Self = x { _mm512_fmadd_ps(x, factor, sum) } }
        method! { times_power(self, shifted: Self) -> Self = x {
            _mm512_scalef_ps(x, _mm512_sub_ps(shifted, _mm512_set1_ps(ROUND)))
        } }
        method! { odd(self) -> Self = x {
            let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), high))
        } }
        method! { even(self) -> Self = x { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(x))) } }
        method! { load_halves(from: *const u16) -> Self {
            _mm512_castsi512_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))
        } }
        method! { load_part_halves(from: *const u16, n: usize) -> Self {
            _mm512_castsi512_ps(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first16(n), from.cast())))
        } }
        method! { load_codes(from: *const u8) -> Self {
            // Sign, exponent and fraction at their places in f16, whose bias is 8 larger.
            let wide = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast())));
            let halves = _mm256_and_si256(_mm256_srai_epi16::<1>(wide), _mm256_set1_epi16(0xbf80_u16 as i16));
            _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0))
        } }
        method! { add_pairs(self, x: Self, w: Self) -> Self = sum {
            _mm512_dpbf16_ps(sum, std::mem::transmute::<__m512, __m512bh>(x), std::mem::transmute::<__m512, __m512bh>(w))
        } }
        method! { select(self, shift: u32, table: &[f32; 16]) -> Self = x {
            let index = _mm512_srlv_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(shift as i32));
            _mm512_permutexvar_ps(index, _mm512_loadu_ps(table.as_ptr()))
        } }
        method! { round_bf16(self) -> Self = x {
            let bits = _mm512_castps_si512(x);
            let is_odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), is_odd);
            _mm512_castsi512_ps(_mm512_add_epi32(bits, up)).odd()
        } }
        method! { join(self, odd: Self) -> Self = even {
            let even = _mm512_srli_epi32::<16>(_mm512_castps_si512(even));
            _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_castps_si512(odd)))
        } }
        method! { keep(self, bits: u32, other: Self) -> Self = x { _mm512_mask_blend_ps(bits as u16, other, x) } }
        method! { reduce_max(self) -> f32 = x {
            let high = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b01_00_11_10>(_mm512_castps_pd(x), _mm512_castps_pd(x)));
            _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_castps512_ps256(high)).reduce_max()
        } }
        method! { transpose8(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) -> () {
            transpose8(from, from_stride, to, to_stride);
        } }
        method! { prefetch(at: *const f32) -> () { _mm_prefetch::<_MM_HINT_T0>(at.cast()) } }
        method! { prefetch_far(at: *const f32) -> () { _mm_prefetch::<_MM_HINT_T1>(at.cast()) } }
        unsafe fn call<K: Kernel>(kernel: &K, scratch: &mut [f32]) {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn run<K: Kernel>(kernel: &K, scratch: &mut [f32]) {
                // SAFETY: promised to `call`.
                unsafe { kernel.work::<__m512>(scratch) }
            }
            // SAFETY: the caller promises the instructions.
            unsafe { run(kernel, scratch) }
        }
    }

    impl Vector for __m256 {
        const LANES: usize = 8;
        method! { splat(x: f32) -> Self { _mm256_set1_ps(x) } }
        method! { load(from: *const f32) -> Self { _mm256_loadu_ps(from) } }
        method! { load_part(from: *const f32, n: usize) -> Self { _mm256_maskload_ps(from, first8(n)) } }
        method! { store(self, to: *mut f32) -> () = x { _mm256_storeu_ps(to, x) } }
        method! { store_part(self, to: *mut f32, n: usize) -> () = x { _mm256_maskstore_ps(to, first8(n), x) } }
        method! { add(self, other: Self) -> Self = x { _mm256_add_ps(x, other) } }
        method! { sub(self, other: Self) -> Self = x { _mm256_sub_ps(x, other) } }
        method! { mul(self, other: Self) -> Self = x { _mm256_mul_ps(x, other) } }
        method! { div(self, other: Self) -> Self = x { _mm256_div_ps(x, other) } }
        method! { max(self, other: Self) -> Self = x { _mm256_max_ps(x, other) } }
        method! { min(self, other: Self) -> Self = x { _mm256_min_ps(x, other) } }
        method! { fma(self, factor: Self, sum: Self) -> Self = x { _mm256_fmadd_ps(x, factor, sum) } }
        method! { times_power(self, shifted: Self) -> Self = x {
            // As for one lane.
            let n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(ROUND.to_bits() as i32));
            let half = _mm256_srai_epi32(n, 1);
            let bias = _mm256_set1_epi32(127);
            let a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
            let b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias), 23));
            _mm256_mul_ps(_mm256_mul_ps(x, a), b)
        } }
        method! { odd(self) -> Self = x {
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), high))
        } }
        method! { even(self) -> Self = x { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(x))) } }
        method! { load_halves(from: *const u16) -> Self {
            _mm256_castsi256_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())))
        } }
        method! { load_part_halves(from: *const u16, n: usize) -> Self {
            let mut halves = [0; 8];
            from.copy_to_nonoverlapping(halves.as_mut_ptr(), n.min(8));
            Self::load_halves(halves.as_ptr())
        } }
        method! { load_codes(from: *const u8) -> Self {
            let word = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            let size = _mm256_slli_epi32::<20>(_mm256_and_si256(word, _mm256_set1_epi32(0x7f)));
            let size = _mm256_castsi256_ps(_mm256_add_epi32(size, _mm256_set1_epi32(120 << 23)));
            // Below 2^-6, this has a leading one too many, and half of the step.
            let small = _mm256_fmadd_ps(size, _mm256_set1_ps(2.0), _mm256_set1_ps(-0.015625));
            let sign = _mm256_slli_epi32::<24>(_mm256_and_si256(word, _mm256_set1_epi32(0x80)));
            _mm256_or_ps(_mm256_min_ps(size, small), _mm256_castsi256_ps(sign))
        } }
        method! { select(self, shift: u32, table: &[f32; 16]) -> Self = x {
            let index = _mm256_srlv_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(shift as i32));
            let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr()), index);
            let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table[8..].as_ptr()), index);
            // The sign selects.
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
        } }
        method! { round_bf16(self) -> Self = x {
            let bits = _mm256_castps_si256(x);
            let is_odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), is_odd);
            _mm256_castsi256_ps(_mm256_add_epi32(bits, up)).odd()
        } }
        method! { join(self, odd: Self) -> Self = even {
            let even = _mm256_srli_epi32::<16>(_mm256_castps_si256(even));
            _mm256_castsi256_ps(_mm256_or_si256(even, _mm256_castps_si256(odd)))
        } }
        method! { keep(self, bits: u32, other: Self) -> Self = x {
            let of_lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits as i32), of_lane), of_lane);
            _mm256_blendv_ps(other, x, _mm256_castsi256_ps(set))
        } }
        method! { reduce_max(self) -> f32 = x {
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        } }
        method! { transpose8(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) -> () {
            transpose8(from, from_stride, to, to_stride);
        } }
        method! { prefetch(at: *const f32) -> () { _mm_prefetch::<_MM_HINT_T0>(at.cast()) } }
        method! { prefetch_far(at: *const f32) -> () { _mm_prefetch::<_MM_HINT_T1>(at.cast()) } }
        unsafe fn call<K: Kernel>(kernel: &K, scratch: &mut [f32]) {
            #[target_feature(enable = "avx2,fma")]
            fn run<K: Kernel>(kernel: &K, scratch: &mut [f32]) {
                // SAFETY: promised to `call`.
                unsafe { kernel.work::<__m256>(scratch) }
            }
            // SAFETY: the caller promises the instructions.
            unsafe { run(kernel, scratch) }
        }
    }
}
