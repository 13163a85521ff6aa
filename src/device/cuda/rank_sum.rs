//! Sums of the parts that the ranks of a group sent.

use super::gpu::{Arg, gpu};
use super::memory::{View, ViewMut};
use super::shape::{THREADS, dim, grid_of_eights};
use crate::dtype::DType;

/// Ranks that a tree may have: the kernel keeps a sum for each level.
const TREE_MAX: usize = 1 << 12;

/// The parts of the ranks: one every `stride` values. The part of this rank is elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    pub values: View<'a>,
    pub stride: usize,
    pub rank: usize,
    pub ranks: usize,
}

impl Parts<'_> {
    fn args(&self, op: &str, x: Arg, dtype: DType, len: usize) -> [Arg; 6] {
        let [rank, ranks] = [self.rank, self.ranks].map(|n| dim(op, n));
        [x, self.values.arg(dtype), self.stride.into(), rank, ranks, len.into()]
    }
}

/// x, this rank's part, becomes ((part 0 + part 1) + part 2) + ..., in f32, and rounded once if it is bf16.
pub fn in_order(parts: Parts, mut x: ViewMut) {
    const OP: &str = "rank_sum::in_order";
    let (len, dtype) = (x.len(), x.dtype());
    let kernel = match dtype {
        DType::F32 => "rank_sum_f32",
        DType::Bf16 => "rank_sum_bf16",
    };
    gpu().launch(kernel, grid_of_eights(len), THREADS, 0, &parts.args(OP, x.arg(dtype), dtype, len));
}

/// x, this rank's part, becomes ((part 0 + part 1) + (part 2 + part 3)) + ..., f32.
pub fn in_tree(parts: Parts, mut x: ViewMut) {
    const OP: &str = "rank_sum::in_tree";
    let len = x.len();
    let ranks = parts.ranks;
    assert!(ranks.is_power_of_two() && ranks <= TREE_MAX, "{OP}: ranks must be a power of two (got {ranks})");
    let args = parts.args(OP, x.arg(DType::F32), DType::F32, len);
    gpu().launch("rank_tree_f32", [len.div_ceil(THREADS), 1, 1], THREADS, 0, &args);
}
