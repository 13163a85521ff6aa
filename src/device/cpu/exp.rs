//! The exponential, with the same bits as a scalar, in AVX2 and in AVX-512.
//!
//! exp(x) = 2^n exp(r), n = round(x / ln 2), r = x - n ln 2 in two parts; exp(r) = 1 + r + r^2 P(r) with the degree-5
//! minimax polynomial of Cephes expf (Moshier). Error below 1.5 ulp, denormal results included; exp(0) = 1,
//! exp(-inf) = 0, exp(+inf) = inf, NaN stays NaN.

#[cfg(target_arch = "x86_64")]
#[allow(clippy::wildcard_imports, reason = "the names of intrinsics stand for themselves")]
use std::arch::x86_64::*;

/// Below this the result rounds to zero.
pub const LOWEST: f32 = -105.0;
/// Above this the result overflows.
const HIGHEST: f32 = 89.0;
const LOG2E: f32 = std::f32::consts::LOG2_E;
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;
const P: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 5e-1];

/// exp(x). Inside a `leveled!` loop the compiler vectorises it; alone, on a baseline build, it is slow (each
/// `mul_add` is a call).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Comparisons, not min/max: NaN must pass.
    let x = if x < LOWEST { LOWEST } else { x };
    let x = if x > HIGHEST { HIGHEST } else { x };
    let shifted = x.mul_add(LOG2E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = P[0];
    p = p.mul_add(r, P[1]);
    p = p.mul_add(r, P[2]);
    p = p.mul_add(r, P[3]);
    p = p.mul_add(r, P[4]);
    p = p.mul_add(r, P[5]);
    let y = p.mul_add(r * r, r) + 1.0;
    // 2^n in two factors, each a normal number: the first product is exact, the second rounds once.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    y * power(half) * power(n.wrapping_sub(half))
}

/// Sixteen exponentials; each the same bits as `exp`.
///
/// # Safety
/// Outside functions compiled for AVX-512: the processor has it.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub fn exp_avx512(x: __m512) -> __m512 {
    // max(a, x) and min(a, x) return x where x is NaN.
    let x = _mm512_max_ps(_mm512_set1_ps(LOWEST), x);
    let x = _mm512_min_ps(_mm512_set1_ps(HIGHEST), x);
    let round = _mm512_set1_ps(ROUND);
    let n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(LOG2E), round), round);
    let r = _mm512_fmadd_ps(n, _mm512_set1_ps(-LN2_HIGH), x);
    let r = _mm512_fmadd_ps(n, _mm512_set1_ps(-LN2_LOW), r);
    let mut p = _mm512_set1_ps(P[0]);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(P[1]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(P[2]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(P[3]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(P[4]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(P[5]));
    let y = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0));
    // One rounding, as in the two-factor product.
    _mm512_scalef_ps(y, n)
}

/// Eight exponentials; each the same bits as `exp`.
///
/// # Safety
/// Outside functions compiled for AVX2 and FMA: the processor has them.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn exp_avx2(x: __m256) -> __m256 {
    let x = _mm256_max_ps(_mm256_set1_ps(LOWEST), x);
    let x = _mm256_min_ps(_mm256_set1_ps(HIGHEST), x);
    let round = _mm256_set1_ps(ROUND);
    let shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(LOG2E), round);
    let n = _mm256_sub_ps(shifted, round);
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-LN2_HIGH), x);
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-LN2_LOW), r);
    let mut p = _mm256_set1_ps(P[0]);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(P[1]));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(P[2]));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(P[3]));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(P[4]));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(P[5]));
    let y = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0));
    let n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(round));
    let half = _mm256_srai_epi32(n, 1);
    let rest = _mm256_sub_epi32(n, half);
    let bias = _mm256_set1_epi32(127);
    let a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    let b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    _mm256_mul_ps(_mm256_mul_ps(y, a), b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::simd::{Isa, Level, level, leveled};

    leveled! {
        fn exp_all(x: &mut [f32]) {
            for x in x {
                *x = exp(*x);
            }
        }
    }

    /// Every 4099th float of the whole line, and the ends.
    fn probes() -> Vec<f32> {
        let mut x: Vec<f32> = (0..u32::MAX).step_by(4099).map(f32::from_bits).collect();
        x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -103.97, -104.0, 88.722_83, 88.722_84, 1e-40]);
        x
    }

    #[test]
    fn exp_is_accurate_to_two_ulp_everywhere() {
        let x = probes();
        let mut y = x.clone();
        exp_all(level(), &mut y);
        for (&x, &y) in x.iter().zip(&y) {
            let exact = f64::from(x).exp();
            if x.is_nan() {
                assert!(y.is_nan());
            } else if exact > f64::from(f32::MAX) * (1.0 + 3e-8) {
                assert_eq!(y, f32::INFINITY, "exp({x:e})");
            } else {
                let nearest = exact as f32;
                let ulp = if nearest.is_finite() { f64::from(nearest.next_up()) - f64::from(nearest) } else { 2e31 };
                let off = (f64::from(y.min(f32::MAX)) - exact).abs() / ulp;
                assert!(off <= 1.5, "exp({x:e}) = {y:e}, {off} ulp from {exact:e}");
            }
        }
    }

    #[test]
    fn exp_of_zero_is_one_and_of_minus_infinity_zero() {
        let mut y = [0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY];
        exp_all(level(), &mut y);
        assert_eq!(y, [1.0, 1.0, 0.0, f32::INFINITY]);
    }

    #[test]
    fn every_level_gives_the_bits_of_the_scalar_exp() {
        let x = probes();
        let scalar: Vec<u32> = x.iter().map(|&x| exp(x).to_bits()).collect();
        for level in Level::available() {
            let mut y = x.clone();
            exp_all(level, &mut y);
            for i in 0..x.len() {
                assert!(y[i].to_bits() == scalar[i] || x[i].is_nan(), "{level:?} exp({:e})", x[i]);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_register_versions_give_the_bits_of_the_scalar_exp() {
        #[target_feature(enable = "avx512f")]
        fn run512(x: [f32; 16]) -> [f32; 16] {
            // SAFETY: both are 64 bytes of plain floats.
            unsafe { std::mem::transmute(exp_avx512(std::mem::transmute::<[f32; 16], __m512>(x))) }
        }
        #[target_feature(enable = "avx2,fma")]
        fn run256(x: [f32; 8]) -> [f32; 8] {
            // SAFETY: both are 32 bytes of plain floats.
            unsafe { std::mem::transmute(exp_avx2(std::mem::transmute::<[f32; 8], __m256>(x))) }
        }
        let isa = Level::detected().isa();
        for chunk in probes().as_chunks::<16>().0 {
            let expect = chunk.map(|x| exp(x).to_bits());
            let mut got = Vec::new();
            if isa >= Isa::Avx512 {
                // SAFETY: detected just above.
                got.push(unsafe { run512(*chunk) });
            }
            if isa >= Isa::Avx2 {
                let mut both = [0.0; 16];
                for half in 0..2 {
                    let part: [f32; 8] = chunk[8 * half..8 * half + 8].try_into().expect("eight values");
                    // SAFETY: detected just above.
                    both[8 * half..8 * half + 8].copy_from_slice(&unsafe { run256(part) });
                }
                got.push(both);
            }
            for row in got {
                for i in 0..16 {
                    assert!(row[i].to_bits() == expect[i] || chunk[i].is_nan(), "exp({:e})", chunk[i]);
                }
            }
        }
    }
}
