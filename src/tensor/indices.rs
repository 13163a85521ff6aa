//! Positions, tokens and rows: numbers that the host knows, and that the kernels of a GPU read from there.

use crate::device::Device;
use crate::device::cuda::Memory;
use std::ops::Deref;

/// Indices for operations on one device. All layers of a forward share them, so that they travel once.
#[derive(Debug)]
pub struct Indices<'a> {
    host: &'a [u32],
    memory: Option<Memory>,
}

impl<'a> Indices<'a> {
    pub fn on(device: Device, host: &'a [u32]) -> Self {
        Self { host, memory: (device == Device::Cuda).then(|| Memory::of(host)) }
    }

    /// Where the kernels of a GPU read them.
    ///
    /// # Panics
    /// If they were made for the CPU.
    pub fn cuda(&self) -> &Memory {
        self.memory.as_ref().expect("indices that were made for the CPU are needed on the GPU")
    }
}

impl Deref for Indices<'_> {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        self.host
    }
}

impl<'a> From<&'a [u32]> for Indices<'a> {
    /// For the CPU.
    fn from(host: &'a [u32]) -> Self {
        Self { host, memory: None }
    }
}
