//! Weighted sums of rows of a table.

use super::pool::pool;
use crate::device::null;

/// Values below which one thread does it all.
const SERIAL_MAX: usize = 1 << 14;

/// x[r] += sum_i weights[n r + i] table[rows[n r + i]], i ascending, in rows of `width` values.
pub fn forward(table: &[f32], width: usize, (rows, weights): (&[u32], &[f32]), x: &mut [f32]) {
    let n = rows.len() / (x.len() / width).max(1);
    pool().rows(x, width, x.len() < SERIAL_MAX, &|r, x| {
        for (row, weight) in rows[n * r..n * (r + 1)].iter().zip(&weights[n * r..]) {
            let from = &table[*row as usize * width..][..width];
            x.iter_mut().zip(from).for_each(|(x, value)| *x += weight * value);
        }
    });
}

/// dtable[rows[n r + i]] += weights[n r + i] dx[r], r and i ascending.
pub fn backward(dx: &[f32], width: usize, (rows, weights): (&[u32], &[f32]), dtable: &mut [f32]) {
    if null::is_active() {
        return;
    }
    let n = rows.len() / (dx.len() / width).max(1);
    for (r, dx) in dx.chunks_exact(width).enumerate() {
        for (row, weight) in rows[n * r..n * (r + 1)].iter().zip(&weights[n * r..]) {
            let to = &mut dtable[*row as usize * width..][..width];
            to.iter_mut().zip(dx).for_each(|(to, dx)| *to += weight * dx);
        }
    }
}
