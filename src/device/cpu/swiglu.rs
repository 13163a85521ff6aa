//! y = silu(gate) * up

use super::pool::{Shares, pool};

/// Elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 13;

pub fn forward(gate: &[f32], up: &[f32], y: &mut [f32]) {
    let out = Shares::new(y);
    pool().ranges(gate.len(), 1024, SERIAL_MAX, &|range| {
        // SAFETY: ranges of different shares do not overlap and lie in 0..gate.len(), the length of y.
        let y = unsafe { out.slice(range.clone()) };
        for ((y, gate), up) in y.iter_mut().zip(&gate[range.clone()]).zip(&up[range]) {
            *y = gate / (1.0 + (-gate).exp()) * up;
        }
    });
}

pub fn backward(gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
    let (dgate, dup) = (Shares::new(dgate), Shares::new(dup));
    pool().ranges(gate.len(), 1024, SERIAL_MAX, &|range| {
        // SAFETY: ranges of different shares do not overlap and lie in 0..gate.len(), the length of both.
        let (dgate, dup) = unsafe { (dgate.slice(range.clone()), dup.slice(range.clone())) };
        for (i, at) in range.enumerate() {
            let (gate, up, dy) = (gate[at], up[at], dy[at]);
            let sigmoid = 1.0 / (1.0 + (-gate).exp());
            dgate[i] = dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)));
            dup[i] = dy * (gate * sigmoid);
        }
    });
}
