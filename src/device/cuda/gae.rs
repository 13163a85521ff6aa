//! Generalized advantage estimation over packed sequences, as `advantage::gae` computes it.

use super::gpu::gpu;
use super::memory::{Memory, View, ViewMut};
use super::shape::dim;
use crate::dtype::DType;

/// Sequences of one block, a warp each.
const SEQUENCES: usize = 4;

/// Advantages and returns of all tokens of `last_values.len()` sequences: `mask` (u8, a token each) is 0 where a token is no
/// step, `cu_seqlens` (u32) says where sequences start, and where the last ends.
pub fn scan(
    rewards: View,
    values: View,
    mask: &Memory,
    cu_seqlens: &Memory,
    last_values: View,
    gamma: f32,
    lambda: f32,
    mut advantages: ViewMut,
    mut returns: ViewMut,
) {
    const OP: &str = "gae::scan";
    let (tokens, sequences) = (rewards.len(), last_values.len());
    let lengths = [values.len(), advantages.len(), returns.len()];
    assert!(lengths == [tokens; 3] && mask.bytes() >= tokens, "{OP}: {lengths:?} values for {tokens} tokens");
    let starts = cu_seqlens.bytes() / size_of::<u32>();
    assert!(starts > sequences, "{OP}: {starts} starts for {sequences} sequences");
    let args = [
        rewards.arg(DType::F32),
        values.arg(DType::F32),
        mask.arg(),
        cu_seqlens.arg(),
        last_values.arg(DType::F32),
        dim(OP, sequences),
        gamma.into(),
        lambda.into(),
        advantages.arg(DType::F32),
        returns.arg(DType::F32),
    ];
    gpu().launch("gae_scan", [sequences.div_ceil(SEQUENCES), 1, 1], 32 * SEQUENCES, 0, &args);
}
