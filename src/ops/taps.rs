//! Weighted sums of rows of a table: x[r] += sum_i weight[r][i] table[row[r][i]], such as a learned grid of positions that
//! is resampled. No GPU kernel supports it.

use crate::device::cpu;
use crate::tensor::{Layout, Tensor, Weight, WeightMut};

/// Rows of a table and their weights: equally many for each row of x.
#[derive(Clone, Debug, Default)]
pub struct Taps {
    pub rows: Vec<u32>,
    pub weights: Vec<f32>,
}

/// x (t, d), table (n, d) in row layout.
pub fn forward(table: Weight, taps: &Taps, x: &mut Tensor) {
    check((table.n, table.k, table.layout), taps, x);
    cpu::taps::forward(table.values.f32(), table.k, (&taps.rows, &taps.weights), x.data_mut());
}

/// dtable[row[r][i]] += weight[r][i] dx[r]
pub fn backward(dx: &Tensor, taps: &Taps, dtable: WeightMut) {
    check((dtable.n, dtable.k, dtable.layout), taps, dx);
    cpu::taps::backward(dx.data(), dtable.k, (&taps.rows, &taps.weights), dtable.values.f32());
}

fn check((n, k, layout): (usize, usize, Layout), Taps { rows, weights }: &Taps, x: &Tensor) {
    assert!(
        rows.len() == weights.len() && rows.len().is_multiple_of(x.rows().max(1)) && x.width() == k,
        "taps: {} rows and {} weights do not fit ({}, {})",
        rows.len(),
        weights.len(),
        x.rows(),
        x.width()
    );
    assert!(layout == Layout::Row && rows.iter().all(|row| (*row as usize) < n), "taps: a row of {n} in row layout");
}
