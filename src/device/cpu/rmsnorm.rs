//! y = x * rstd * (w + offset) over groups of w.len() values.

use super::lanes;
use super::pool::{Shares, pool};
use super::scratch::with_scratch;
use crate::device::null;
use crate::device::simd::{level, leveled};

/// The number of elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 14;
/// Lanes of a sum over a group, for every vector width.
const LANES: usize = 32;
/// The number of tokens whose part of dw is summed together. Parts are added in order.
const CHUNK: usize = 64;

/// sum_i x[i] (a[i] + offset) b[i], in lanes i % LANES, each ascending, folded by halves.
#[inline(always)]
fn sum_of_products(x: &[f32], a: &[f32], offset: f32, b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (x, x_rest) = x.as_chunks::<LANES>();
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for ((x, a), b) in x.iter().zip(a).zip(b) {
        for i in 0..LANES {
            sums[i] += x[i] * (a[i] + offset) * b[i];
        }
    }
    for (((sum, x), a), b) in sums.iter_mut().zip(x_rest).zip(a_rest).zip(b_rest) {
        *sum += x * (a + offset) * b;
    }
    lanes::fold(sums)
}

leveled! {
    fn forward_groups(x: &[f32], w: &[f32], offset: f32, eps: f32, y: &mut [f32], rstd: &mut [f32]) {
        let n = w.len();
        for ((x, y), rstd) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)).zip(rstd) {
            let scale = 1.0 / (lanes::sum::<f32, LANES>(x, |sum, x| sum + x * x) / n as f32 + eps).sqrt();
            *rstd = scale;
            for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                *y = x * scale * (w + offset);
            }
        }
    }
}

/// x, y (groups, n) with n = w.len(); rstd (groups).
pub fn forward(x: &[f32], w: &[f32], offset: f32, eps: f32, y: &mut [f32], rstd: &mut [f32]) {
    let n = w.len();
    assert!(y.len() == x.len() && rstd.len() * n == x.len());
    let level = level();
    let (y, rstd_of) = (Shares::new(y), Shares::new(rstd));
    pool().ranges(x.len() / n, 1, x.len() / n < SERIAL_MAX / n, &|groups| {
        let values = groups.start * n..groups.end * n;
        // SAFETY: these groups belong to this share alone; y has the length of x, rstd a value per group.
        let (y, rstd) = unsafe { (y.slice(values.clone()), rstd_of.slice(groups)) };
        forward_groups(level, &x[values], w, offset, eps, y, rstd);
    });
}

leveled! {
    fn backward_groups(x: &[f32], w: &[f32], offset: f32, rstd: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
        let n = w.len();
        let groups = x.chunks_exact(n).zip(dy.chunks_exact(n)).zip(dx.chunks_exact_mut(n)).zip(rstd);
        for (((x, dy), dx), &rstd) in groups {
            let pull = sum_of_products(x, w, offset, dy) / n as f32 * rstd * rstd;
            for ((((dx, dw), x), dy), w) in dx.iter_mut().zip(&mut *dw).zip(x).zip(dy).zip(w) {
                *dx += rstd * ((w + offset) * dy - x * pull);
                *dw += dy * (x * rstd);
            }
        }
    }
}

/// dx (t, width) +=, dw (n) +=; width a multiple of n.
pub fn backward(
    x: &[f32],
    width: usize,
    (w, offset): (&[f32], f32),
    rstd: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    dw: &mut [f32],
) {
    let n = w.len();
    assert!(dy.len() == x.len() && dx.len() == x.len() && rstd.len() * n == x.len());
    let rows = x.len() / width;
    let chunks = rows.div_ceil(CHUNK);
    let level = level();
    if null::is_active() {
        return;
    }
    with_scratch(chunks * n, |parts| {
        parts.fill(0.0);
        let (dx, parts_of) = (Shares::new(dx), Shares::new(parts));
        pool().ranges(chunks, 1, chunks * CHUNK * width < SERIAL_MAX, &|chunks| {
            for chunk in chunks {
                let values = chunk * CHUNK * width..((chunk + 1) * CHUNK).min(rows) * width;
                // SAFETY: chunks of different shares do not overlap; dx has the length of x, parts n values a chunk.
                let (dx, part) = unsafe { (dx.slice(values.clone()), parts_of.slice(chunk * n..(chunk + 1) * n)) };
                let rstd = &rstd[values.start / n..values.end / n];
                backward_groups(level, &x[values.clone()], w, offset, rstd, &dy[values], dx, part);
            }
        });
        for part in parts.chunks_exact(n) {
            dw.iter_mut().zip(part).for_each(|(dw, part)| *dw += part);
        }
    });
}
