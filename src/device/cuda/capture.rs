//! The capture of graphs: its beginning, the capturing thread, and failures.
//!
//! The capture mode is relaxed. The stricter modes forbid calls that other code may make during a capture. The arena
//! may ask the driver for memory, and NCCL connects GPUs and allocates memory at its first calls of a kind. Decoding
//! steps with collectives have made both calls before (`DecodeState::rehearse`), so neither is expected. Calls that a
//! replay would not repeat are rejected here (`Gpu::outside_captures`).
//!
//! A kernel or a collective that cannot be captured ends the capture and nothing else. Nothing was run, so the caller
//! can do the same work without a graph.

use super::gpu::Gpu;
use super::pool::Free;
use super::streams::Stream;
use super::sys::{self, CUgraph, CUgraphExec, CUresult, CUstreamCaptureMode, Handle, check};
use crate::error::Result;
use crate::sys::lock::lock;
use std::ptr;
use std::sync::atomic::Ordering;
use std::thread::ThreadId;

/// A captured graph.
#[derive(Debug)]
pub struct Captured(Handle<CUgraphExec>);

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: made by `end_capture`, destroyed once; the driver waits for a replay that is under way.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0.0) };
    }
}

impl Gpu {
    /// Whether this thread is capturing a graph.
    pub fn is_capturing(&self) -> bool {
        let by_this = |(by, _): &(ThreadId, _)| *by == std::thread::current().id();
        self.capture.is_on.load(Ordering::SeqCst) && lock(&self.capture.under_way).as_ref().is_some_and(by_this)
    }

    /// Rejects `what`, which a replay would not repeat, while a graph is being captured.
    pub(super) fn outside_captures(&self, what: &str) {
        assert!(!self.capture.is_on.load(Ordering::SeqCst), "{what} is not allowed while a graph is being captured");
    }

    /// Whether this thread is capturing a graph. The capture then fails for the reason `why` (the first reason is
    /// kept). Nothing was run, and the job may continue.
    pub fn is_noted(&self, why: &str) -> bool {
        if !self.is_capturing() {
            return false;
        }
        if let Some((_, failed)) = lock(&self.capture.under_way).as_mut() {
            failed.get_or_insert_with(|| why.to_string());
        }
        true
    }

    /// Ends the job if something could not be started, or only the capture that it was a part of.
    pub(super) fn must_start(&self, started: Result<()>, doing: impl FnOnce() -> String) {
        if let Err(error) = started {
            let error = error.within(doing());
            if !self.is_noted(&error.message) {
                std::panic::panic_any(error);
            }
        }
    }

    /// Begins a capture: later kernels, copies, clears and collectives are recorded instead of run. They use memory
    /// that other graphs hold, which never run at the same time as this one. Memory may be allocated and freed.
    ///
    /// # Errors
    /// The reason why no capture began; the memory is then unchanged.
    pub(super) fn begin_capture_over(&self, held: &mut Free) -> std::result::Result<(), String> {
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

    /// The captured graph, or the reason why there is none; and the memory that was freed within the capture.
    pub(super) fn captured(&self) -> (std::result::Result<Captured, String>, Free) {
        let steps = self.call(|| self.end_capture()).map_err(|error| error.message);
        // The first failure is the cause of the others.
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
            // Without graphs, the same kernels run one by one.
            let hint = "set rollout.graphs = false to start the same kernels one by one";
            check("cuGraphLaunch", status).map_err(|error| if is_full { error.hint(hint) } else { error })
        };
        self.must(|| "replaying a graph".into(), replay);
        self.note_started("a graph");
    }
}
