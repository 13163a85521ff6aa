//! Values of weights in the working dtype: f32, or bf16 in `u16`; on a GPU always bf16.

use super::arena::Buffer;
use super::slice::{Slice, SliceMut};
use crate::device::cuda::Memory;
use crate::device::{Device, cpu, null};
use crate::dtype::DType;
use rayon::prelude::*;
use std::ops::Range;

/// Elements that one task copies.
const CHUNK: usize = 1 << 16;

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
    pub(super) fn range(&self) -> Range<usize> {
        self.at..self.at + (self.rows.max(1) - 1) * self.stride + self.width
    }
}

/// Copies rows of `width` values, which are strides apart.
pub(super) fn rows<T: Copy + Send + Sync>(
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

    pub fn slice(&self) -> Slice<'_> {
        match self {
            Self::F32(values) => Slice::F32(values),
            Self::Bf16(values, len) => Slice::Bf16(&bytemuck::cast_slice(values)[..*len]),
            Self::Cuda(memory) => Slice::Cuda(memory.view(DType::Bf16)),
        }
    }

    pub fn slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Self::F32(values) => SliceMut::F32(values),
            Self::Bf16(values, len) => SliceMut::Bf16(&mut bytemuck::cast_slice_mut(values)[..*len]),
            Self::Cuda(memory) => SliceMut::Cuda(memory.view_mut(DType::Bf16)),
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
