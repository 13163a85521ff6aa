//! Positions, tokens and rows: numbers that the host knows and that GPU kernels read.

use crate::device::Device;
use crate::device::cuda::Memory;
use std::ops::Deref;
use std::sync::OnceLock;

/// Indices for operations on one device. All layers of a forward share them, so they are copied once.
#[derive(Debug)]
pub struct Indices<'a> {
    /// Empty if only the GPU knows them.
    host: &'a [u32],
    len: usize,
    /// Computed at the first request.
    largest: OnceLock<Option<u32>>,
    place: Place<'a>,
}

#[derive(Debug)]
enum Place<'a> {
    Host,
    Own(Memory),
    Lent(&'a Memory),
}

impl<'a> Indices<'a> {
    fn at_place(host: &'a [u32], len: usize, place: Place<'a>) -> Self {
        Self { host, len, largest: OnceLock::new(), place }
    }

    pub fn on(device: Device, host: &'a [u32]) -> Self {
        let place = if device == Device::Cuda { Place::Own(Memory::from_values(host)) } else { Place::Host };
        Self::at_place(host, host.len(), place)
    }

    /// The first `len` indices in `memory`, which only the GPU knows. As a slice they are empty.
    pub fn on_gpu(memory: &'a Memory, len: usize) -> Self {
        assert!(4 * len <= memory.bytes(), "{len} indices do not fit {} bytes", memory.bytes());
        Self::at_place(&[], len, Place::Lent(memory))
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The largest index that the host knows. It is computed once, because all layers check it against the same bound.
    pub fn largest(&self) -> Option<u32> {
        *self.largest.get_or_init(|| self.host.iter().copied().max())
    }

    /// The memory from which GPU kernels read them.
    pub fn cuda(&self) -> &Memory {
        match &self.place {
            Place::Own(memory) => memory,
            Place::Lent(memory) => memory,
            Place::Host => panic!("the GPU needs indices that were made for the CPU"),
        }
    }
}

impl Deref for Indices<'_> {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        self.host
    }
}

impl<'a> From<&'a [u32]> for Indices<'a> {
    /// Makes indices for the CPU.
    fn from(host: &'a [u32]) -> Self {
        Self::at_place(host, host.len(), Place::Host)
    }
}
