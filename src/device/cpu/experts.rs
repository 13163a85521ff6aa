//! What joins the rows of experts with those of tokens: weighted sums over a token's experts, and their gradients.

use super::lanes;
use super::matmul::Addend;
use super::pool::{Shares, pool};
use super::scratch::with_scratch;
use crate::device::simd::{level, leveled};

/// The number of values below which one thread computes all rows.
const SERIAL_BELOW: usize = 1 << 13;
/// Lanes of a sum over a row, for every vector width.
const LANES: usize = 32;

leveled! {
    fn add_weighted(sum: &mut [f32], y: &[f32], weight: f32) {
        sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += y * weight);
    }
}

leveled! {
    fn add_row(x: &mut [f32], sum: &[f32]) {
        x.iter_mut().zip(sum).for_each(|(x, sum)| *x += sum);
    }
}

/// x[t] = addend + sum_i weights[t][i] y[places[t][i]], i ascending from 0 in f32. Without weights they are 1.
pub fn combine(y: &[f32], width: usize, places: &[u32], weights: Option<&[f32]>, addend: Addend, x: &mut [f32]) {
    let t = x.len() / width;
    let k = places.len() / t.max(1);
    assert!(x.len() == t * width && places.len() == t * k && weights.is_none_or(|w| w.len() == places.len()));
    let level = level();
    let out = Shares::new(x);
    let of_row = |row: usize, sum: &mut [f32]| {
        sum.fill(0.0);
        for i in row * k..(row + 1) * k {
            let from = places[i] as usize * width;
            add_weighted(level, sum, &y[from..from + width], weights.map_or(1.0, |w| w[i]));
        }
        let at = row * width..(row + 1) * width;
        // SAFETY: rows do not overlap and lie within x, which outlives the call.
        let x = unsafe { out.slice(at.clone()) };
        match addend {
            Addend::Nothing => x.copy_from_slice(sum),
            Addend::Result => add_row(level, x, sum),
            Addend::Values(c) => {
                x.copy_from_slice(&c[at]);
                add_row(level, x, sum);
            }
        }
    };
    pool().ranges(t, 1, y.len() < SERIAL_BELOW, &|rows| {
        with_scratch(width, |sum| rows.for_each(|row| of_row(row, sum)));
    });
}

leveled! {
    fn weigh_row(act: &mut [f32], dact: &mut [f32], weight: f32) -> f32 {
        let slope = lanes::dot::<LANES>(act, dact);
        for x in act.iter_mut().chain(dact) {
            *x *= weight;
        }
        slope
    }
}

/// The gradients of y = g W act from `dact` = W^T dy, for rows with weights g: dg = act dact, then dact and act are
/// multiplied by g. dy^T (g act) is the gradient of W.
pub fn weigh(act: &mut [f32], dact: &mut [f32], width: usize, weights: &[f32], dweights: &mut [f32]) {
    let rows = weights.len();
    assert!([act.len(), dact.len()] == [rows * width; 2] && dweights.len() == rows);
    let level = level();
    let [act, dact] = [act, dact].map(Shares::new);
    pool().parts(dweights, 16, rows * width < SERIAL_BELOW, &|range, dweights| {
        for (row, dweight) in range.zip(dweights) {
            let at = row * width..(row + 1) * width;
            // SAFETY: rows do not overlap and lie within both, which outlive the call.
            let (act, dact) = unsafe { (act.slice(at.clone()), dact.slice(at)) };
            *dweight = weigh_row(level, act, dact, weights[row]);
        }
    });
}
