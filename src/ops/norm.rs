//! Sums of squares for the global gradient norm.

use crate::device::cpu::norm as cpu;

/// One f64 sum per block of `block` values of `x` (the last may be shorter), each in one fixed order.
pub fn sums_of_squares(x: &[f32], block: usize) -> Vec<f64> {
    assert!(block > 0, "norm::sums_of_squares: blocks of 0 values");
    cpu::sums_of_squares(x, block)
}
