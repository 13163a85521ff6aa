//! Work that runs at the same time as the compute stream: collectives that are under way while kernels compute.
//!
//! Work that is started within `Gpu::beside` runs on another stream, after all earlier work of the compute stream.
//! `Work::join` lets the compute stream wait for it; the host waits for neither. Memory that the work uses is not
//! reused before it is joined, even if it is dropped meanwhile.

use super::gpu::{Gpu, gpu};
use super::memory::View;
use super::staging::Event;
pub use super::streams::Marks;
use super::streams::{self, Stream};
use super::sys::{self, check};
use super::waits::waiting;
use crate::sys::lock::lock;
use std::sync::Arc;

/// Work that the compute stream does not wait for yet. It is joined when dropped.
#[derive(Debug)]
#[must_use = "memory stays with the work until it is joined"]
pub struct Work {
    id: u64,
    marks: Option<Arc<Marks>>,
    /// The stream that is joined to the compute stream within a capture, which records no marks.
    captured: Option<Stream>,
    joined: bool,
}

impl Marks {
    /// Whether the work has ended, also because the GPU failed: the next wait for the GPU reports the error.
    pub fn is_done(&self) -> bool {
        gpu().is_past(self.done())
    }

    /// Seconds for which the compute stream waited for the work, once both have passed that point.
    pub fn waited(&self) -> Option<f64> {
        let known = self.is_joined() && self.is_done() && gpu().is_past(self.arrived());
        known.then(|| self.done().seconds_since(self.arrived()).unwrap_or(0.0).max(0.0))
    }
}

impl Gpu {
    /// Runs `body`, whose work runs on `stream` after all work that was started until now. If a graph is being
    /// captured, the work is a part of it: `stream` forks from the captured stream here, and the work is joined before
    /// the capture ends.
    pub fn beside<T>(&self, stream: Stream, body: impl FnOnce() -> T) -> (T, Work) {
        self.order(Stream::Compute.here(), stream);
        let id = self.works.open();
        let active = streams::active(stream, id);
        let value = body();
        drop(active);
        let captured = self.is_capturing().then_some(stream);
        // An event of a capture does not show when a replay reaches it.
        let marks = captured.is_none().then(|| Arc::new(self.mark(stream)));
        (value, Work { id, marks, captured, joined: false })
    }

    /// Lets all later work on `then` wait for the earlier work on `first`.
    pub fn order(&self, first: Stream, then: Stream) {
        let ordered = self.call(|| {
            let marks = lock(&self.marks);
            marks[first as usize].record(self.stream(first))?;
            marks[first as usize].hold(self.stream(then))
        });
        self.must_start(ordered, || format!("the {then:?} stream waits for the {first:?} stream"));
    }

    /// Waits until all that was started on the compute stream has ended.
    pub fn wait(&self) {
        self.wait_for(Stream::Compute);
    }

    /// Waits until all that was started on `stream` has ended.
    pub fn wait_for(&self, stream: Stream) {
        self.outside_captures("a wait");
        self.counts.drained.add(1);
        let _waiting = waiting("the work of a stream");
        // SAFETY: a stream that lives.
        let wait = || check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream(stream)) });
        self.must(|| format!("waiting for the {stream:?} stream"), wait);
    }

    /// Seconds that the compute stream needs for the work that `work` starts, between two of its own events. They do
    /// not include the host's time to start and to wait. The host waits.
    ///
    /// # Panics
    /// If a graph is being captured.
    pub fn seconds(&self, work: impl FnOnce()) -> f64 {
        self.outside_captures("a measurement");
        let mark = || self.must(|| "an event".into(), || Event::timed()?.recorded(self.stream(Stream::Compute)));
        let begun = mark();
        work();
        let ended = mark();
        self.wait();
        self.must(|| "the time between two events".into(), || ended.seconds_since(&begun))
    }

    /// Marks the end of the work of `stream`.
    fn mark(&self, stream: Stream) -> Marks {
        let mark = || Marks::unrecorded().and_then(|marks| marks.done().record(self.stream(stream)).map(|()| marks));
        self.must(|| format!("recording an event on the {stream:?} stream"), mark)
    }

    /// Marks that show when all earlier work of the compute stream is done.
    pub fn mark_here(&self) -> Arc<Marks> {
        let marks = self.mark(Stream::Compute);
        self.wait_on(&marks, "waiting for an event");
        Arc::new(marks)
    }

    /// Lets the stream on which this thread starts work wait for a mark, and records when it got there.
    fn wait_on(&self, marks: &Marks, what: &str) {
        let wait = || marks.arrived().record(self.queue()).and_then(|()| marks.done().hold(self.queue()));
        self.must(|| what.into(), wait);
        marks.join();
    }

    /// Whether the GPU has passed an event, or has failed.
    pub(super) fn is_past(&self, event: &Event) -> bool {
        self.call(|| event.is_past()).unwrap_or(true)
    }

    /// Whether this thread is starting work on another stream than the compute stream.
    pub fn is_beside(&self) -> bool {
        streams::is_active()
    }

    /// Notes that the work that is being started uses these values in a CUDA library.
    pub fn uses(&self, values: &View) {
        self.works.note([values.address()]);
    }
}

impl Work {
    /// The marks of its end; `None` in a capture.
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
            gpu().wait_on(marks, "waiting for work on another stream");
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
