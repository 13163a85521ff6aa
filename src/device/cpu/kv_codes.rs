//! Keys and values in 8 bits: codes e4m3 (arXiv:2209.05433), and a power of two for each token and key head:
//!
//! x = code 2^s, with s = ceil(log2(max |x| / 448)) over the head,
//!
//! rounded once, to the nearest code, ties to even. The product is exact in f32 and in bf16. So attention over rounded keys
//! and values has the bits of attention over codes. -100 <= s <= 119, so no product is subnormal or overflows. A power is
//! stored as s + 127, and as 255 for a head with Inf or NaN, whose values become Inf or NaN.

use super::copy::SERIAL_MAX;
use super::pool::pool;
use crate::device::simd::{level, leveled};

/// The least and the largest s + 127 of numbers.
const POWERS: [u32; 2] = [27, 246];
/// The largest code of a number: 448.
const LARGEST: u32 = 0x7E;
/// The bits of 2^-6, the least number with a whole fraction, and 2^14, whose last bit is 2^-9, that of smaller ones.
const NORMAL: u32 = 0x3C80_0000;
const TO_FIXED: f32 = 16384.0;
/// 2^120: the bias of f32 is 120 larger.
const REBIAS: f32 = f32::from_bits(0x7B80_0000);

/// s + 127 of a head.
#[inline(always)]
pub fn power(head: &[f32]) -> u8 {
    let largest = head.iter().fold(0, |largest, x| u32::max(largest, x.to_bits() & 0x7FFF_FFFF));
    let (exponent, fraction) = (largest >> 23, largest & 0x7F_FFFF);
    // 448 = 1.75 * 2^8
    let power = (exponent + u32::from(fraction > 0x60_0000)).saturating_sub(8).clamp(POWERS[0], POWERS[1]);
    if exponent == 255 { 255 } else { power as u8 }
}

/// 2^s
#[inline(always)]
pub fn factor(power: u8) -> f32 {
    f32::from_bits(u32::from(power) << 23)
}

/// 2^-s; 0 for a head without numbers.
#[inline(always)]
pub fn inverse(power: u8) -> f32 {
    f32::from_bits(254u32.saturating_sub(u32::from(power)) << 23)
}

/// The code of x, given 2^-s.
#[inline(always)]
pub fn code(x: f32, inverse: f32) -> u8 {
    let bits = (x * inverse).to_bits();
    let (sign, size) = (bits >> 24 & 0x80, bits & 0x7FFF_FFFF);
    let normal = ((size + 0x7_FFFF + (size >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    let fixed = (f32::from_bits(size) + TO_FIXED).to_bits().wrapping_sub(TO_FIXED.to_bits());
    (sign | if size < NORMAL { fixed } else { normal }.min(LARGEST)) as u8
}

/// The number of a code.
#[inline(always)]
pub fn value(code: u8) -> f32 {
    let bits = ((u32::from(code) << 24) as i32 >> 4) as u32 & 0x87F0_0000;
    f32::from_bits(bits) * REBIAS
}

leveled! {
    fn round_heads(x: &mut [f32], head_dim: usize) {
        for head in x.chunks_exact_mut(head_dim) {
            let power = power(head);
            let (factor, inverse) = (factor(power), inverse(power));
            for x in head {
                *x = value(code(*x, inverse)) * factor;
            }
        }
    }
}

/// x = the nearest values in 8 bits, for heads of `head_dim` values.
pub fn round(x: &mut [f32], head_dim: usize) {
    let (level, small) = (level(), x.len() < SERIAL_MAX / 16);
    pool().parts(x, head_dim, small, &|_, x| round_heads(level, x, head_dim));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(x: &[f32]) -> Vec<f32> {
        let mut y = x.to_vec();
        round(&mut y, x.len());
        y
    }

    /// The nearest number of the format with a power of two, in f64: ties to the even code.
    fn nearest(x: f32, scale: f64) -> f64 {
        let size = f64::from(x.abs()) / scale;
        let distance = |code: &u8| (f64::from(value(*code)) - size).abs();
        let least = (0..=LARGEST as u8).map(|code| distance(&code)).fold(f64::INFINITY, f64::min);
        let mut best = (0..=LARGEST as u8).filter(|code| distance(code) == least);
        let (first, second) = (best.next().expect("a code"), best.next());
        let code = second.filter(|_| first % 2 == 1).unwrap_or(first);
        f64::from(value(code)) * scale * f64::from(x.signum())
    }

    #[test]
    fn values_are_rounded_once_to_the_nearest_code_with_ties_to_even() {
        let mut state = 7u32;
        for largest in [448.0, 449.0, 447.9, 1.0, 0.9, 3.7e-5, 6e-36, 1e30, 3e38f32] {
            let mut head: Vec<f32> = (0..512)
                .map(|i| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    // Down to values that become 0.
                    (state as f32 / 2f32.powi(31) - 1.0) * largest * 2f32.powi(-(i % 24))
                })
                .collect();
            head[0] = largest;
            let scale = 2f64.powi((f64::from(largest) / 448.0).log2().ceil().clamp(-100.0, 119.0) as i32);
            // Ties: halves between neighbors.
            head.extend(
                (0..LARGEST as u8).map(|c| (f64::midpoint(value(c).into(), value(c + 1).into()) * scale) as f32),
            );
            let head: Vec<f32> = head.into_iter().filter(|x| x.abs() <= largest).collect();
            for (x, y) in head.iter().zip(rounded(&head)) {
                assert_eq!(f64::from(y), nearest(*x, scale), "{x} with {largest}");
            }
            // Rounded values are numbers of bf16, and stay as they are.
            let once = rounded(&head);
            assert!(once.iter().all(|y| y.to_bits().trailing_zeros() >= 16) && rounded(&once) == once);
        }
    }

    #[test]
    fn a_head_of_zeros_stays_zero_and_one_without_numbers_has_none() {
        assert_eq!(rounded(&[0.0, -0.0]), [0.0, 0.0]);
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(rounded(&[1.0, wrong, 0.0]).iter().all(|x| !x.is_finite()));
        }
        assert!(rounded(&[f32::MAX, f32::MIN]).iter().all(|x| x.is_finite()));
    }
}
