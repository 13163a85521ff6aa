//! Values of weights in the working dtype: f32, or bf16 in `u16`; on a GPU always bf16.

use super::arena::Buffer;
use crate::device::cuda::{Memory, View, ViewMut, copy};
use crate::device::{Device, cpu, null};
use crate::dtype::DType;
use rayon::prelude::*;
use std::ops::Range;

/// Elements that one task copies.
const CHUNK: usize = 1 << 16;

/// A run of weights, or the values of one parameter.
#[derive(Clone, Copy, Debug)]
pub enum WeightSlice<'a> {
    F32(&'a [f32]),
    /// Each u16 is a bf16. Matrices that are multiplied are in panel layout.
    Bf16(&'a [u16]),
    /// In row layout.
    Cuda(View<'a>),
}

#[derive(Debug)]
pub enum WeightSliceMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
    Cuda(ViewMut<'a>),
}

/// Weights that own their memory.
#[derive(Debug)]
pub enum WeightBuffer {
    F32(Buffer),
    /// Two bf16 in each f32 of the buffer, and the number of bf16.
    Bf16(Buffer, usize),
    Cuda(Memory),
}

/// A strided block within a run of values: `rows` rows of `width` values, `stride` apart.
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

impl<'a> WeightSlice<'a> {
    pub fn device(self) -> Device {
        if matches!(self, Self::Cuda(_)) { Device::Cuda } else { Device::Cpu }
    }

    pub fn dtype(self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::Bf16(_) => DType::Bf16,
            Self::Cuda(view) => view.dtype(),
        }
    }

    /// # Panics
    /// If the values are not f32 on the CPU.
    pub fn f32(self) -> &'a [f32] {
        let Self::F32(values) = self else { panic!("weights that are not f32 on the CPU") };
        values
    }

    /// # Panics
    /// If the values are not bf16 on the CPU.
    pub fn bf16(self) -> &'a [u16] {
        let Self::Bf16(values) = self else { panic!("weights that are not bf16 on the CPU") };
        values
    }

    /// # Panics
    /// If the values are on the CPU.
    pub fn cuda(self) -> View<'a> {
        let Self::Cuda(view) = self else { panic!("weights of the CPU are needed on the GPU") };
        view
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

