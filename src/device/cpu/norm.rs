//! Sums of squares in f64, in one order. Element i of a block belongs to lane i mod 32, and each lane ascends. Then the
//! upper half of the lanes is added to the lower half until one is left.

use super::lanes;
use super::pool::pool;
use crate::device::simd::{level, leveled};

const LANES: usize = 32;
/// The number of values below which one thread does all the work.
const SERIAL_BELOW: usize = 32 << 10;

leveled! {
    fn block_sum(x: &[f32]) -> f64 {
        lanes::sum::<f64, LANES>(x, |sum, x| f64::from(x).mul_add(f64::from(x), sum))
    }
}

/// One sum per block of `block` values; the last may be shorter.
pub fn sums_of_squares(x: &[f32], block: usize) -> Vec<f64> {
    let level = level();
    let mut sums = vec![0.0; x.len().div_ceil(block)];
    pool().parts(&mut sums, 1, x.len() < SERIAL_BELOW, &|part, sums| {
        for (sum, i) in sums.iter_mut().zip(part) {
            *sum = block_sum(level, &x[i * block..x.len().min((i + 1) * block)]);
        }
    });
    sums
}
