//! Sums of squares for the global gradient norm.

use super::gpu::gpu;
use super::memory::{Memory, View};
use super::shape::THREADS;
use crate::dtype::DType::F32;

/// Blocks of values per block of threads, one per warp.
const BLOCKS: usize = THREADS / 32;

/// Writes one f64 sum per block of `block` values of `x` (f32; the last block may be shorter) to `sums`, from number
/// `first` on. The bits are those of the CPU. The host does not wait, so several runs can be read back together.
pub fn sums_into(x: View, block: usize, sums: &mut Memory, first: usize) {
    let blocks = x.len().div_ceil(block);
    let args = [x.arg(F32), sums.arg_mut(), first.into(), x.len().into(), block.into(), blocks.into()];
    gpu().launch("norm_squares", [blocks.div_ceil(BLOCKS), 1, 1], THREADS, 0, &args);
}
