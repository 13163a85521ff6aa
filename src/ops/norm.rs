//! Sums of squares for the global gradient norm.

/// One f64 sum per block of `block` values of `x` (the last may be shorter), each in one fixed order.
pub fn sums_of_squares(x: &[f32], block: usize) -> Vec<f64> {
    x.chunks(block).map(|block| block.iter().map(|&x| f64::from(x) * f64::from(x)).sum()).collect()
}