impl<'a> WeightSliceMut<'a> {
    /// # Panics
    /// If the values are not f32 on the CPU.
    pub fn f32(self) -> &'a mut [f32] {
        let Self::F32(values) = self else { panic!("weights that are not f32 on the CPU") };
        values
    }

    /// # Panics
    /// If the values are not bf16 on the CPU.
    pub fn bf16(self) -> &'a mut [u16] {
        let Self::Bf16(values) = self else { panic!("weights that are not bf16 on the CPU") };
        values
    }

    /// # Panics
    /// If the values are on the CPU.
    pub fn cuda(self) -> ViewMut<'a> {
        let Self::Cuda(view) = self else { panic!("weights of the CPU are needed on the GPU") };
        view
    }

    pub fn as_slice(&self) -> WeightSlice<'_> {
        match self {
            Self::F32(values) => WeightSlice::F32(values),
            Self::Bf16(values) => WeightSlice::Bf16(values),
            Self::Cuda(view) => WeightSlice::Cuda(view.as_view()),
        }
    }

    /// # Panics
    /// If the range lies outside.
    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(&mut values[range]),
            Self::Bf16(values) => Self::Bf16(&mut values[range]),
            Self::Cuda(view) => Self::Cuda(view.part(range)),
        }
    }

    /// The same values for a shorter time.
    pub fn reborrow(&mut self) -> WeightSliceMut<'_> {
        match self {
            Self::F32(values) => WeightSliceMut::F32(values),
            Self::Bf16(values) => WeightSliceMut::Bf16(values),
            Self::Cuda(view) => WeightSliceMut::Cuda(view.reborrow()),
        }
    }

    /// The values before `at`, and those from there on.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn split_at(&mut self, at: usize) -> (WeightSliceMut<'_>, WeightSliceMut<'_>) {
        match self {
            Self::F32(values) => {
                let (before, behind) = values.split_at_mut(at);
                (WeightSliceMut::F32(before), WeightSliceMut::F32(behind))
            }
            Self::Bf16(values) => {
                let (before, behind) = values.split_at_mut(at);
                (WeightSliceMut::Bf16(before), WeightSliceMut::Bf16(behind))
            }
            Self::Cuda(view) => {
                let (before, behind) = view.split_at(at);
                (WeightSliceMut::Cuda(before), WeightSliceMut::Cuda(behind))
            }
        }
    }

    /// All values become 0.
    pub fn clear(self) {
        match self {
            Self::F32(values) => values.fill(0.0),
            Self::Bf16(values) => values.fill(0),
            Self::Cuda(mut view) => view.clear(),
        }
    }

    /// Copies `piece` of `from` to `place` here, whose rows may lie otherwise.
    ///
    /// # Panics
    /// If they are of different kinds or sizes, or one lies outside.
    pub fn copy_from(&mut self, from: WeightSlice, piece: &Piece, place: &Piece) {
        let (piece, place) = match (piece.joined(), place.joined()) {
            (a, b) if a.rows == 1 && b.rows == 1 => (a, b),
            _ => (*piece, *place),
        };
        let sizes = [(piece.rows, piece.width), (place.rows, place.width)];
        assert_eq!(sizes[0], sizes[1], "{piece:?} to {place:?}");
        let strides = [piece.stride, place.stride];
        match (self.reborrow().part(place.range()), from.part(piece.range())) {
            (WeightSliceMut::F32(to), WeightSlice::F32(from)) => rows(from, to, strides, sizes[0]),
            (WeightSliceMut::Bf16(to), WeightSlice::Bf16(from)) => rows(from, to, strides, sizes[0]),
            (WeightSliceMut::Cuda(mut to), WeightSlice::Cuda(from)) if piece.rows == 1 => to.copy_from(from),
            (WeightSliceMut::Cuda(to), WeightSlice::Cuda(from)) => {
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

impl WeightBuffer {
    /// Contents unspecified.
    pub fn scratch(device: Device, dtype: DType, len: usize) -> Self {
        match (device, dtype) {
            (Device::Cuda, _) => Self::Cuda(Memory::scratch(len * DType::Bf16.bytes())),
            (Device::Cpu, DType::F32) => Self::F32(Buffer::scratch(len)),
            (Device::Cpu, DType::Bf16) => Self::Bf16(Buffer::scratch(len.div_ceil(2)), len),
        }
    }

    pub fn slice(&self) -> WeightSlice<'_> {
        match self {
            Self::F32(values) => WeightSlice::F32(values),
            Self::Bf16(values, len) => WeightSlice::Bf16(&bytemuck::cast_slice(values)[..*len]),
            Self::Cuda(memory) => WeightSlice::Cuda(memory.view(DType::Bf16)),
        }
    }

    pub fn slice_mut(&mut self) -> WeightSliceMut<'_> {
        match self {
            Self::F32(values) => WeightSliceMut::F32(values),
            Self::Bf16(values, len) => WeightSliceMut::Bf16(&mut bytemuck::cast_slice_mut(values)[..*len]),
            Self::Cuda(memory) => WeightSliceMut::Cuda(memory.view_mut(DType::Bf16)),
        }
    }

    /// Zeros on the CPU and on a GPU.
    pub fn clear(&mut self) {
        match self {
            Self::F32(values) | Self::Bf16(values, _) => cpu::copy::fill(values, 0.0),
            Self::Cuda(memory) => memory.view_mut(DType::Bf16).clear(),
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Self::F32(values) | Self::Bf16(values, _) => size_of_val::<[f32]>(values),
            Self::Cuda(memory) => memory.bytes(),
        }
    }

    /// The buffer, where the values are on the CPU.
    pub fn buffer(&self) -> Option<&Buffer> {
        match self {
            Self::F32(values) | Self::Bf16(values, _) => Some(values),
            Self::Cuda(_) => None,
        }
    }

    /// As `buffer`.
    pub fn buffer_mut(&mut self) -> Option<&mut Buffer> {
        match self {
            Self::F32(values) | Self::Bf16(values, _) => Some(values),
            Self::Cuda(_) => None,
        }
    }
}
