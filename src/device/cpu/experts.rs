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

/// The group of row `row`. The rows of group e are `ends[e]..ends[e + 1]`.
fn group_of(ends: &[usize], row: usize) -> usize {
    ends.partition_point(|end| *end <= row) - 1
}

/// y[i] += b_e for the rows of group e.
pub fn add_bias(bias: &[&[f32]], ends: &[usize], y: &mut [f32]) {
    let (level, len) = (level(), y.len());
    assert!(bias.len() + 1 == ends.len() && bias.iter().all(|b| b.len() * ends[bias.len()] == len));
    pool().rows(y, bias[0].len(), len < SERIAL_BELOW, &|row, y| add_row(level, y, bias[group_of(ends, row)]));
}

leveled! {
    fn dot(x: &[f32], w: &[f32]) -> f32 {
        lanes::dot::<LANES>(x, w)
    }
}

/// slopes[i] += dy[i].b_e for the rows of group e.
pub fn add_bias_slopes(bias: &[&[f32]], ends: &[usize], dy: &[f32], slopes: &mut [f32]) {
    let (level, width) = (level(), bias[0].len());
    assert!(bias.len() + 1 == ends.len() && slopes.len() == ends[bias.len()] && dy.len() == slopes.len() * width);
    pool().parts(slopes, 16, dy.len() < SERIAL_BELOW, &|rows, slopes| {
        for (row, slope) in rows.zip(slopes) {
            *slope += dot(level, &dy[row * width..(row + 1) * width], bias[group_of(ends, row)]);
        }
    });
}

/// sums[e] = sum_i w_i dy[i] over the rows of group e, i ascending. Without weights they are 1.
pub fn bias_gradients(dy: &[f32], ends: &[usize], weights: Option<&[f32]>, sums: &mut [f32]) {
    let (level, groups) = (level(), ends.len() - 1);
    let width = sums.len() / groups;
    assert!(dy.len() == ends[groups] * width && weights.is_none_or(|w| w.len() == ends[groups]));
    pool().rows(sums, width, dy.len() < SERIAL_BELOW, &|e, sum| {
        sum.fill(0.0);
        for row in ends[e]..ends[e + 1] {
            add_weighted(level, sum, &dy[row * width..(row + 1) * width], weights.map_or(1.0, |w| w[row]));
        }
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
