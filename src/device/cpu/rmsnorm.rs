//! y = x * rstd * w over groups of w.len() values.

use super::pool::{Shares, pool};
use std::ops::Range;

/// Elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 14;
/// Lanes of a sum over a group, whatever the vector width of the machine.
const LANES: usize = 32;
/// Tokens whose part of dw is summed together; parts are added in order.
const CHUNK: usize = 64;

/// sum_i f(i), in lanes i % LANES, each ascending, folded by halves.
#[inline(always)]
fn sum(len: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = len / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(at + lane);
        }
    }
    for at in whole..len {
        lanes[at - whole] += f(at);
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// x, y (groups, n) with n = w.len(); rstd (groups).
pub fn forward(x: &[f32], w: &[f32], eps: f32, y: &mut [f32], rstd: &mut [f32]) {
    let n = w.len();
    let (y, rstd) = (Shares::new(y), Shares::new(rstd));
    pool().ranges(x.len() / n, 1, SERIAL_MAX / n, &|groups| {
        for group in groups {
            let x = &x[group * n..(group + 1) * n];
            // SAFETY: this group belongs to this share alone; y has the length of x, rstd a value per group.
            let (y, rstd) = unsafe { (y.slice(group * n..(group + 1) * n), &mut *rstd.ptr().add(group)) };
            *rstd = 1.0 / (sum(n, |i| x[i] * x[i]) / n as f32 + eps).sqrt();
            for i in 0..n {
                y[i] = x[i] * *rstd * w[i];
            }
        }
    });
}

/// dx (t, width) +=, dw (n) +=; width a multiple of n.
pub fn backward(x: &[f32], width: usize, w: &[f32], rstd: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
    let n = w.len();
    let rows = x.len() / width;
    let chunks = rows.div_ceil(CHUNK);
    let mut parts = vec![0.0f32; chunks * n];
    let (dx, parts_of) = (Shares::new(dx), Shares::new(&mut parts));
    let chunk_of = |chunk: usize| chunk * CHUNK * width / n..((chunk + 1) * CHUNK).min(rows) * width / n;
    pool().ranges(chunks, 1, SERIAL_MAX.div_ceil(CHUNK * width), &|chunks| {
        for chunk in chunks {
            let groups: Range<usize> = chunk_of(chunk);
            // SAFETY: chunks of different shares do not overlap; parts has n values a chunk.
            let part = unsafe { parts_of.slice(chunk * n..(chunk + 1) * n) };
            for group in groups {
                let at = group * n..(group + 1) * n;
                // SAFETY: the group lies in this chunk, which belongs to this share alone; dx has the length of x.
                let dx = unsafe { dx.slice(at.clone()) };
                backward_group(&x[at.clone()], w, rstd[group], &dy[at], dx, part);
            }
        }
    });
    for part in parts.chunks_exact(n) {
        dw.iter_mut().zip(part).for_each(|(dw, part)| *dw += part);
    }
}

#[inline(always)]
fn backward_group(x: &[f32], w: &[f32], rstd: f32, dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
    let n = w.len();
    let mean = sum(n, |i| w[i] * dy[i] * x[i]) / n as f32;
    let pull = mean * rstd * rstd;
    for i in 0..n {
        dx[i] += rstd * (w[i] * dy[i] - x[i] * pull);
        dw[i] += dy[i] * (x[i] * rstd);
    }
}
