//! A further logit without a value in the softmax of each head, after attention over keys.

use super::lanes;
use super::pool::{Shares, pool};
use crate::device::simd::{level, leveled};

/// The number of values below which one thread computes all rows.
const SERIAL_BELOW: usize = 1 << 13;

/// o (t, h*e) /= 1 + exp(s - l) and l (t, h) = ln(exp l + exp s), for the sinks s (h).
pub fn forward(o: &mut [f32], lse: &mut [f32], sinks: &[f32]) {
    let e = o.len() / lse.len().max(1);
    assert_eq!(o.len(), lse.len() * e);
    let small = o.len() < SERIAL_BELOW;
    let o = Shares::new(o);
    pool().rows(lse, sinks.len(), small, &|row, lse| {
        for (h, (l, s)) in lse.iter_mut().zip(sinks).enumerate() {
            let at = (row * sinks.len() + h) * e;
            // SAFETY: each head of a row has its own columns within o, which outlives the call.
            let o = unsafe { o.slice(at..at + e) };
            let share = 1.0 / (1.0 + (s - *l).exp());
            for o in o {
                *o *= share;
            }
            *l = l.max(*s) + (-(s - *l).abs()).exp().ln_1p();
        }
    });
}

leveled! {
    fn dot(x: &[f32], w: &[f32]) -> f32 {
        lanes::dot::<16>(x, w)
    }
}

/// d_s (h) -= sum_t exp(s - l[t]) d_o[t].o[t], t ascending, from the o and l of `forward`.
pub fn backward([o, lse, d_o]: [&[f32]; 3], sinks: &[f32], slopes: &mut [f32]) {
    let (level, heads, e) = (level(), sinks.len(), o.len() / lse.len().max(1));
    assert!(o.len() == lse.len() * e && d_o.len() == o.len() && slopes.len() == heads);
    pool().parts(slopes, 1, o.len() < SERIAL_BELOW, &|range, slopes| {
        for (h, slope) in range.zip(slopes) {
            let of_row = |row: &[f32], at: usize| {
                let at = (at * heads + h) * e..(at * heads + h + 1) * e;
                f64::from((sinks[h] - row[h]).exp() * dot(level, &d_o[at.clone()], &o[at]))
            };
            let sum: f64 = lse.chunks_exact(heads).enumerate().map(|(at, row)| of_row(row, at)).sum();
            *slope -= sum as f32;
        }
    });
}
