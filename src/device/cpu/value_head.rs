//! The dot product of each row with one vector: lane i mod 32 holds element i, lanes ascend, halves are added.

use super::lanes;
use super::pool::pool;
use crate::device::simd::{level, leveled};

const LANES: usize = 32;
/// The number of values below which one thread does all the work.
const SERIAL_BELOW: usize = 16 << 10;

leveled! {
    fn dot(x: &[f32], w: &[f32]) -> f32 {
        lanes::dot::<LANES>(x, w)
    }
}

leveled! {
    fn scaled(a: f32, w: &[f32], out: &mut [f32]) {
        for (out, &w) in out.iter_mut().zip(w) {
            *out = a * w;
        }
    }
}

leveled! {
    fn add_scaled(a: f32, x: &[f32], out: &mut [f32]) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = a.mul_add(x, *out);
        }
    }
}

pub fn forward(h: &[f32], w: &[f32], values: &mut [f32]) {
    let level = level();
    let (t, d) = (values.len(), w.len());
    pool().parts(values, 1, t * d < SERIAL_BELOW, &|rows, values| {
        for (value, i) in values.iter_mut().zip(rows) {
            *value = dot(level, &h[i * d..(i + 1) * d], w);
        }
    });
}

/// dh by rows; dw by columns, each column over the rows in order.
pub fn backward(h: &[f32], w: &[f32], dvalues: &[f32], dh: &mut [f32], dw: &mut [f32]) {
    let level = level();
    let (t, d) = (dvalues.len(), w.len());
    pool().rows(dh, d, t * d < SERIAL_BELOW, &|i, dh| scaled(level, dvalues[i], w, dh));
    pool().parts(dw, 16, t * d < SERIAL_BELOW, &|columns, dw| {
        for (i, &dvalue) in dvalues.iter().enumerate() {
            add_scaled(level, dvalue, &h[i * d + columns.start..i * d + columns.end], dw);
        }
    });
}
