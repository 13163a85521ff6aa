//! Sums of squares for the global gradient norm.

use crate::device::cpu::norm as cpu;
use crate::device::cuda;
use crate::tensor::Slice;

/// One f64 sum per block of `block` values of `x` (the last may be shorter), each in one fixed order.
pub fn sums_of_squares<'a>(x: impl Into<Slice<'a>>, block: usize) -> Vec<f64> {
    assert!(block > 0, "norm::sums_of_squares: blocks of 0 values");
    match x.into() {
        Slice::Cpu(x) => cpu::sums_of_squares(x, block),
        Slice::Cuda(x) => cuda::norm::sums_of_squares(x, block),
    }
}
