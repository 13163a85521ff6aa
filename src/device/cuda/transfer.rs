//! Copies to the GPU, from it and within it.

use super::gpu::Gpu;
use super::staging::{Event, Pages};
use super::streams::Stream;
use super::sys::{self, CUresult, check};
use super::waits::waiting;
use crate::error::Result;
use crate::sys::lock::lock;

impl Gpu {
    /// Copies to the device, after all earlier work of the stream. `from` may change when this returns.
    pub(super) fn upload(&self, to: u64, from: &[u8]) {
        self.outside_captures("an upload");
        self.counts.up.add(from.len());
        let _waiting = waiting("a copy to the GPU");
        let stream = self.stream(Stream::Compute);
        let upload = || self.on_compute(|| lock(&self.staging).upload(to, from, stream));
        self.must(|| format!("copying {} bytes to the GPU", from.len()), upload);
    }

    /// Copies from the device after all earlier work of the stream has ended.
    pub(super) fn download(&self, to: &mut [u8], from: u64) {
        self.outside_captures("a download");
        self.counts.drained.add(1);
        self.counts.down.add(to.len());
        let _waiting = waiting("a copy from the GPU");
        let (bytes, stream) = (to.len(), self.stream(Stream::Compute));
        let download = || self.on_compute(|| lock(&self.staging).download(to, from, stream));
        self.must(|| format!("copying {bytes} bytes from the GPU"), download);
    }

    /// Does a copy through the staging memory on the compute stream, which orders such copies. If another stream is
    /// active, it waits for the copy, and the copy for its earlier work.
    fn on_compute(&self, copy: impl FnOnce() -> Result<()>) -> Result<()> {
        let stream = Stream::Compute.here();
        if stream == Stream::Compute {
            return copy();
        }
        self.order(stream, Stream::Compute);
        copy()?;
        self.order(Stream::Compute, stream);
        Ok(())
    }

    /// Copies within the device, after all earlier work of the stream.
    pub(super) fn copy(&self, to: u64, from: u64, bytes: usize) {
        self.works.note([to, from]);
        self.counts.within.add(bytes);
        // SAFETY: views hold their bounds.
        let copy = || unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.queue()) };
        self.fill("cuMemcpyDtoDAsync", bytes, "copying within the GPU", copy);
    }

    /// Sets `bytes` to 0, after all earlier work of the stream.
    pub(super) fn clear(&self, at: u64, bytes: usize) {
        self.works.note([at]);
        // SAFETY: views hold their bounds.
        let clear = || unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.queue()) };
        self.fill("cuMemsetD8Async", bytes, "setting to zero", clear);
    }

    fn fill(&self, name: &str, bytes: usize, how: &str, call: impl FnOnce() -> CUresult) {
        if bytes > 0 {
            self.must_start(self.call(|| check(name, call())), || format!("{how}, {bytes} bytes"));
        }
    }

    /// Begins to copy `bytes` from the GPU into pinned memory. The copy is complete when the event is past.
    pub(super) fn fetch(&self, to: &mut Pages, from: u64, bytes: usize, stream: Stream) -> Event {
        self.outside_captures("a download");
        let queue = self.stream(stream.here());
        let fetch = || {
            // SAFETY: the caller holds both runs until the event is past, and as many bytes are there.
            check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(to.address(), from, bytes, queue) })?;
            Event::new()?.recorded(queue)
        };
        self.must(|| format!("copying {bytes} bytes from the GPU"), fetch)
    }

    /// Begins to copy `bytes` of pinned memory to the GPU. The event is past when they may change.
    pub(super) fn put(&self, to: u64, from: &Pages, bytes: usize, stream: Stream) -> Event {
        self.outside_captures("an upload");
        let queue = self.stream(stream.here());
        let put = || {
            // SAFETY: as in `fetch`.
            check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.address(), bytes, queue) })?;
            Event::new()?.recorded(queue)
        };
        self.must(|| format!("copying {bytes} bytes to the GPU"), put)
    }

    /// Lets this thread wait for an event; `what` describes it.
    pub(super) fn await_event(&self, event: &Event, what: &'static str) {
        let _waiting = waiting(what);
        self.must(|| what.into(), || event.wait());
    }
}
