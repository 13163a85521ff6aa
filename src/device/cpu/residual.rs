//! y += x

use super::pool::{Shares, pool};

/// Elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 14;

pub fn add(x: &[f32], y: &mut [f32]) {
    let out = Shares::new(y);
    pool().ranges(x.len(), 1024, SERIAL_MAX, &|range| {
        // SAFETY: ranges of different shares do not overlap and lie in 0..x.len(), the length of y.
        let y = unsafe { out.slice(range.clone()) };
        y.iter_mut().zip(&x[range]).for_each(|(y, x)| *y += x);
    });
}
