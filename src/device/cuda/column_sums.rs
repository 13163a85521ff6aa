//! Gradients of vectors: each block writes the sum of its rows, and these sums are then added in a fixed order.

use super::gpu::gpu;
use super::memory::{Memory, ViewMut};
use super::shape::count;
use crate::dtype::DType;

/// Columns of a block, one per lane.
const COLUMNS: usize = 32;

/// y[c] += the sum over the first `blocks` rows of `parts`, rows of y.len() f32 values.
pub(super) fn add(op: &str, parts: &Memory, blocks: usize, mut y: ViewMut) {
    let columns = y.len();
    let args = [parts.arg(), y.arg(DType::F32), count(op, blocks), count(op, columns)];
    gpu().launch("parts_add", [columns.div_ceil(COLUMNS), 1, 1], 1024, 0, &args);
}
