//! y = sigmoid(g) x, with one g for each row of x.

use super::exp::exp;
use super::lanes;
use super::pool::{Shares, pool};
use crate::device::simd::{level, leveled};

/// The number of values below which one thread computes all rows.
const SERIAL_BELOW: usize = 1 << 13;
/// Lanes of a sum over a row, for every vector width.
const LANES: usize = 32;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

leveled! {
    fn forward_row(s: f32, x: &[f32], y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = s * x);
    }
}

/// g (t), x and y (t, width).
pub fn forward(gate: &[f32], x: &[f32], width: usize, y: &mut [f32]) {
    assert!(x.len() == gate.len() * width && y.len() == x.len());
    let level = level();
    pool().rows(y, width, x.len() < SERIAL_BELOW, &|i, y| {
        forward_row(level, sigmoid(gate[i]), &x[i * width..(i + 1) * width], y);
    });
}

leveled! {
    fn backward_row(s: f32, x: &[f32], dy: &mut [f32]) -> f32 {
        let slope = lanes::dot::<LANES>(x, dy);
        for dy in dy {
            *dy *= s;
        }
        slope * s * (1.0 - s)
    }
}

/// dx = s dy in place of dy, and dg = s (1 - s) sum(x dy), with s = sigmoid(g).
pub fn backward(gate: &[f32], x: &[f32], width: usize, dy: &mut [f32], dgate: &mut [f32]) {
    assert!(x.len() == gate.len() * width && dy.len() == x.len() && dgate.len() == gate.len());
    let (level, serial, dy) = (level(), x.len() < SERIAL_BELOW, Shares::new(dy));
    pool().parts(dgate, 16, serial, &|range, dgate| {
        for (i, dgate) in range.zip(dgate) {
            let at = i * width..(i + 1) * width;
            // SAFETY: rows do not overlap and lie within dy, which outlives the call.
            let dy = unsafe { dy.slice(at.clone()) };
            *dgate = backward_row(level, sigmoid(gate[i]), &x[at], dy);
        }
    });
}
