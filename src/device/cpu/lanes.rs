//! Sums that run in lanes.

use std::ops::AddAssign;

/// The sum of all lanes: the upper half is added to the lower half until one is left.
#[inline(always)]
pub fn fold<T: Copy + AddAssign, const N: usize>(mut lanes: [T; N]) -> T {
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            let upper = lanes[i + half];
            lanes[i] += upper;
        }
        half /= 2;
    }
    lanes[0]
}
