//! The causal convolution of each channel, then silu: y_t = silu(sum_j w_j x_(t - n + 1 + j)), with n taps w. Inputs
//! before a sequence are 0. The sum is one ascending chain over the taps.

use super::delta::{StatePages, StateRow};
use super::exp::exp;
use super::pool::{Shares, pool};
use crate::device::null;
use crate::device::simd::{level, leveled};

/// The number of values below which one thread does all the work.
const SERIAL_BELOW: usize = 8 << 10;

leveled! {
    fn add_tap(tap: &[f32], x: &[f32], sum: &mut [f32]) {
        for ((sum, &w), &x) in sum.iter_mut().zip(tap).zip(x) {
            *sum = w.mul_add(x, *sum);
        }
    }
}

leveled! {
    fn silu(x: &mut [f32]) {
        for x in x {
            *x /= 1.0 + exp(-*x);
        }
    }
}

leveled! {
    /// The slope of the sum from that of silu, in place: `slope` is dy.
    fn silu_backward(sum: &[f32], slope: &mut [f32]) {
        for (slope, &x) in slope.iter_mut().zip(sum) {
            let sigmoid = 1.0 / (1.0 + exp(-x));
            *slope *= sigmoid * (1.0 + x * (1.0 - sigmoid));
        }
    }
}

/// The taps (channels, n) as rows of channels.
fn taps_of(w: &[f32], channels: usize) -> Vec<f32> {
    let n = w.len() / channels;
    (0..w.len()).map(|i| w[i % channels * n + i / channels]).collect()
}

/// The sums of the tokens of `row`, before silu. `past` (n - 1, channels) are the inputs before them,
/// the latest last.
fn sums_of(x: &[f32], taps: &[f32], channels: usize, row: &StateRow, past: Option<&[f32]>, sums: &mut [f32]) {
    let (level, n) = (level(), taps.len() / channels);
    let sums = Shares::new(sums);
    pool().ranges(row.tokens, 1, row.tokens * channels < SERIAL_BELOW, &|tokens| {
        for i in tokens {
            let t = row.start + i;
            // SAFETY: the rows of different tokens do not overlap and lie within the sums.
            let sum = unsafe { sums.slice(t * channels..(t + 1) * channels) };
            sum.fill(0.0);
            for (j, tap) in taps.chunks_exact(channels).enumerate() {
                match ((i + j).checked_sub(n - 1), past) {
                    (Some(at), _) => add_tap(level, tap, &x[(row.start + at) * channels..][..channels], sum),
                    (None, Some(past)) => add_tap(level, tap, &past[(i + j) * channels..][..channels], sum),
                    (None, None) => {}
                }
            }
        }
    });
}

fn silu_all(x: &mut [f32]) {
    let level = level();
    let small = x.len() < SERIAL_BELOW;
    pool().parts(x, 16, small, &|_, x| silu(level, x));
}

/// x, y (t, channels); w (channels, n). The last n - 1 inputs of a row are kept in its page, from value `offset` on.
pub fn forward(
    x: &[f32],
    w: &[f32],
    channels: usize,
    rows: &[StateRow],
    mut pages: Option<(&mut StatePages, usize)>,
    y: &mut [f32],
) {
    assert_eq!(x.len(), y.len());
    if null::is_active() {
        return;
    }
    let taps = taps_of(w, channels);
    let kept = (taps.len() / channels - 1) * channels;
    for row in rows {
        let place = pages.as_mut().zip(row.page).map(|((pages, offset), page)| {
            let at = page as usize * pages.page_len + *offset;
            &mut pages.values[at..at + kept]
        });
        let past = place.as_deref().filter(|_| !row.is_first);
        sums_of(x, &taps, channels, row, past, y);
        if let Some(place) = place {
            let mut all = if row.is_first { vec![0.0; kept] } else { place.to_vec() };
            let fresh = &x[row.start * channels..(row.start + row.tokens) * channels];
            all.extend_from_slice(&fresh[fresh.len().saturating_sub(kept)..]);
            place.copy_from_slice(&all[all.len() - kept..]);
        }
    }
    silu_all(y);
}

/// The backward of whole sequences: dx is overwritten, dw += sum_t dsum_t x_(t - n + 1 + j). `slope` holds dy, and is
/// overwritten.
pub fn backward(
    x: &[f32],
    w: &[f32],
    channels: usize,
    rows: &[StateRow],
    slope: &mut [f32],
    dx: &mut [f32],
    dw: &mut [f32],
) {
    assert!([slope.len(), dx.len()] == [x.len(); 2] && dw.len() == w.len());
    if null::is_active() {
        return;
    }
    let (level, taps) = (level(), taps_of(w, channels));
    // dx has space for the sums.
    for row in rows {
        sums_of(x, &taps, channels, row, None, dx);
    }
    let small = x.len() < SERIAL_BELOW;
    pool().parts(slope, 16, small, &|range, slope| silu_backward(level, &dx[range], slope));
    let n = taps.len() / channels;
    let slope = &*slope;
    let (dx, mut dtaps) = (Shares::new(dx), vec![0.0f32; taps.len()]);
    let sums = Shares::new(&mut dtaps);
    pool().ranges(channels, 16, small, &|part| {
        let at = |t: usize| t * channels + part.start..t * channels + part.end;
        for row in rows {
            for i in 0..row.tokens {
                let t = row.start + i;
                // SAFETY: the channels of different shares do not overlap and lie within dx.
                let dx = unsafe { dx.slice(at(t)) };
                dx.fill(0.0);
                for j in 0..n {
                    let tap = j * channels + part.start..j * channels + part.end;
                    // Input t is under tap j of the sum of token t + n - 1 - j.
                    if i + n - 1 - j < row.tokens {
                        add_tap(level, &taps[tap.clone()], &slope[at(t + n - 1 - j)], dx);
                    }
                    if let Some(from) = (i + j).checked_sub(n - 1) {
                        // SAFETY: as above, for the taps.
                        let sum = unsafe { sums.slice(tap) };
                        add_tap(level, &slope[at(t)], &x[at(row.start + from)], sum);
                    }
                }
            }
        }
    });
    for (i, dw) in dw.iter_mut().enumerate() {
        *dw += dtaps[i % n * channels + i / n];
    }
}
