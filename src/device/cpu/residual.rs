//! y += x

use super::pool::{Shares, pool};
use crate::device::simd::{level, leveled};

/// Elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 14;

leveled! {
    fn add_range(x: &[f32], y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
    }
}

/// # Panics
/// If the lengths differ.
pub fn add(x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    let level = level();
    let out = Shares::new(y);
    pool().ranges(x.len(), 1024, SERIAL_MAX, &|range| {
        // SAFETY: ranges of different shares do not overlap and lie in 0..x.len(), the length of y.
        let y = unsafe { out.slice(range.clone()) };
        add_range(level, &x[range], y);
    });
}
