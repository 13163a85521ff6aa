//! Sums of squares: for the global gradient norm, and for the norms of matrices.

use crate::device::cpu::norm as cpu;
use crate::device::cuda::{self, Memory};
use crate::device::null;
use crate::dtype::DType;
use crate::tensor::{Flat, Slice};

/// The number of values that `sum_of_squares` sums at a time, and of those with a sum of their own.
const PIECE: usize = 1 << 20;
const BLOCK: usize = 4096;

/// The f64 sum of the squares of values of any type. bf16 values are widened a few MiB at a time.
pub fn sum_of_squares(x: Slice) -> f64 {
    let of_piece = |x: Slice| -> f64 {
        let squares = match x {
            Slice::Bf16(bits) => {
                let wide: Vec<f32> = bits.iter().map(|x| f32::from_bits(u32::from(*x) << 16)).collect();
                sums_of_squares(&wide[..], BLOCK)
            }
            Slice::Cuda(bits) if bits.dtype() == DType::Bf16 => {
                let mut wide = Flat::on_gpu(DType::F32, bits.len());
                cuda::copy::cast(bits, wide.all_mut().cuda());
                sums_of_squares(wide.all(), BLOCK)
            }
            x => sums_of_squares(x, BLOCK),
        };
        squares.iter().sum()
    };
    (0..x.len()).step_by(PIECE).map(|start| of_piece(x.part(start..(start + PIECE).min(x.len())))).sum()
}

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
