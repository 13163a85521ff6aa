//! y = c tanh(x / c)

use super::exp::tanh;
use super::pool::{Shares, pool};
use crate::device::simd::{level, leveled};

/// The number of elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 13;

leveled! {
    fn forward_range(cap: f32, x: &mut [f32]) {
        for x in x {
            *x = cap * tanh(*x / cap);
        }
    }
}

/// x = c tanh(x / c), in place.
pub fn forward(cap: f32, x: &mut [f32]) {
    let (level, small) = (level(), x.len() < SERIAL_MAX);
    pool().parts(x, 1024, small, &|_, x| forward_range(level, cap, x));
}

leveled! {
    fn backward_range(cap: f32, y: &[f32], dy: &mut [f32]) {
        for (dy, y) in dy.iter_mut().zip(y) {
            let t = y / cap;
            // The slope at a masked logit, -inf, is 0.
            *dy *= (1.0 - t * t).max(0.0);
        }
    }
}

/// dx = dy (1 - (y / c)^2), in place of dy.
pub fn backward(cap: f32, y: &[f32], dy: &mut [f32]) {
    assert_eq!(y.len(), dy.len(), "softcap: the lengths differ");
    let (level, len) = (level(), y.len());
    let dy = Shares::new(dy);
    pool().ranges(len, 1024, len < SERIAL_MAX, &|range| {
        // SAFETY: ranges of different shares do not overlap and lie in 0..len.
        let dy = unsafe { dy.slice(range.clone()) };
        backward_range(level, cap, &y[range], dy);
    });
}
