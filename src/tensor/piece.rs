//! Strided blocks of values, and their copies on the CPU.

use crate::device::null;
use rayon::prelude::*;
use std::ops::Range;

/// The number of elements that one task copies.
const CHUNK: usize = 1 << 16;

/// A strided block in a run of values: `rows` rows of `width` values, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub at: usize,
    pub stride: usize,
    pub rows: usize,
    pub width: usize,
}

impl Piece {
    pub fn len(&self) -> usize {
        self.rows * self.width
    }

    /// A contiguous piece of `len` values from `at` on.
    pub fn run(at: usize, len: usize) -> Self {
        Self { at, stride: len, rows: 1, width: len }
    }

    /// Joins rows without gaps into one row.
    #[must_use]
    pub fn joined(self) -> Self {
        if self.stride != self.width {
            return self;
        }
        Self { stride: self.len(), rows: 1, width: self.len(), ..self }
    }

    /// The range from its first value to its last.
    pub(super) fn range(&self) -> Range<usize> {
        self.at..self.at + (self.rows.max(1) - 1) * self.stride + self.width
    }
}

/// Sets the values of `to` from those of `from`, which are as many, by `change` on parts of both. Parts begin at
/// multiples of 65,536. Does nothing on a null device.
pub fn convert<T: Sync, U: Send>(from: &[T], to: &mut [U], change: impl Fn(&[T], &mut [U]) + Sync) {
    assert_eq!(from.len(), to.len(), "convert: the lengths differ");
    if !null::is_active() {
        to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| change(from, to));
    }
}

/// Copies values. Does nothing on a null device.
pub fn copy<T: Copy + Send + Sync>(from: &[T], to: &mut [T]) {
    convert(from, to, |from, to| to.copy_from_slice(from));
}

/// Copies rows of `width` values, which are strides apart.
pub(super) fn rows<T: Copy + Send + Sync>(
    from: &[T],
    to: &mut [T],
    [from_stride, to_stride]: [usize; 2],
    (rows, width): (usize, usize),
) {
    if rows == 1 {
        return copy(from, to);
    }
    if null::is_active() {
        return;
    }
    let each = (CHUNK / width.max(1)).max(1);
    let pairs = to.par_chunks_mut(to_stride).zip(from.par_chunks(from_stride)).with_min_len(each);
    pairs.for_each(|(to, from)| to[..width].copy_from_slice(&from[..width]));
}
