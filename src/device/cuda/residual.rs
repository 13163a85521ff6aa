//! y += x

use super::gpu::gpu;
use super::memory::{View, ViewMut};
use super::shape::check_aligned;
use crate::dtype::DType;

/// Values of one block: 256 threads, eight each.
const BLOCK_VALUES: usize = 2048;

/// y = y + x, each sum rounded to bf16 once; lengths are multiples of 8.
pub fn add(x: View, mut y: ViewMut) {
    assert!(x.len() == y.len() && x.len().is_multiple_of(8), "residual: {} values to {}", x.len(), y.len());
    let args = [x.arg(DType::Bf16), y.arg(DType::Bf16), x.len().into()];
    check_aligned("residual", &args[..2]);
    gpu().launch("residual_add", [x.len().div_ceil(BLOCK_VALUES), 1, 1], 256, 0, &args);
}
