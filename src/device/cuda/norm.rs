//! Sums of squares for the global gradient norm.

use super::gpu::gpu;
use super::memory::{Memory, View};
use super::shape::THREADS;
use crate::dtype::DType::F32;

/// Blocks of values that a block of threads takes: a warp each.
const BLOCKS: usize = THREADS / 32;

/// One f64 sum per block of `block` values of `x` (f32; the last block may be shorter), with the bits of the CPU's, into `sums` from
/// number `first` on, without waiting: for several runs that are read back together.
///
/// # Panics
/// If `block` is 0, or `sums` is too short.
pub fn sums_into(x: View, block: usize, sums: &mut Memory, first: usize) {
    assert!(block > 0, "norm::sums_into: blocks of 0 values");
    let blocks = x.len().div_ceil(block);
    let room = sums.bytes() / 8;
    assert!(first + blocks <= room, "norm::sums_into: {blocks} sums from {first} on into {room}");
    let args = [x.arg(F32), sums.arg_mut(), first.into(), x.len().into(), block.into(), blocks.into()];
    gpu().launch("norm_squares", [blocks.div_ceil(BLOCKS), 1, 1], THREADS, 0, &args);
}
