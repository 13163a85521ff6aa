//! Sums of squares for the global gradient norm.

use crate::device::cpu::norm as cpu;
use crate::device::cuda::{self, Memory};
use crate::device::null;
use crate::tensor::Slice;

/// One f64 sum per block of `block` values of `x` (the last may be shorter), each in a fixed order.
pub fn sums_of_squares<'a>(x: impl Into<Slice<'a>>, block: usize) -> Vec<f64> {
    sums_of_each(&[x.into()], block)
}

/// `sums_of_squares` for several runs on one device, in order. The host waits for a GPU once. A null device returns
/// none, because billions of values would have millions of sums.
pub fn sums_of_each(runs: &[Slice], block: usize) -> Vec<f64> {
    assert!(block > 0, "norm::sums_of_squares: a block must have at least 1 value");
    // For a plan: clipping reads all gradients once.
    for run in runs {
        null::note(null::OPTIMIZER, 0.0, (size_of::<f32>() * run.len()) as f64);
    }
    if !matches!(runs.first(), Some(Slice::Cuda(_))) {
        if null::is_active() {
            return Vec::new();
        }
        return runs.iter().flat_map(|run| cpu::sums_of_squares(run.f32(), block)).collect();
    }
    let blocks: usize = runs.iter().map(|run| run.len().div_ceil(block)).sum();
    let mut sums = Memory::scratch(blocks * size_of::<f64>());
    let mut first = 0;
    for run in runs {
        cuda::norm::sums_into(run.cuda(), block, &mut sums, first);
        first += run.len().div_ceil(block);
    }
    if null::is_active() { Vec::new() } else { sums.read(blocks) }
}
