//! Filling, copying and adding, shared out over the pool: one thread alone reaches a part of the memory's bandwidth.

use super::pool::{Shares, pool};
use crate::device::simd::{level, leveled};
use crate::dtype::round_bf16;

/// Values below which one thread does it all.
pub(super) const SERIAL_MAX: usize = 1 << 16;
/// Shares begin at whole cache lines.
const LINE: usize = 16;

pub fn fill(x: &mut [f32], value: f32) {
    let small = x.len() < SERIAL_MAX;
    pool().parts(x, LINE, small, &|_, part| part.fill(value));
}

pub fn copy(from: &[f32], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "copy: the lengths differ");
    pool().parts(to, LINE, from.len() < SERIAL_MAX, &|range, part| part.copy_from_slice(&from[range]));
}

leveled! {
    fn add_range(x: &[f32], y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
    }
}

/// y += x
pub fn add(x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "add: the lengths differ");
    let level = level();
    pool().parts(y, 1024, x.len() < SERIAL_MAX / 4, &|range, y| add_range(level, &x[range], y));
}

leveled! {
    fn add_scaled_range(s: f32, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += s * x;
        }
    }
}

/// y += s x
pub fn add_scaled(s: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "add_scaled: the lengths differ");
    let level = level();
    pool().parts(y, 1024, x.len() < SERIAL_MAX / 4, &|range, y| add_scaled_range(level, s, &x[range], y));
}

leveled! {
    fn scale_range(x: &mut [f32], s: f32) {
        for x in x {
            *x *= s;
        }
    }
}

/// x = s x
pub fn scale(s: f32, x: &mut [f32]) {
    let (level, small) = (level(), x.len() < SERIAL_MAX / 4);
    pool().parts(x, 1024, small, &|_, x| scale_range(level, x, s));
}

leveled! {
    fn round_range(x: &mut [f32]) {
        for x in x {
            *x = f32::from_bits(u32::from(round_bf16(*x)) << 16);
        }
    }
}

/// x = the nearest bf16 of x
pub fn round_to_bf16(x: &mut [f32]) {
    let (level, small) = (level(), x.len() < SERIAL_MAX / 4);
    pool().parts(x, 1024, small, &|_, x| round_range(level, x));
}

/// y[i] = x[rows[i]], rows of `width` values.
pub fn gather(x: &[f32], width: usize, rows: &[u32], y: &mut [f32]) {
    assert_eq!(y.len(), rows.len() * width, "gather: the output has another length");
    pool().rows(y, width, rows.len() * width < SERIAL_MAX, &|i, row| {
        let from = rows[i] as usize * width;
        row.copy_from_slice(&x[from..from + width]);
    });
}

/// The transpose of `gather`: x[rows[i]] += y[i].
pub fn scatter(y: &[f32], width: usize, rows: &[u32], x: &mut [f32]) {
    assert_eq!(y.len(), rows.len() * width, "scatter: the input has another length");
    assert!(rows.iter().all(|&row| (row as usize + 1) * width <= x.len()), "scatter: a row is out of range");
    // Two threads must not add to the same row.
    let ascending = rows.is_sorted_by(|a, b| a < b);
    let out = Shares::new(x);
    pool().ranges(rows.len(), 1, y.len() < SERIAL_MAX || !ascending, &|range| {
        for i in range {
            let to = rows[i] as usize * width;
            // SAFETY: rows lie within x, and those of different shares are different.
            let to = unsafe { out.slice(to..to + width) };
            to.iter_mut().zip(&y[i * width..(i + 1) * width]).for_each(|(x, y)| *x += y);
        }
    });
}

/// x[rows[i]] = y[i]; rows ascend.
pub fn place(y: &[f32], width: usize, rows: &[u32], x: &mut [f32]) {
    assert_eq!(y.len(), rows.len() * width, "place: the input has another length");
    assert!(rows.is_sorted_by(|a, b| a < b), "place: rows must ascend");
    assert!(rows.last().is_none_or(|&row| (row as usize + 1) * width <= x.len()), "place: a row is out of range");
    let out = Shares::new(x);
    pool().ranges(rows.len(), 1, y.len() < SERIAL_MAX, &|range| {
        for i in range {
            let to = rows[i] as usize * width;
            // SAFETY: rows lie within x, and all are different.
            unsafe { out.slice(to..to + width) }.copy_from_slice(&y[i * width..(i + 1) * width]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scatter_is_the_transpose_of_gather_also_if_a_row_occurs_twice() {
        let width = 300;
        let x: Vec<f32> = (0..500 * width).map(|i| i as f32).collect();
        for rows in [(0..499u32).collect::<Vec<_>>(), (0..499u32).map(|i| i / 2).collect()] {
            let mut y = vec![0.0; rows.len() * width];
            gather(&x, width, &rows, &mut y);
            let mut back = vec![0.0; x.len()];
            scatter(&y, width, &rows, &mut back);
            for (row, (back, x)) in back.chunks(width).zip(x.chunks(width)).enumerate() {
                let times = rows.iter().filter(|&&r| r as usize == row).count() as f32;
                assert!(back.iter().zip(x).all(|(b, x)| *b == times * x), "row {row}");
            }
        }
    }
}
