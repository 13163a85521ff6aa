//! Views of the values that an operation reads or writes, on either device.

use super::piece::{Piece, copy, rows};
use crate::device::Device;
use crate::device::cuda::{View, ViewMut, copy as on_gpu};
use crate::dtype::DType;
use std::ops::Range;

/// Weights, a norm's weight, a bias, or a gradient, which is f32.
#[derive(Clone, Copy, Debug)]
pub enum Slice<'a> {
    F32(&'a [f32]),
    /// Weights on the CPU: each u16 is a bf16. Matrices for GEMMs are in panel layout.
    Bf16(&'a [u16]),
    /// Values on a GPU. Weights are in row layout.
    Cuda(View<'a>),
}

#[derive(Debug)]
pub enum SliceMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
    Cuda(ViewMut<'a>),
}

impl<'a> Slice<'a> {
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

    pub fn f32(self) -> &'a [f32] {
        let Self::F32(values) = self else { panic!("the CPU needs f32 values, but these are on the GPU or in bf16") };
        values
    }

    pub fn cuda(self) -> View<'a> {
        let Self::Cuda(view) = self else { panic!("the GPU needs values that are on the CPU") };
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

    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[range]),
            Self::Bf16(values) => Self::Bf16(&values[range]),
            Self::Cuda(view) => Self::Cuda(view.part(range)),
        }
    }

    /// A copy of the values on the host: zeros on a null device.
    pub fn to_host(self) -> Vec<f32> {
        match self {
            Self::Cuda(view) => view.to_f32(),
            values => {
                let mut host = vec![0.0; values.len()];
                copy(values.f32(), &mut host);
                host
            }
        }
    }
}

impl<'a> SliceMut<'a> {
    pub fn f32(self) -> &'a mut [f32] {
        let Self::F32(values) = self else { panic!("the CPU needs f32 values, but these are on the GPU or in bf16") };
        values
    }

    pub fn cuda(self) -> ViewMut<'a> {
        let Self::Cuda(view) = self else { panic!("the GPU needs values that are on the CPU") };
        view
    }

    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    pub fn as_slice(&self) -> Slice<'_> {
        match self {
            Self::F32(values) => Slice::F32(values),
            Self::Bf16(values) => Slice::Bf16(values),
            Self::Cuda(view) => Slice::Cuda(view.as_view()),
        }
    }

    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(&mut values[range]),
            Self::Bf16(values) => Self::Bf16(&mut values[range]),
            Self::Cuda(view) => Self::Cuda(view.part(range)),
        }
    }

    /// The same values for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        match self {
            Self::F32(values) => SliceMut::F32(values),
            Self::Bf16(values) => SliceMut::Bf16(values),
            Self::Cuda(view) => SliceMut::Cuda(view.reborrow()),
        }
    }

    /// The values before `at`, and the values from `at` on.
    pub fn split_at(&mut self, at: usize) -> (SliceMut<'_>, SliceMut<'_>) {
        self.reborrow().split(at)
    }

    /// The same for as long as `self` lasts.
    pub fn split(self, at: usize) -> (SliceMut<'a>, SliceMut<'a>) {
        match self {
            Self::F32(values) => {
                let (before, behind) = values.split_at_mut(at);
                (SliceMut::F32(before), SliceMut::F32(behind))
            }
            Self::Bf16(values) => {
                let (before, behind) = values.split_at_mut(at);
                (SliceMut::Bf16(before), SliceMut::Bf16(behind))
            }
            Self::Cuda(view) => {
                let (before, behind) = view.split(at);
                (SliceMut::Cuda(before), SliceMut::Cuda(behind))
            }
        }
    }

    /// Sets all values to 0.
    pub fn clear(&mut self) {
        match self {
            Self::F32(values) => values.fill(0.0),
            Self::Bf16(values) => values.fill(0),
            Self::Cuda(view) => view.clear(),
        }
    }

    /// Copies `piece` of `from` to `place` here, whose stride may differ.
    pub fn copy_from(&mut self, from: Slice, piece: &Piece, place: &Piece) {
        let (piece, place) = match (piece.joined(), place.joined()) {
            (a, b) if a.rows == 1 && b.rows == 1 => (a, b),
            _ => (*piece, *place),
        };
        let sizes = [(piece.rows, piece.width), (place.rows, place.width)];
        assert_eq!(sizes[0], sizes[1], "{piece:?} to {place:?}");
        let strides = [piece.stride, place.stride];
        match (self.reborrow().part(place.range()), from.part(piece.range())) {
            (SliceMut::F32(to), Slice::F32(from)) => rows(from, to, strides, sizes[0]),
            (SliceMut::Bf16(to), Slice::Bf16(from)) => rows(from, to, strides, sizes[0]),
            (SliceMut::Cuda(mut to), Slice::Cuda(from)) if piece.rows == 1 => to.copy_from(from),
            (SliceMut::Cuda(to), Slice::Cuda(from)) => {
                on_gpu::columns(from, strides[0], to, strides[1], piece.rows, piece.width);
            }
            (to, from) => panic!("cannot copy {from:?} to {to:?}"),
        }
    }
}

impl<'a, T: AsRef<[f32]> + ?Sized> From<&'a T> for Slice<'a> {
    fn from(values: &'a T) -> Self {
        Self::F32(values.as_ref())
    }
}

impl<'a, T: AsMut<[f32]> + ?Sized> From<&'a mut T> for SliceMut<'a> {
    fn from(values: &'a mut T) -> Self {
        Self::F32(values.as_mut())
    }
}
