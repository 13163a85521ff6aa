//! One AdamW update of flat slices. It is elementwise, so the bits do not depend on the division into slices.

use super::pool::{Shares, pool};
use crate::device::simd::{level, leveled};

/// The numbers of one update; t counts updates from 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    /// 1 - beta1^t
    pub bias1: f32,
    /// 1 - beta2^t
    pub bias2: f32,
    /// Multiplies the gradient first (clipping).
    pub grad_scale: f32,
}

leveled! {
    fn update(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], f: &Update, weight_decay: f32) {
        let f = *f;
        let (step_size, inverse_sqrt_bias2, decay) = (f.lr / f.bias1, 1.0 / f.bias2.sqrt(), f.lr * weight_decay);
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m.iter_mut()).zip(v.iter_mut()) {
            let g = g * f.grad_scale;
            let first = f.beta1.mul_add(*m, (1.0 - f.beta1) * g);
            let second = f.beta2.mul_add(*v, (1.0 - f.beta2) * g * g);
            let denominator = second.sqrt().mul_add(inverse_sqrt_bias2, f.eps);
            *m = first;
            *v = second;
            *p -= step_size.mul_add(first / denominator, decay * *p);
        }
    }
}

leveled! {
    fn blend(p: &[f32], beta: f32, average: &mut [f32]) {
        for (average, &p) in average.iter_mut().zip(p) {
            *average = beta.mul_add(*average, (1.0 - beta) * p);
        }
    }
}

pub fn average(p: &[f32], beta: f32, average: &mut [f32]) {
    let (level, len) = (level(), p.len());
    pool().parts(average, 1024, len < SERIAL_BELOW, &|range, part| blend(level, &p[range], beta, part));
}

/// The number of values below which one thread does all the work.
const SERIAL_BELOW: usize = 16 << 10;

pub fn step(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], numbers: &Update, weight_decay: f32) {
    let level = level();
    let len = p.len();
    let (p, m, v) = (Shares::new(p), Shares::new(m), Shares::new(v));
    pool().ranges(len, 1024, len < SERIAL_BELOW, &|part| {
        // SAFETY: parts of different shares do not overlap, and all slices have the length `len`.
        let (p, m, v) = unsafe { (p.slice(part.clone()), m.slice(part.clone()), v.slice(part.clone())) };
        update(level, p, &g[part], m, v, numbers, weight_decay);
    });
}
