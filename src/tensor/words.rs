//! Weights as they lie in a stretch of a model's flat vector: f32, or bf16 in words of 16 bits; on a GPU always bf16.

use super::arena::Buffer;
use crate::device::Device;
use crate::device::cuda::{Memory, View, ViewMut, copy};
use crate::device::null;
use crate::dtype::DType;
use rayon::prelude::*;
use std::ops::Range;

/// Elements that one task copies.
const CHUNK: usize = 1 << 16;

#[derive(Clone, Copy, Debug)]
pub enum Words<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    Cuda(View<'a>),
}

#[derive(Debug)]
pub enum WordsMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
    Cuda(ViewMut<'a>),
}

/// Words and their memory.
#[derive(Debug)]
pub enum WordBuffer {
    F32(Buffer),
    /// Two a float, and how many.
    Bf16(Buffer, usize),
    Cuda(Memory),
}

/// Runs of values in a row of words: `rows` of `width` values, `stride` apart.
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

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `len` values from `at` on.
    pub fn run(at: usize, len: usize) -> Self {
        Self { at, stride: len, rows: 1, width: len }
    }

    /// Rows without gaps are one.
    #[must_use]
    pub fn joined(self) -> Self {
        if self.stride != self.width {
            return self;
        }
        Self { stride: self.len(), rows: 1, width: self.len(), ..self }
    }

    /// From its first value to its last.
    fn range(&self) -> Range<usize> {
        self.at..self.at + (self.rows.max(1) - 1) * self.stride + self.width
    }
}

impl Words<'_> {
    pub fn device(self) -> Device {
        if matches!(self, Self::Cuda(_)) { Device::Cuda } else { Device::Cpu }
    }

    pub fn len(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Cuda(view) => view.len(),
        }
    }

    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// # Panics
    /// If the range lies outside.
    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[range]),
            Self::Bf16(values) => Self::Bf16(&values[range]),
            Self::Cuda(view) => Self::Cuda(view.part(range)),
        }
    }
}

impl WordsMut<'_> {
    pub fn as_words(&self) -> Words<'_> {
        match self {
            Self::F32(values) => Words::F32(values),
            Self::Bf16(values) => Words::Bf16(values),
            Self::Cuda(view) => Words::Cuda(view.as_view()),
        }
    }

    /// # Panics
    /// If the range lies outside.
    pub fn part(&mut self, range: Range<usize>) -> WordsMut<'_> {
        match self {
            Self::F32(values) => WordsMut::F32(&mut values[range]),
            Self::Bf16(values) => WordsMut::Bf16(&mut values[range]),
            Self::Cuda(view) => WordsMut::Cuda(view.reborrow().part(range)),
        }
    }

    /// The values before `at`, and those from there on.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn split_at(&mut self, at: usize) -> (WordsMut<'_>, WordsMut<'_>) {
        match self {
            Self::F32(values) => {
                let (before, behind) = values.split_at_mut(at);
                (WordsMut::F32(before), WordsMut::F32(behind))
            }
            Self::Bf16(values) => {
                let (before, behind) = values.split_at_mut(at);
                (WordsMut::Bf16(before), WordsMut::Bf16(behind))
            }
            Self::Cuda(view) => {
                let (before, behind) = view.split_at(at);
                (WordsMut::Cuda(before), WordsMut::Cuda(behind))
            }
        }
    }

    /// All values become 0.
    pub fn clear(&mut self) {
        match self {
            Self::F32(values) => values.fill(0.0),
            Self::Bf16(values) => values.fill(0),
            Self::Cuda(view) => view.clear(),
        }
    }

    /// Copies `piece` of `from` to `place` here, whose rows may lie otherwise.
    ///
    /// # Panics
    /// If they are of different kinds or sizes, or one lies outside.
    pub fn copy_from(&mut self, from: Words, piece: &Piece, place: &Piece) {
        let (piece, place) = match (piece.joined(), place.joined()) {
            (a, b) if a.rows == 1 && b.rows == 1 => (a, b),
            _ => (*piece, *place),
        };
        let sizes = [(piece.rows, piece.width), (place.rows, place.width)];
        assert_eq!(sizes[0], sizes[1], "{piece:?} to {place:?}");
        let strides = [piece.stride, place.stride];
        match (self.part(place.range()), from.part(piece.range())) {
            (WordsMut::F32(to), Words::F32(from)) => rows(from, to, strides, sizes[0]),
            (WordsMut::Bf16(to), Words::Bf16(from)) => rows(from, to, strides, sizes[0]),
            (WordsMut::Cuda(mut to), Words::Cuda(from)) if piece.rows == 1 => to.copy_from(from),
            (WordsMut::Cuda(to), Words::Cuda(from)) => {
                copy::columns(from, strides[0], to, strides[1], piece.rows, piece.width);
            }
            (to, from) => panic!("{from:?} to {to:?}"),
        }
    }
}

fn rows<T: Copy + Send + Sync>(
    from: &[T],
    to: &mut [T],
    [from_stride, to_stride]: [usize; 2],
    (rows, width): (usize, usize),
) {
    if null::is_active() {
        return;
    }
    if rows == 1 {
        return to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
    }
    let each = (CHUNK / width.max(1)).max(1);
    let pairs = to.par_chunks_mut(to_stride).zip(from.par_chunks(from_stride)).with_min_len(each);
    pairs.for_each(|(to, from)| to[..width].copy_from_slice(&from[..width]));
}

impl WordBuffer {
    /// Contents unspecified.
    pub fn scratch(device: Device, dtype: DType, len: usize) -> Self {
        match (device, dtype) {
            (Device::Cuda, _) => Self::Cuda(Memory::scratch(len * DType::Bf16.bytes())),
            (Device::Cpu, DType::F32) => Self::F32(Buffer::scratch(len)),
            (Device::Cpu, DType::Bf16) => Self::Bf16(Buffer::scratch(len.div_ceil(2)), len),
        }
    }

    pub fn words(&self) -> Words<'_> {
        match self {
            Self::F32(values) => Words::F32(values),
            Self::Bf16(values, len) => Words::Bf16(&bytemuck::cast_slice(values)[..*len]),
            Self::Cuda(memory) => Words::Cuda(memory.view(DType::Bf16)),
        }
    }

    pub fn words_mut(&mut self) -> WordsMut<'_> {
        match self {
            Self::F32(values) => WordsMut::F32(values),
            Self::Bf16(values, len) => WordsMut::Bf16(&mut bytemuck::cast_slice_mut(values)[..*len]),
            Self::Cuda(memory) => WordsMut::Cuda(memory.view_mut(DType::Bf16)),
        }
    }
}
