//! Work that runs beside the compute stream: collectives that are under way while kernels compute.
//!
//! What is started within `Gpu::beside` goes to another stream, behind all that the compute stream was given until then.
//! `Work::join` lets the compute stream wait for it; the host waits for neither. Memory that the work uses is not given to
//! anybody else before it is joined, whoever drops it meanwhile.

use super::gpu::{Gpu, gpu, must};
use super::memory::{View, ViewMut};
use super::staging::Event;
pub use super::streams::Marks;
use super::streams::{self, Stream};
use crate::error::Result;
use std::sync::Arc;

/// Work that the compute stream does not wait for yet. Dropped, it is joined.
#[derive(Debug)]
#[must_use = "memory stays with the work until it is joined"]
pub struct Work {
    id: u64,
    marks: Option<Arc<Marks>>,
    /// The stream that is joined to the compute stream within a capture, where nothing is marked.
    captured: Option<Stream>,
    joined: bool,
}

impl Marks {
    /// Whether the work has ended. Where the GPU failed it has: whoever waits for the GPU says why.
    pub fn is_done(&self) -> bool {
        gpu().is_past(self.done())
    }

    /// Seconds for which the compute stream stood still for the work, when both have come there.
    pub fn waited(&self) -> Option<f64> {
        let known = self.is_joined() && self.is_done() && gpu().is_past(self.arrived());
        known.then(|| self.done().seconds_since(self.arrived()).unwrap_or(0.0).max(0.0))
    }
}

impl Gpu {
    /// Runs `body`, and lets all that it starts run on `stream`, behind what was started until now. Where a graph is captured it
    /// is a part of that: `stream` parts from the captured one here, and the work is joined before the capture ends.
    pub fn beside<T>(&self, stream: Stream, body: impl FnOnce() -> T) -> (T, Work) {
        self.order(streams::stream(), stream);
        let id = self.works.open();
        let active = streams::active(stream, id);
        let value = body();
        drop(active);
        let captured = self.is_capturing().then_some(stream);
        // An event of a capture says nothing of when a replay comes there.
        let marks = captured.is_none().then(|| Arc::new(self.mark(stream)));
        (value, Work { id, marks, captured, joined: false })
    }

    /// Marks the end of what `stream` was given.
    pub(super) fn mark(&self, stream: Stream) -> Marks {
        must(self.driver.marks(stream), || format!("a mark on {stream:?}"))
    }

    /// Lets what this thread starts from now on wait for a mark.
    pub(super) fn wait_on(&self, marks: &Marks) -> Result<()> {
        self.driver.wait_on(marks)
    }

    /// Whether the GPU has come by an event, or has failed.
    pub(super) fn is_past(&self, event: &Event) -> bool {
        self.driver.is_past(event).unwrap_or(true)
    }

    /// Whether this thread is starting work beside the compute stream.
    pub fn is_beside(&self) -> bool {
        streams::is_active()
    }

    /// Notes that the work which is being started uses these values, by a library of CUDA.
    pub fn uses(&self, values: &View) {
        self.works.note([values.address()]);
    }

    /// As `uses`, of values that are written.
    pub fn uses_mut(&self, values: &ViewMut) {
        self.works.note([values.address()]);
    }
}

impl Work {
    /// When it ended; none in a capture.
    pub fn marks(&self) -> Option<Arc<Marks>> {
        self.marks.clone()
    }

    /// Lets the compute stream wait for it.
    pub fn join(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.joined, true) {
            return;
        }
        if let Some(stream) = self.captured {
            gpu().order(stream, Stream::Compute);
        }
        if let Some(marks) = &self.marks {
            gpu().wait_on(marks).unwrap_or_else(|error| std::panic::panic_any(error.within("a work beside the host")));
            marks.join();
        }
        for address in gpu().works.close(self.id) {
            gpu().free(address);
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.end();
        }
    }
}
