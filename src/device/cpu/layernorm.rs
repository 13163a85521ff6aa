//! y = (x - mean) * rstd * w + b over rows.

use super::lanes;
use super::pool::{Shares, pool};
use super::scratch::with_scratch;
use crate::device::null;
use crate::device::simd::{level, leveled};

/// The number of elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 14;
/// Lanes of a sum over a row, for every vector width.
const LANES: usize = 32;
/// The number of rows whose parts of dw and db are summed together. Parts are added in order.
const CHUNK: usize = 64;

leveled! {
    fn forward_rows(x: &[f32], w: &[f32], b: &[f32], eps: f32, y: &mut [f32], stats: &mut [f32]) {
        let n = w.len();
        for ((x, y), stats) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)).zip(stats.chunks_exact_mut(2)) {
            let mean = lanes::sum::<f32, LANES>(x, |sum, x| sum + x) / n as f32;
            let variance = lanes::sum::<f32, LANES>(x, |sum, x| sum + (x - mean) * (x - mean)) / n as f32;
            let rstd = 1.0 / (variance + eps).sqrt();
            (stats[0], stats[1]) = (mean, rstd);
            for (((y, x), w), b) in y.iter_mut().zip(x).zip(w).zip(b) {
                *y = (x - mean) * rstd * w + b;
            }
        }
    }
}

/// x, y (t, n) with n = w.len() = b.len(); stats (t, 2): mean and rstd.
pub fn forward(x: &[f32], [w, b]: [&[f32]; 2], eps: f32, y: &mut [f32], stats: &mut [f32]) {
    let n = w.len();
    assert!(b.len() == n && y.len() == x.len() && stats.len() * n == 2 * x.len());
    let level = level();
    let (y, stats_of) = (Shares::new(y), Shares::new(stats));
    pool().ranges(x.len() / n, 1, x.len() < SERIAL_MAX, &|rows| {
        let values = rows.start * n..rows.end * n;
        // SAFETY: these rows belong to this share alone; y has the length of x, stats two values per row.
        let (y, stats) = unsafe { (y.slice(values.clone()), stats_of.slice(2 * rows.start..2 * rows.end)) };
        forward_rows(level, &x[values], w, b, eps, y, stats);
    });
}

leveled! {
    fn backward_rows(x: &[f32], w: &[f32], stats: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [f32], db: &mut [f32]) {
        let n = w.len();
        let rows = x.chunks_exact(n).zip(dy.chunks_exact(n)).zip(dx.chunks_exact_mut(n)).zip(stats.chunks_exact(2));
        for (((x, dy), dx), stats) in rows {
            let (mean, rstd) = (stats[0], stats[1]);
            let (mut of_slope, mut of_pull) = ([0.0f32; LANES], [0.0f32; LANES]);
            for (i, ((x, dy), w)) in x.iter().zip(dy).zip(w).enumerate() {
                of_slope[i % LANES] += w * dy;
                of_pull[i % LANES] += w * dy * ((x - mean) * rstd);
            }
            let (slope, pull) = (lanes::fold(of_slope) / n as f32, lanes::fold(of_pull) / n as f32);
            let each = dx.iter_mut().zip(dw.iter_mut()).zip(db.iter_mut()).zip(x).zip(dy).zip(w);
            for (((((dx, dw), db), x), dy), w) in each {
                let normed = (x - mean) * rstd;
                *dx += rstd * (w * dy - slope - normed * pull);
                *dw += dy * normed;
                *db += dy;
            }
        }
    }
}

/// dx (t, n) +=, dw (n) +=, db (n) +=.
pub fn backward([x, w, stats, dy]: [&[f32]; 4], dx: &mut [f32], dw: &mut [f32], db: &mut [f32]) {
    let n = w.len();
    assert!(dy.len() == x.len() && dx.len() == x.len() && stats.len() * n == 2 * x.len());
    assert!(dw.len() == n && db.len() == n);
    let rows = x.len() / n;
    let chunks = rows.div_ceil(CHUNK);
    let level = level();
    if null::is_active() {
        return;
    }
    with_scratch(2 * chunks * n, |parts| {
        parts.fill(0.0);
        let (dx, parts_of) = (Shares::new(dx), Shares::new(parts));
        pool().ranges(chunks, 1, x.len() < SERIAL_MAX, &|chunks| {
            for chunk in chunks {
                let rows = chunk * CHUNK..((chunk + 1) * CHUNK).min(rows);
                let values = rows.start * n..rows.end * n;
                // SAFETY: chunks of different shares do not overlap; dx has the length of x, parts 2 n values a chunk.
                let (dx, part) =
                    unsafe { (dx.slice(values.clone()), parts_of.slice(2 * chunk * n..2 * (chunk + 1) * n)) };
                let (dw, db) = part.split_at_mut(n);
                let stats = &stats[2 * rows.start..2 * rows.end];
                backward_rows(level, &x[values.clone()], w, stats, &dy[values], dx, dw, db);
            }
        });
        for part in parts.chunks_exact(2 * n) {
            dw.iter_mut().zip(&part[..n]).for_each(|(dw, part)| *dw += part);
            db.iter_mut().zip(&part[n..]).for_each(|(db, part)| *db += part);
        }
    });
}
