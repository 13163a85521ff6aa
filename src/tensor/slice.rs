//! Runs of values that an operation reads or adds to, on the device where they lie.

use super::arena::Buffer;
use crate::device::Device;
use crate::device::cuda::{View, ViewMut};
use std::ops::Range;

/// A norm's weight, a bias: f32 on the CPU, the view's dtype on a GPU.
#[derive(Clone, Copy, Debug)]
pub enum Slice<'a> {
    Cpu(&'a [f32]),
    Cuda(View<'a>),
}

/// The gradient of such a run: f32.
#[derive(Debug)]
pub enum SliceMut<'a> {
    Cpu(&'a mut [f32]),
    Cuda(ViewMut<'a>),
}

impl<'a> Slice<'a> {
    pub fn len(self) -> usize {
        match self {
            Self::Cpu(values) => values.len(),
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
            Self::Cpu(values) => Self::Cpu(&values[range]),
            Self::Cuda(view) => Self::Cuda(view.part(range)),
        }
    }

    pub fn device(self) -> Device {
        match self {
            Self::Cpu(_) => Device::Cpu,
            Self::Cuda(_) => Device::Cuda,
        }
    }

    /// # Panics
    /// If the values are on the GPU.
    pub fn cpu(self) -> &'a [f32] {
        match self {
            Self::Cpu(values) => values,
            Self::Cuda(view) => panic!("{view:?} is needed on the CPU"),
        }
    }

    /// # Panics
    /// If the values are on the CPU.
    pub fn cuda(self) -> View<'a> {
        match self {
            Self::Cuda(view) => view,
            Self::Cpu(values) => panic!("{} values are needed on the GPU", values.len()),
        }
    }

    /// The values on the host, wherever they lie.
    pub fn to_host(self) -> Vec<f32> {
        match self {
            Self::Cpu(values) => values.to_vec(),
            Self::Cuda(view) => view.to_f32(),
        }
    }
}

impl<'a> SliceMut<'a> {
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn as_slice(&self) -> Slice<'_> {
        match self {
            Self::Cpu(values) => Slice::Cpu(values),
            Self::Cuda(view) => Slice::Cuda(view.as_view()),
        }
    }

    /// The same values for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        match self {
            Self::Cpu(values) => SliceMut::Cpu(values),
            Self::Cuda(view) => SliceMut::Cuda(view.reborrow()),
        }
    }

    /// All values become 0.
    pub fn clear(&mut self) {
        match self {
            Self::Cpu(values) => values.fill(0.0),
            Self::Cuda(view) => view.clear(),
        }
    }

    /// The values before `at`, and those from there on.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn split_at(&mut self, at: usize) -> (SliceMut<'_>, SliceMut<'_>) {
        match self {
            Self::Cpu(values) => {
                let (before, behind) = values.split_at_mut(at);
                (SliceMut::Cpu(before), SliceMut::Cpu(behind))
            }
            Self::Cuda(view) => {
                let (before, behind) = view.split_at(at);
                (SliceMut::Cuda(before), SliceMut::Cuda(behind))
            }
        }
    }

    /// # Panics
    /// If the values are on the GPU.
    pub fn cpu(self) -> &'a mut [f32] {
        match self {
            Self::Cpu(values) => values,
            Self::Cuda(view) => panic!("{view:?} is needed on the CPU"),
        }
    }

    /// # Panics
    /// If the values are on the CPU.
    pub fn cuda(self) -> ViewMut<'a> {
        match self {
            Self::Cuda(view) => view,
            Self::Cpu(values) => panic!("{} values are needed on the GPU", values.len()),
        }
    }
}

impl<'a> From<&'a [f32]> for Slice<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self::Cpu(values)
    }
}

impl<'a> From<&'a Vec<f32>> for Slice<'a> {
    fn from(values: &'a Vec<f32>) -> Self {
        Self::Cpu(values)
    }
}

impl<'a> From<&'a Buffer> for Slice<'a> {
    fn from(values: &'a Buffer) -> Self {
        Self::Cpu(values)
    }
}

impl<'a> From<&'a mut Buffer> for SliceMut<'a> {
    fn from(values: &'a mut Buffer) -> Self {
        Self::Cpu(values)
    }
}

impl<'a> From<&'a mut [f32]> for SliceMut<'a> {
    fn from(values: &'a mut [f32]) -> Self {
        Self::Cpu(values)
    }
}

impl<'a> From<&'a mut Vec<f32>> for SliceMut<'a> {
    fn from(values: &'a mut Vec<f32>) -> Self {
        Self::Cpu(values)
    }
}
