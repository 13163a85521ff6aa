//! GELU (arXiv:1606.08415) of each value, without a gate.

use super::exp::exp;
use super::pool::pool;
use crate::device::simd::{level, leveled};

/// The form of GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// x (1 + erf(x / sqrt 2)) / 2
    Erf,
    /// x s with s = 1 / (1 + exp(-2 u)) and u = sqrt(2 / pi) (x + 0.044715 x^3)
    Tanh,
}

/// The number of elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 13;
/// 2 sqrt(2 / pi)
const TWICE: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;
/// Squares above this one count as this one: the slope is 0 or 1 there.
const SQUARE_MAX: f32 = 1e4;
/// 1 / sqrt(2 pi)
const DENSITY: f32 = 0.398_942_3;
const ROOT_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;
/// erf(x) = x P(x^2) / Q(x^2) for |x| up to 4, where it rounds to 1: the minimax polynomials of Eigen.
const P: [f32; 7] =
    [-2.726_142_3e-10, 2.770_681_4e-8, -2.101_024e-6, -5.692_506_5e-5, -7.349_906_3e-4, -2.954_6e-3, -1.609_603_3e-2];
const Q: [f32; 5] = [-1.456_607_2e-5, -2.133_740_5e-4, -1.682_827e-3, -7.373_329e-3, -1.426_473_9e-2];

/// erf(x). NaN stays NaN.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let x = x.clamp(-4.0, 4.0);
    let square = x * x;
    let (mut p, mut q) = (P[0], Q[0]);
    for factor in &P[1..] {
        p = p.mul_add(square, *factor);
    }
    for factor in &Q[1..] {
        q = q.mul_add(square, *factor);
    }
    x * p / q
}

leveled! {
    fn erf_forward(x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = 0.5 * x * (1.0 + erf(x * ROOT_HALF));
        }
    }
}

leveled! {
    fn tanh_forward(x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = x / (1.0 + exp(-TWICE * (x + CUBIC * x * x * x)));
        }
    }
}

leveled! {
    fn erf_backward(x: &[f32], dx: &mut [f32]) {
        for (dx, x) in dx.iter_mut().zip(x) {
            *dx *= 0.5 * (1.0 + erf(x * ROOT_HALF)) + x * DENSITY * exp(-0.5 * x * x);
        }
    }
}

leveled! {
    fn tanh_backward(x: &[f32], dx: &mut [f32]) {
        for (dx, x) in dx.iter_mut().zip(x) {
            let square = (x * x).min(SQUARE_MAX);
            let s = 1.0 / (1.0 + exp(-TWICE * (x + CUBIC * x * square)));
            *dx *= s * (1.0 + x * (1.0 - s) * (TWICE * (1.0 + 3.0 * CUBIC * square)));
        }
    }
}

pub fn forward(form: Gelu, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "gelu: the lengths differ");
    let level = level();
    pool().parts(y, 1024, x.len() < SERIAL_MAX, &|range, y| match form {
        Gelu::Erf => erf_forward(level, &x[range], y),
        Gelu::Tanh => tanh_forward(level, &x[range], y),
    });
}

pub fn backward(form: Gelu, x: &[f32], dx: &mut [f32]) {
    assert_eq!(x.len(), dx.len(), "gelu: the lengths differ");
    let level = level();
    pool().parts(dx, 1024, x.len() < SERIAL_MAX, &|range, dx| match form {
        Gelu::Erf => erf_backward(level, &x[range], dx),
        Gelu::Tanh => tanh_backward(level, &x[range], dx),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The series 2 / sqrt(pi) sum_n (-1)^n x^(2n+1) / (n! (2n+1)).
    fn exact(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..120 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    }

    #[test]
    fn erf_is_accurate_to_six_ulp_and_ends_at_one() {
        for i in -4000..=4000 {
            let x = i as f32 * 1e-3;
            let off = (f64::from(erf(x)) - exact(f64::from(x))).abs();
            assert!(off <= 6.0 * 6e-8 * f64::from(x.abs().min(1.0)) * 1.13, "erf({x}) = {}, off by {off:e}", erf(x));
        }
        assert!((erf(9.0) - 1.0).abs() < 1e-6 && (erf(f32::NEG_INFINITY) + 1.0).abs() < 1e-6 && erf(f32::NAN).is_nan());
    }
}
