//! Values in pinned host memory that are onloaded while the GPU needs them. Their copies run at the same time as
//! kernels, each direction on a stream of its own.
//!
//! Memory of the GPU belongs to the compute stream, so a copy waits for earlier work of that stream. After an onload,
//! work that is submitted after `HostCopy::wait` waits for the copy. After an offload, the next user of the memory
//! waits for it (`free_behind`). Nothing else waits.

use super::gpu::{Gpu, Stream, gpu};
use super::memory::Memory;
use super::readback::Pinned;
use super::staging::Event;
use crate::device::null;
use crate::sys::lock::lock;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Pinned memory that holds values while their GPU memory is `Memory::none`.
#[derive(Debug)]
pub struct HostCopy {
    pinned: Pinned,
    up_copy: Mutex<Option<Event>>,
    down_copy: Option<Arc<Event>>,
}

impl HostCopy {
    /// Pinned memory of zeros.
    pub fn zeros(bytes: usize) -> Self {
        Self { pinned: Pinned::new(bytes), up_copy: Mutex::new(None), down_copy: None }
    }

    /// Copies the values of `memory` and frees it. Its next user waits for the copy.
    pub fn offload_from(memory: &mut Memory) -> Self {
        let mut host_copy = Self::zeros(memory.bytes());
        host_copy.offload(memory, true);
        host_copy
    }

    /// Same as `offload_from`, for values that came from here. If they have not changed, nothing is copied.
    pub fn offload(&mut self, memory: &mut Memory, have_changed: bool) {
        self.wait();
        if have_changed {
            self.begin_offload(memory);
            self.release(memory);
        } else {
            memory.free_behind(None);
        }
    }

    /// Begins to copy the values back, after all earlier work of the compute stream.
    pub fn begin_offload(&mut self, memory: &Memory) {
        assert_eq!(memory.bytes(), self.pinned.0.bytes, "offloaded values must have the same length");
        self.wait();
        let bytes = self.pinned.0.bytes;
        self.down_copy = (bytes > 0).then(|| {
            gpu().order(Stream::Compute, Stream::Down);
            null::note(null::OFFLOAD, 0.0, bytes as f64);
            Arc::new(gpu().fetch(&mut self.pinned.0, memory.address(), bytes, Stream::Down))
        });
    }

    /// Frees the memory from which they are copied. Its next user waits for the copy.
    pub fn release(&self, memory: &mut Memory) {
        memory.free_behind(self.down_copy.as_ref());
    }

    /// Whether the copy here has ended.
    pub fn is_here(&self) -> bool {
        self.down_copy.as_ref().is_none_or(|down_copy| gpu().is_past(down_copy))
    }

    /// Allocates memory for the values and begins to copy them there. Call `wait` before their first use.
    ///
    /// # Panics
    /// The payload is an [`crate::error::Error`] if the GPU does not have enough memory left.
    pub fn onload(&mut self) -> Memory {
        let bytes = self.pinned.0.bytes;
        let memory = Memory::scratch_for(Stream::Up, bytes);
        // The copy that brought the values here must end first.
        if let Some(down_copy) = &self.down_copy {
            gpu().hold_on(Stream::Up, down_copy);
        }
        *lock(&self.up_copy) = (bytes > 0).then(|| {
            null::note(null::OFFLOAD, 0.0, bytes as f64);
            gpu().order(Stream::Compute, Stream::Up);
            gpu().put(memory.address(), &self.pinned.0, bytes, Stream::Up)
        });
        memory
    }

    /// Lets all work that is started from now on wait for the copy to the GPU.
    pub fn wait(&self) {
        if let Some(end) = lock(&self.up_copy).take() {
            gpu().hold_on(Stream::Compute, &end);
        }
    }

    /// Waits until the values are here.
    pub fn finish(&mut self) {
        if let Some(end) = self.down_copy.take() {
            gpu().await_event(&end, "a copy to host memory");
        }
    }

    /// The values in host memory. `finish` must have waited for them.
    pub fn as_f32(&self) -> &[f32] {
        bytemuck::cast_slice(self.pinned.0.as_slice())
    }

    pub fn as_f32_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.pinned.0.as_mut_slice())
    }
}

impl Drop for HostCopy {
    /// Copies that need the pages end first.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            if let Some(end) = lock(&self.up_copy).take() {
                gpu().await_event(&end, "a copy to the GPU");
            }
            self.finish();
        }
    }
}

/// Memory whose values are being copied to the host is already free, but its next user waits for the copy. Until then
/// neither the host nor the compute stream waits.
impl Gpu {
    /// Frees memory that the copy before `end` reads.
    pub(super) fn free_behind(&self, address: u64, end: &Arc<Event>) {
        let bytes = self.pool().size_of(address) as u64;
        let run = address..address + bytes;
        if self.works.keep(run.clone()) {
            // The memory is freed when that work is joined, and then belongs to the compute stream.
            return self.hold_on(Stream::Compute, end);
        }
        lock(&self.in_flight).push((run, end.clone()));
        self.pool().give_in_flight(address, self);
    }

    /// Lets `stream`, which gets the memory `run`, wait for copies of it that are under way.
    pub(super) fn behind_copies(&self, run: Range<u64>, stream: Stream) {
        let mut all = lock(&self.in_flight);
        if all.is_empty() {
            return;
        }
        all.retain(|(_, end)| !self.is_past(end));
        for (_, end) in all.iter().filter(|(other, _)| other.start < run.end && run.start < other.end) {
            self.hold_on(stream.here(), end);
        }
    }

    /// Lets the compute stream wait for all copies that are under way.
    pub(super) fn settle_copies(&self) {
        for (_, end) in lock(&self.in_flight).drain(..) {
            self.hold_on(Stream::Compute, &end);
        }
        self.pool().settle();
    }

    /// Lets all work that is started on `stream` from now on wait for a copy.
    pub(super) fn hold_on(&self, stream: Stream, end: &Event) {
        self.must(|| format!("the {stream:?} stream waits for a copy"), || end.hold(self.stream(stream)));
    }
}
