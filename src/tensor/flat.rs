//! Owned values on the device that uses them: activations, weights, gradients, optimizer state.

use super::arena::Buffer;
use super::slice::{Slice, SliceMut};
use crate::device::Device;
use crate::device::cpu::copy;
use crate::device::cuda::Memory;
use crate::device::cuda::readback::Late;
use crate::dtype::DType;
use std::ops::Range;

#[derive(Clone, Debug)]
pub enum Flat {
    F32(Buffer),
    /// Two bf16 in each f32 of the buffer, and the number of bf16 values.
    Bf16(Buffer, usize),
    Cuda(Memory, DType),
}

impl Flat {
    /// f32 values with unspecified contents.
    pub fn scratch(device: Device, len: usize) -> Self {
        match device {
            Device::Cpu => Self::F32(Buffer::scratch(len)),
            Device::Cuda => Self::on_gpu(DType::F32, len),
        }
    }

    /// Weights in the working dtype, on a GPU always bf16, with unspecified contents.
    pub fn weights(device: Device, dtype: DType, len: usize) -> Self {
        match (device, dtype) {
            (Device::Cuda, _) => Self::on_gpu(DType::Bf16, len),
            (Device::Cpu, DType::F32) => Self::F32(Buffer::scratch(len)),
            (Device::Cpu, DType::Bf16) => Self::Bf16(Buffer::scratch(len.div_ceil(2)), len),
        }
    }

    /// Values on a GPU with unspecified contents.
    pub fn on_gpu(dtype: DType, len: usize) -> Self {
        Self::Cuda(Memory::scratch(len * dtype.bytes()), dtype)
    }

    /// No values, and no memory.
    pub fn none() -> Self {
        Self::Cuda(Memory::none(), DType::F32)
    }

    /// f32 zeros.
    pub fn zeros(device: Device, len: usize) -> Self {
        let mut flat = Self::scratch(device, len);
        flat.clear();
        flat
    }

    pub fn device(&self) -> Device {
        if matches!(self, Self::Cuda(..)) { Device::Cuda } else { Device::Cpu }
    }

    pub fn len(&self) -> usize {
        self.all().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn bytes(&self) -> usize {
        match self {
            Self::F32(values) | Self::Bf16(values, _) => size_of_val::<[f32]>(values),
            Self::Cuda(memory, _) => memory.bytes(),
        }
    }

    /// Sets all values to 0.
    pub fn clear(&mut self) {
        match self {
            Self::F32(values) | Self::Bf16(values, _) => copy::fill(values, 0.0),
            Self::Cuda(memory, dtype) => memory.view_mut(*dtype).clear(),
        }
    }

    /// All values.
    pub fn all(&self) -> Slice<'_> {
        match self {
            Self::F32(values) => Slice::F32(values),
            Self::Bf16(values, len) => Slice::Bf16(&bytemuck::cast_slice(values)[..*len]),
            Self::Cuda(memory, dtype) => Slice::Cuda(memory.view(*dtype)),
        }
    }

    /// All values, mutable.
    pub fn all_mut(&mut self) -> SliceMut<'_> {
        match self {
            Self::F32(values) => SliceMut::F32(values),
            Self::Bf16(values, len) => SliceMut::Bf16(&mut bytemuck::cast_slice_mut(values)[..*len]),
            Self::Cuda(memory, dtype) => SliceMut::Cuda(memory.view_mut(*dtype)),
        }
    }

    pub fn slice(&self, range: Range<usize>) -> Slice<'_> {
        self.all().part(range)
    }

    pub fn slice_mut(&mut self, range: Range<usize>) -> SliceMut<'_> {
        self.all_mut().part(range)
    }

    /// Replaces the f32 values of `range` by those of the host.
    pub fn write(&mut self, range: Range<usize>, values: &[f32]) {
        match self.slice_mut(range) {
            SliceMut::Cuda(mut to) => to.write(values),
            to => copy::copy(values, to.f32()),
        }
    }

    /// Starts a copy of f32 values to the host, which runs concurrently with the next work on a GPU.
    pub fn later(self) -> Later {
        match self {
            Self::F32(values) | Self::Bf16(values, _) => Later::Cpu(values),
            Self::Cuda(memory, _) if memory.bytes() == 0 => Later::Cpu(Buffer::scratch(0)),
            Self::Cuda(memory, dtype) => Later::Cuda(Late::start(memory.view(dtype))),
        }
    }

    /// The buffer, if the values are on the CPU.
    pub fn buffer(&self) -> Option<&Buffer> {
        match self {
            Self::F32(values) | Self::Bf16(values, _) => Some(values),
            Self::Cuda(..) => None,
        }
    }

    /// The same, mutable.
    pub fn buffer_mut(&mut self) -> Option<&mut Buffer> {
        match self {
            Self::F32(values) | Self::Bf16(values, _) => Some(values),
            Self::Cuda(..) => None,
        }
    }
}

/// Values on their way to the host.
#[derive(Debug)]
#[must_use = "`into_values` returns the values"]
pub enum Later {
    Cpu(Buffer),
    Cuda(Late),
}

impl Later {
    /// Waits for the values.
    pub fn into_values(self) -> Vec<f32> {
        match self {
            Self::Cpu(values) => values.to_vec(),
            Self::Cuda(values) => values.wait_values(),
        }
    }
}
