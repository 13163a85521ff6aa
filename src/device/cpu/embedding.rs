//! Rows of an embedding matrix, gathered and scattered.

use super::pool::{Shares, pool};

/// The number of elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 13;

/// The position of column c in row n: `start(n) + c * step`, except for interleaved pairs.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Index of a row's first value.
    pub start: usize,
    /// The distance of neighboring columns.
    pub step: usize,
}

/// Returns the position of the row of token t, if there is one.
pub type Rows<'a> = dyn Fn(usize) -> Option<Place> + Sync + 'a;

/// y[t][c] = w[place(token[t])][c], 0 if there is no such row.
pub fn gather(w: &[f32], width: usize, place: &Rows, y: &mut [f32]) {
    let small = y.len() < SERIAL_MAX;
    pool().rows(y, width, small, &|t, y| {
        let Some(Place { start, step }) = place(t) else { return y.fill(0.0) };
        y.iter_mut().zip(w[start..].iter().step_by(step)).for_each(|(y, w)| *y = *w);
    });
}

/// Same as `gather`, for bf16 panels: columns 2i and 2i+1 are neighbors, pairs are 2 * step apart.
pub fn gather_bf16(w: &[u16], width: usize, place: &Rows, y: &mut [f32]) {
    let small = y.len() < SERIAL_MAX;
    pool().rows(y, width, small, &|t, y| {
        let Some(Place { start, step }) = place(t) else { return y.fill(0.0) };
        for (y, w) in y.chunks_mut(2).zip(w[start..].chunks(2 * step)) {
            y.iter_mut().zip(w).for_each(|(y, &w)| *y = f32::from_bits(u32::from(w) << 16));
        }
    });
}

/// w[place(token[t])][c] += dy[t][c] if there is such a row, ascending t. Columns are divided over threads.
pub fn scatter(dy: &[f32], width: usize, place: &Rows, dw: &mut [f32]) {
    let rows = dy.len() / width;
    let len = dw.len();
    let out = Shares::new(dw);
    pool().ranges(width, 16, width * rows < SERIAL_MAX, &|columns| {
        for t in 0..rows {
            let Some(Place { start, step }) = place(t) else { continue };
            for c in columns.clone() {
                let at = start + c * step;
                assert!(at < len);
                // SAFETY: at < len, and each column belongs to one share alone.
                unsafe { *out.ptr().add(at) += dy[t * width + c] };
            }
        }
    });
}
