//! Graphs as they are captured: from when on, by whom, and what becomes of one that cannot be.
//!
//! The capture is a relaxed one. The stricter modes forbid calls that may be made beside a capture and are no part of it: of the
//! arena, which may ask the driver for memory, and of NCCL, which joins GPUs and takes memory at its first calls of a kind. Steps
//! of decoding that hold collectives have made both before (`Tables::rehearse`), so that neither is to be expected; and what a
//! replay would not do again is refused by ourselves (`Gpu::outside_captures`).
//!
//! What fails to be captured, a kernel or a collective, ends the capture and nothing else: nothing was run, so that whoever
//! captured can do the same without a graph.

use super::driver::Captured;
use super::gpu::{Gpu, must};
use super::pool::Run;
use super::streams::{Marks, Stream};
use crate::error::Result;
use crate::sys::lock::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::ThreadId;

impl Gpu {
    /// Whether this thread captures a graph.
    pub fn is_capturing(&self) -> bool {
        let by_this = |(by, _): &(ThreadId, _)| *by == std::thread::current().id();
        self.capture.is_on.load(Ordering::SeqCst) && lock(&self.capture.under_way).as_ref().is_some_and(by_this)
    }

    /// What a replay would not do again is refused while a graph is captured.
    pub(super) fn outside_captures(&self, what: &str) {
        assert!(!self.capture.is_on.load(Ordering::SeqCst), "{what} while a graph is being captured");
    }

    /// Whether this thread captures a graph, which then fails for the reason that is given (the first one stays): nothing was
    /// run, and the job may go on.
    pub fn is_noted(&self, why: &str) -> bool {
        if !self.is_capturing() {
            return false;
        }
        if let Some((_, failed)) = lock(&self.capture.under_way).as_mut() {
            failed.get_or_insert_with(|| why.to_string());
        }
        true
    }

    /// Ends the job where something could not be started, or the capture that it was a part of.
    pub(super) fn must_start(&self, started: Result<()>, doing: impl FnOnce() -> String) {
        if let Err(error) = started {
            let error = error.within(doing());
            if !self.is_noted(&error.message) {
                std::panic::panic_any(error);
            }
        }
    }

    /// From now on kernels, copies, clearings and collectives are not done but noted, in memory that other graphs hold, which never
    /// run beside this one. Memory may be taken and freed.
    ///
    /// # Errors
    /// Why there is no capture, and the memory.
    pub(super) fn begin_capture_over(&self, held: Vec<Run>) -> std::result::Result<(), (String, Vec<Run>)> {
        // A capture cannot wait for a copy.
        self.settle_copies();
        self.pool().begin_capture(held);
        match self.driver.begin_capture() {
            Ok(()) => self.capture.begin(),
            Err(why) => return Err((why.message, self.pool().end_capture())),
        }
        Ok(())
    }

    /// What was noted, or why there is no graph; and the memory that was freed within the capture.
    pub(super) fn captured(&self) -> (std::result::Result<Captured, String>, Vec<Run>) {
        let steps = self.driver.end_capture().map_err(|error| error.message);
        // What failed first is why the rest did.
        let steps = match self.capture.end() {
            Some(why) => Err(why),
            None => steps,
        };
        (steps, self.pool().end_capture())
    }

    pub(super) fn replay(&self, graph: &Captured) {
        self.outside_captures("a replay");
        self.counts.started.add(1);
        self.counts.replayed.add(1);
        must(self.driver.replay(graph), || "a graph's replay".into());
    }

    /// Marks by which one sees when all that the compute stream was given until now is done.
    pub fn mark_here(&self) -> Arc<Marks> {
        let marks = self.mark(Stream::Compute);
        must(self.wait_on(&marks), || "a mark".into());
        marks.join();
        Arc::new(marks)
    }
}
