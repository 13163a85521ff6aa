//! y += x

use super::pool::pool;
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
    pool().parts(y, 1024, x.len() < SERIAL_MAX, &|range, y| add_range(level, &x[range], y));
}
