//! Positions, tokens and rows: numbers that the host knows, and that the kernels of a GPU read from there.

use crate::device::Device;
use crate::device::cuda::Memory;
use std::ops::Deref;
use std::sync::OnceLock;

/// Indices for operations on one device. All layers of a forward share them, so that they travel once.
#[derive(Debug)]
pub struct Indices<'a> {
    /// Empty where only the GPU knows them.
    host: &'a [u32],
    len: usize,
    /// As far as the host was asked for it.
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
    fn over(host: &'a [u32], len: usize, place: Place<'a>) -> Self {
        Self { host, len, largest: OnceLock::new(), place }
    }

    pub fn on(device: Device, host: &'a [u32]) -> Self {
        let place = if device == Device::Cuda { Place::Own(Memory::of(host)) } else { Place::Host };
        Self::over(host, host.len(), place)
    }

    /// The first `len` of `memory`, which only the GPU knows: as a slice they are empty.
    pub fn on_gpu(memory: &'a Memory, len: usize) -> Self {
        assert!(4 * len <= memory.bytes(), "{len} indices of {} bytes", memory.bytes());
        Self::over(&[], len, Place::Lent(memory))
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The largest that the host knows, found once: all layers hold it to the same bound.
    pub fn largest(&self) -> Option<u32> {
        *self.largest.get_or_init(|| self.host.iter().copied().max())
    }

    /// Where the kernels of a GPU read them.
    pub fn cuda(&self) -> &Memory {
        match &self.place {
            Place::Own(memory) => memory,
            Place::Lent(memory) => memory,
            Place::Host => panic!("indices that were made for the CPU are needed on the GPU"),
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
    /// For the CPU.
    fn from(host: &'a [u32]) -> Self {
        Self::over(host, host.len(), Place::Host)
    }
}
