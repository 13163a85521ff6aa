//! The exponential and the hyperbolic tangent, with the same bits as a scalar, in AVX2 and in AVX-512.
//!
//! exp(x) = 2^n exp(r), n = round(x / ln 2), r = x - n ln 2 in two parts; exp(r) = 1 + r + r^2 P(r) with the degree-5
//! minimax polynomial of Cephes expf (Moshier). Error below 1.5 ulp, denormal results included; exp(0) = 1,
//! exp(-inf) = 0, exp(+inf) = inf, NaN stays NaN.
//!
//! tanh(x) = x P(x^2) / Q(x^2) with the minimax polynomials of degrees 6 and 3 of Eigen (MathFunctionsImpl.h), for |x| up
//! to 7.9, where it rounds to 1. Error below 5 ulp, or below 5e-43.

use super::vector::{ROUND, Vector};

/// Below this the result rounds to zero.
pub const LOWEST: f32 = -105.0;
/// Above this the result overflows.
const HIGHEST: f32 = 89.0;
const LOG2E: f32 = std::f32::consts::LOG2_E;
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// From here on tanh rounds to 1.
const TANH_ONE: f32 = 7.905_311;
const TANH_P: [f32; 7] =
    [-2.760_768_6e-16, 2.000_188e-13, -8.604_672e-11, 5.122_297e-8, 1.485_722_4e-5, 6.372_619_5e-4, 4.893_524_6e-3];
const TANH_Q: [f32; 4] = [1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_5e-3, 4.893_525e-3];
const P: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 5e-1];

/// exp(x). Inside a `leveled!` loop the compiler vectorizes it. Elsewhere, on a baseline build, it is slow, because
/// each `mul_add` is a call.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // SAFETY: one lane needs no instructions.
    unsafe { exp_lanes(x) }
}

/// The exponential of each lane.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
pub unsafe fn exp_lanes<V: Vector>(x: V) -> V {
    // SAFETY: promised by the caller.
    unsafe {
        // This order of operands keeps NaN.
        let x = V::splat(HIGHEST).min(V::splat(LOWEST).max(x));
        let shifted = x.fma(V::splat(LOG2E), V::splat(ROUND));
        let n = shifted.sub(V::splat(ROUND));
        let r = n.fma(V::splat(-LN2_LOW), n.fma(V::splat(-LN2_HIGH), x));
        let mut p = V::splat(P[0]);
        for factor in &P[1..] {
            p = p.fma(r, V::splat(*factor));
        }
        p.fma(r.mul(r), r).add(V::splat(1.0)).times_power(shifted)
    }
}

/// tanh(x), as `exp`.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // SAFETY: one lane needs no instructions.
    unsafe { tanh_lanes(x) }
}

/// The hyperbolic tangent of each lane.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
pub unsafe fn tanh_lanes<V: Vector>(x: V) -> V {
    // SAFETY: promised by the caller.
    unsafe {
        // This order of operands keeps NaN.
        let x = V::splat(TANH_ONE).min(V::splat(-TANH_ONE).max(x));
        let square = x.mul(x);
        let polynomial = |factors: &[f32]| {
            let mut sum = V::splat(factors[0]);
            for factor in &factors[1..] {
                sum = sum.fma(square, V::splat(*factor));
            }
            sum
        };
        x.mul(polynomial(&TANH_P)).div(polynomial(&TANH_Q))
    }
}

#[cfg(test)]
mod tests {
    use super::super::vector::{Kernel, run_in};
    use super::*;
    use crate::device::simd::{Level, level, leveled};

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
        assert_eq!([0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY].map(exp), [1.0, 1.0, 0.0, f32::INFINITY]);
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
    fn tanh_is_accurate_to_five_ulp_but_for_the_smallest_numbers() {
        for x in probes() {
            let (y, exact) = (tanh(x), f64::from(x).tanh());
            let nearest = exact as f32;
            let ulp = f64::from(nearest.abs().next_up()) - f64::from(nearest.abs());
            let off = (f64::from(y) - exact).abs() / ulp;
            // Near the denormal numbers the numerator has few bits.
            let is_near = off <= 5.0 || (f64::from(y) - exact).abs() < 5e-43;
            assert!(if x.is_nan() { y.is_nan() } else { is_near }, "tanh({x:e}) = {y:e}, {off} ulp from {exact:e}");
        }
    }

    #[test]
    fn loops_and_registers_of_every_instruction_level_have_the_bits_of_the_scalar_exp() {
        struct All<'a>(&'a [f32]);
        impl Kernel for All<'_> {
            #[inline(always)]
            unsafe fn work<V: Vector>(&self, got: &mut [f32]) {
                for at in (0..self.0.len()).step_by(V::LANES) {
                    let n = self.0.len() - at;
                    // SAFETY: as many values on either side; instructions as promised.
                    unsafe {
                        exp_lanes(V::load_part(self.0.as_ptr().add(at), n)).store_part(got.as_mut_ptr().add(at), n);
                    }
                }
            }
        }
        let x = probes();
        let scalar: Vec<u32> = x.iter().map(|&x| exp(x).to_bits()).collect();
        for level in Level::available() {
            let (mut y, mut z) = (x.clone(), x.clone());
            exp_all(level, &mut y);
            run_in(level, &All(&x), &mut z);
            for i in 0..x.len() {
                let is_scalar = [y[i], z[i]].map(f32::to_bits) == [scalar[i]; 2];
                assert!(is_scalar || x[i].is_nan(), "{level:?} exp({:e})", x[i]);
            }
        }
    }
}
