//! Sums of squares in f64, in one order: element i of a block belongs to lane i mod 32, each lane ascends, then the
//! upper half of the lanes is added to the lower half until one is left.

use super::pool::{Shares, pool};
use crate::device::simd::{level, leveled};

const LANES: usize = 32;
/// Values below which one thread does it all.
const SERIAL_BELOW: usize = 32 << 10;

leveled! {
    fn block_sum(x: &[f32]) -> f64 {
        let (blocks, tail) = x.as_chunks::<LANES>();
        let mut lanes = [0.0f64; LANES];
        for block in blocks {
            for j in 0..LANES {
                let x = f64::from(block[j]);
                lanes[j] = x.mul_add(x, lanes[j]);
            }
        }
        for (lane, &x) in lanes.iter_mut().zip(tail) {
            *lane = f64::from(x).mul_add(f64::from(x), *lane);
        }
        let mut half = LANES / 2;
        while half > 0 {
            for j in 0..half {
                lanes[j] += lanes[j + half];
            }
            half /= 2;
        }
        lanes[0]
    }
}

/// One sum per block of `block` values; the last may be shorter.
pub fn sums_of_squares(x: &[f32], block: usize) -> Vec<f64> {
    let level = level();
    let blocks = x.len().div_ceil(block);
    let mut sums = vec![0.0; blocks];
    let out = Shares::new(&mut sums);
    let serial = if x.len() < SERIAL_BELOW { blocks + 1 } else { 0 };
    pool().ranges(blocks, 1, serial, &|part| {
        // SAFETY: parts of different shares do not overlap.
        let sums = unsafe { out.slice(part.clone()) };
        for (sum, i) in sums.iter_mut().zip(part) {
            *sum = block_sum(level, &x[i * block..x.len().min((i + 1) * block)]);
        }
    });
    sums
}
