//! Rotary position embedding, in place.

use super::gpu::{Arg, gpu};
use super::memory::{Memory, ViewMut};
use super::shape::{THREADS, check_aligned, count, grid_of};
use crate::dtype::DType::Bf16;

/// Heads that share the table entries that a thread reads.
pub(super) const HEADS: usize = 4;

/// cos and sin of every position on the GPU, [position][e/2].
#[derive(Debug)]
pub struct Table {
    pub(super) head_dim: usize,
    cos: Memory,
    sin: Memory,
    /// The factor on queries at each position, if there is one.
    factors: Option<Memory>,
}

impl Table {
    /// The table of cos and sin, and of factors on queries, [position]; without them all are 1.
    ///
    /// # Panics
    /// If the two do not have the same number of whole rows, or half a head is not a multiple of sixteen bytes.
    pub fn new(head_dim: usize, cos: &[f32], sin: &[f32], factors: &[f32]) -> Self {
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(16) && cos.len() == sin.len(),
            "rope: the head dim must be a multiple of 16 (got {head_dim}), and cos ({}) as long as sin ({})",
            cos.len(),
            sin.len()
        );
        assert!(cos.len().is_multiple_of(head_dim / 2), "rope: {} angles do not fit head dim {head_dim}", cos.len());
        let rows = cos.len() / (head_dim / 2);
        assert!(factors.is_empty() || factors.len() == rows, "rope: {} factors for {rows} positions", factors.len());
        let factors = (!factors.is_empty()).then(|| Memory::from_values(factors));
        Self { head_dim, cos: Memory::from_values(cos), sin: Memory::from_values(sin), factors }
    }

    pub fn place(&self) -> Arg {
        self.cos.arg()
    }

    /// cos, sin and the factors, as arguments of kernels.
    pub(super) fn args(&self) -> [Arg; 3] {
        [self.cos.arg(), self.sin.arg(), self.factors.as_ref().map_or(Arg::Address(0), Memory::arg)]
    }
}

/// Rotates each head of q (t, heads * e) and k (t, kv_heads * e) by the angle of its row's position, in place; with
/// `back`, by the opposite angle (the transpose). q is multiplied by its position's factor. `positions` holds at least t u32, all below the table's end.
pub fn rotate(mut q: ViewMut, mut k: ViewMut, t: usize, positions: &Memory, table: &Table, back: bool) {
    const OP: &str = "rope";
    let (e, sign) = (table.head_dim, if back { -1.0 } else { 1.0 });
    if t == 0 {
        return;
    }
    let (heads, kv_heads) = (q.len() / (t * e), k.len() / (t * e));
    let grid = grid_of(OP, t * (heads + kv_heads).div_ceil(HEADS) * (e / 16));
    let [q, k] = [q.arg(Bf16), k.arg(Bf16)];
    check_aligned(OP, &[q, k]);
    let [rows, heads, kv_heads, half] = [t, heads, kv_heads, e / 2].map(|n| count(OP, n));
    let [cos, sin, factors] = table.args();
    let args = [q, k, positions.arg(), cos, sin, factors, Arg::F32(sign), rows, heads, kv_heads, half];
    gpu().launch("rope_rotate", grid, THREADS, 0, &args);
}
