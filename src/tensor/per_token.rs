//! Numbers of tokens, which losses read and write.

use super::slice::{Slice, SliceMut};
use crate::device::Device;
use crate::device::cuda::Memory;
use crate::device::cuda::readback::Late;
use crate::dtype::DType;

/// f32 numbers of tokens on the device that computes them.
#[derive(Debug)]
pub enum PerToken {
    Cpu(Vec<f32>),
    Cuda(Memory),
}

/// The same on their way to the host.
#[derive(Debug)]
pub enum Later {
    There(Vec<f32>),
    Coming(Late),
}

impl PerToken {
    /// Zeros on the CPU; unspecified on a GPU.
    pub fn scratch(device: Device, len: usize) -> Self {
        match device {
            Device::Cpu => Self::Cpu(vec![0.0; len]),
            Device::Cuda => Self::Cuda(Memory::scratch(len * size_of::<f32>())),
        }
    }

    pub fn len(&self) -> usize {
        self.slice().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them.
    pub fn slice(&self) -> Slice<'_> {
        match self {
            Self::Cpu(numbers) => Slice::Cpu(numbers),
            Self::Cuda(memory) => Slice::Cuda(memory.view(DType::F32)),
        }
    }

    pub fn slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Self::Cpu(numbers) => SliceMut::Cpu(numbers),
            Self::Cuda(memory) => SliceMut::Cuda(memory.view_mut(DType::F32)),
        }
    }

    /// On the host when `take` returns. From a GPU they come while it goes on with what is started next.
    #[must_use = "`take` tells the numbers"]
    pub fn later(self) -> Later {
        match self {
            Self::Cpu(numbers) => Later::There(numbers),
            Self::Cuda(memory) if memory.bytes() == 0 => Later::There(Vec::new()),
            Self::Cuda(memory) => Later::Coming(Late::of(memory.view(DType::F32))),
        }
    }
}

impl Later {
    pub fn take(self) -> Vec<f32> {
        match self {
            Self::There(numbers) => numbers,
            Self::Coming(numbers) => numbers.take(),
        }
    }
}
