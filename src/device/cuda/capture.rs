//! Graphs as they are captured: from when on, by whom, and what becomes of one that cannot be.
//!
//! The capture is a relaxed one. The stricter modes forbid calls that may be made beside a capture and are no part of it: of the
//! arena, which may ask the driver for memory, and of NCCL, which joins GPUs and takes memory at its first calls of a kind. Steps
//! of decoding that hold collectives have made both before (`Tables::rehearse`), so that neither is to be expected; and what a
//! replay would not do again is refused by ourselves (`Gpu::outside_captures`).
//!
//! What fails to be captured, a kernel or a collective, ends the capture and nothing else: nothing was run, so that whoever
//! captured can do the same without a graph.

use super::gpu::Gpu;
use super::pool::Run;
use super::streams::Stream;
use super::sys::{self, CUgraph, CUgraphExec, CUresult, CUstreamCaptureMode, Handle, check};
use crate::error::Result;
use crate::sys::lock::lock;
use std::ptr;
use std::sync::atomic::Ordering;
use std::thread::ThreadId;

/// A graph that was captured.
#[derive(Debug)]
pub struct Captured(Handle<CUgraphExec>);

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: made by `end_capture`, destroyed once; the driver waits for a replay that is under way.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0.0) };
    }
}

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
    /// Why there is no capture; then the memory stays.
    pub(super) fn begin_capture_over(&self, held: &mut Vec<Run>) -> std::result::Result<(), String> {
        // A capture cannot wait for a copy.
        self.settle_copies();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a stream that lives.
        let begin = || unsafe { sys::cuStreamBeginCapture_v2(self.stream(Stream::Compute), mode) };
        self.call(|| check("cuStreamBeginCapture", begin())).map_err(|error| error.message)?;
        self.pool().begin_capture(std::mem::take(held));
        self.capture.begin();
        Ok(())
    }

    /// What was noted, or why there is no graph; and the memory that was freed within the capture.
    pub(super) fn captured(&self) -> (std::result::Result<Captured, String>, Vec<Run>) {
        let steps = self.call(|| self.end_capture()).map_err(|error| error.message);
        // What failed first is why the rest did.
        let steps = match self.capture.end() {
            Some(why) => Err(why),
            None => steps,
        };
        (steps, self.pool().end_capture())
    }

    fn end_capture(&self) -> Result<Captured> {
        let stream = self.stream(Stream::Compute);
        let mut graph: CUgraph = ptr::null_mut();
        let mut exec: CUgraphExec = ptr::null_mut();
        // SAFETY: the stream is being captured; each call writes a handle, and the graph is destroyed once.
        unsafe {
            check("cuStreamEndCapture", sys::cuStreamEndCapture(stream, &raw mut graph))?;
            let made = check("cuGraphInstantiate", sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
            check("cuGraphDestroy", sys::cuGraphDestroy(graph))?;
            made?;
            let captured = Captured(Handle(exec));
            check("cuGraphUpload", sys::cuGraphUpload(exec, stream))?;
            Ok(captured)
        }
    }

    pub(super) fn replay(&self, graph: &Captured) {
        self.outside_captures("a replay");
        self.counts.started.add(1);
        self.counts.replayed.add(1);
        let replay = || {
            // SAFETY: handles that live; the graph holds the memory that its kernels use.
            let status = unsafe { sys::cuGraphLaunch(graph.0.0, self.stream(Stream::Compute)) };
            let is_full = status == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            // Nothing is lost with that: another way does the same.
            let hint = "rollout.graphs = false starts the same kernels one by one";
            check("cuGraphLaunch", status).map_err(|error| if is_full { error.hint(hint) } else { error })
        };
        self.must(|| "a graph's replay".into(), replay);
        self.note_started("a graph");
    }
}
