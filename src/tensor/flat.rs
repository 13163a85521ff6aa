//! f32 values on the device that works on them: gradients, optimizer state, numbers of tokens.

use super::arena::Buffer;
use super::slice::{Slice, SliceMut};
use crate::device::Device;
use crate::device::cpu::copy;
use crate::device::cuda::Memory;
use crate::device::cuda::readback::Late;
use crate::dtype::DType;
use std::ops::Range;

#[derive(Debug)]
pub enum Flat {
    Cpu(Buffer),
    Cuda(Memory),
}

impl Flat {
    /// Contents unspecified.
    pub fn scratch(device: Device, len: usize) -> Self {
        match device {
            Device::Cpu => Self::Cpu(Buffer::scratch(len)),
            Device::Cuda => Self::Cuda(Memory::scratch(len * size_of::<f32>())),
        }
    }

    /// No values, and no memory.
    pub fn none() -> Self {
        Self::Cuda(Memory::none())
    }

    pub fn zeros(device: Device, len: usize) -> Self {
        let mut flat = Self::scratch(device, len);
        flat.clear();
        flat
    }

    pub fn device(&self) -> Device {
        match self {
            Self::Cpu(_) => Device::Cpu,
            Self::Cuda(_) => Device::Cuda,
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Self::Cpu(values) => values.len(),
            Self::Cuda(memory) => memory.bytes() / size_of::<f32>(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn clear(&mut self) {
        match self {
            Self::Cpu(values) => copy::fill(values, 0.0),
            Self::Cuda(memory) => memory.view_mut(DType::F32).clear(),
        }
    }

    /// # Panics
    /// If the range lies outside.
    pub fn slice(&self, range: Range<usize>) -> Slice<'_> {
        match self {
            Self::Cpu(values) => Slice::F32(&values[range]),
            Self::Cuda(memory) => Slice::Cuda(memory.view(DType::F32).part(range)),
        }
    }

    /// # Panics
    /// If the range lies outside.
    pub fn slice_mut(&mut self, range: Range<usize>) -> SliceMut<'_> {
        match self {
            Self::Cpu(values) => SliceMut::F32(&mut values[range]),
            Self::Cuda(memory) => SliceMut::Cuda(memory.view_mut(DType::F32).part(range)),
        }
    }

    /// Replaces the values of `range` by those of the host.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn write(&mut self, range: Range<usize>, values: &[f32]) {
        match self.slice_mut(range) {
            SliceMut::Cuda(mut to) => to.write(values),
            to => copy::copy(values, to.f32()),
        }
    }

    /// Calls `work` with the values on the host: a copy that is written back, where they lie on a GPU.
    pub fn on_host<R>(&mut self, work: impl FnOnce(&mut [f32]) -> R) -> R {
        match self {
            Self::Cpu(values) => work(values),
            Self::Cuda(memory) => {
                let mut values = memory.view(DType::F32).to_f32();
                let done = work(&mut values);
                memory.view_mut(DType::F32).write(&values);
                done
            }
        }
    }

    /// Starts a copy to the host, which goes on beside what is launched on a GPU next.
    pub fn later(self) -> Later {
        match self {
            Self::Cpu(values) => Later::Cpu(values),
            Self::Cuda(memory) if memory.bytes() == 0 => Later::Cpu(Buffer::scratch(0)),
            Self::Cuda(memory) => Later::Cuda(Late::of(memory.view(DType::F32))),
        }
    }

    /// The buffer, where the values are on the CPU.
    pub fn buffer(&self) -> Option<&Buffer> {
        match self {
            Self::Cpu(values) => Some(values),
            Self::Cuda(_) => None,
        }
    }

    /// As `buffer`.
    pub fn buffer_mut(&mut self) -> Option<&mut Buffer> {
        match self {
            Self::Cpu(values) => Some(values),
            Self::Cuda(_) => None,
        }
    }
}

/// Values on their way to the host.
#[derive(Debug)]
#[must_use = "`take` returns the values"]
pub enum Later {
    Cpu(Buffer),
    Cuda(Late),
}

impl Later {
    /// Waits for the values.
    pub fn take(self) -> Vec<f32> {
        match self {
            Self::Cpu(values) => values.to_vec(),
            Self::Cuda(values) => values.take(),
        }
    }
}
