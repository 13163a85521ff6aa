//! The rows of a chunk of logits: statistics, and the gradient in place. Rows are shared out over the pool.

use super::pool::pool;
use super::softmax::{RowStats, row_backward, row_stats};
use crate::device::simd::level;

/// Values of a chunk below which one thread does it all.
const SERIAL_BELOW: usize = 4096;

/// The statistics of each row of `logits` (rows, v).
pub fn stats(logits: &[f32], v: usize, inverse_temperature: f32) -> Vec<RowStats> {
    let level = level();
    let mut all = vec![RowStats { inverse_temperature, max: 0.0, sum_exp: 1.0, dot: 0.0 }; logits.len() / v];
    pool().parts(&mut all, 1, logits.len() < SERIAL_BELOW, &|part, stats| {
        for (stats, row) in stats.iter_mut().zip(logits[part.start * v..part.end * v].chunks_exact(v)) {
            *stats = row_stats(level, row, inverse_temperature);
        }
    });
    all
}

/// Turns each row of logits into its gradient (`softmax::row_backward`).
pub fn gradient(
    logits: &mut [f32],
    v: usize,
    stats: &[RowStats],
    targets: &[usize],
    dlogprobs: &[f32],
    dentropy: &[f32],
) {
    let level = level();
    pool().rows(logits, v, stats.len() * v < SERIAL_BELOW, &|i, row| {
        row_backward(level, row, &stats[i], targets[i], dlogprobs[i], dentropy[i]);
    });
}
