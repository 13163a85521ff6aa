//! A real GPU, through the driver's own functions.

use super::arg::Arg;
use super::devices::{self, Properties};
use super::kernels::{Function, Kernels};
use super::module::Origin;
use super::null_driver;
use super::pool::Backing;
use super::staging::{Event, Pages, Staging};
use super::status::{check, describe};
use super::streams::{self, Marks, Stream};
use super::sys::{self, CUcontext, CUgraph, CUgraphExec, CUresult, CUstream, CUstream_flags};
use super::waits::waiting;
use crate::error::{Error, Result, format_bytes};
use crate::sys::lock::lock;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Mutex;

/// Arguments that a launch may have.
const ARGS_MAX: usize = 48;
/// How many of the kernels that were started last are named where the GPU fails.
const NAMED: usize = 4;

/// A GPU and its streams. It lives as long as the process.
#[derive(Debug)]
pub struct Driver {
    pub properties: Properties,
    context: Handle<CUcontext>,
    /// In the order of `Stream`.
    streams: [Handle<CUstream>; 6],
    /// One for each stream.
    marks: Mutex<Vec<Event>>,
    kernels: Kernels,
    staging: Mutex<Staging>,
    recent: Mutex<VecDeque<&'static str>>,
}

/// A handle of the driver.
#[derive(Clone, Copy, Debug)]
struct Handle<T>(T);

// SAFETY: the driver's handles may be used from every thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// A graph that was captured.
#[derive(Debug)]
pub struct Captured(Handle<CUgraphExec>);

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: made by `end_capture`, destroyed once; the driver waits for a replay that is under way.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0.0) };
    }
}

thread_local! {
    /// Whether this thread has the context.
    static ENTERED: Cell<bool> = const { Cell::new(false) };
}

impl Driver {
    /// Takes the GPU number `index` of those that this process sees, and gives it the kernels.
    ///
    /// # Errors
    /// `Usage` where there is no such GPU, or it cannot run the kernels.
    pub fn open(index: usize) -> Result<Self> {
        let (version, all) = devices::devices().map_err(|why| Error::usage(format!("no GPU: {why}")))?;
        let count = all.len();
        let properties = all.into_iter().nth(index);
        let properties = properties
            .ok_or_else(|| Error::usage(format!("GPU {index} was asked for, and this process sees {count}")))?;
        let device = devices::handle(index as c_int)?;
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: a device that is there; writes a handle.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check("cuDevicePrimaryCtxRetain", retained).map_err(|error| {
            if !devices::is_exclusive(device) {
                return error;
            }
            Error::usage(format!("{}; the compute mode of GPU {index} is exclusive", error.message))
                .hint("another process has it: give each rank a GPU of its own, or let ranks share it (nvidia-smi -c DEFAULT)")
        })?;
        // SAFETY: a context that lives as long as the process; it becomes this thread's.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })?;
        let kernels = Kernels::load(&properties, version)?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two numbers.
        let status = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", status)?;
        Ok(Self {
            properties,
            context: Handle(context),
            streams: streams(least, greatest)?,
            marks: Mutex::new((0..6).map(|_| Event::new()).collect::<Result<_>>()?),
            kernels,
            staging: Mutex::new(Staging::new()?),
            recent: Mutex::new(VecDeque::with_capacity(NAMED)),
        })
    }

    pub fn origin(&self) -> &Origin {
        &self.kernels.origin
    }

    /// Every thread names the context once.
    pub fn enter(&self) -> Result<()> {
        if ENTERED.get() || null_driver::is_active() {
            return Ok(());
        }
        // SAFETY: a context that lives as long as the process.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context.0) })?;
        ENTERED.set(true);
        Ok(())
    }

    pub fn stream(&self, stream: Stream) -> CUstream {
        self.streams[stream as usize].0
    }

    fn compute(&self) -> CUstream {
        self.stream(Stream::Compute)
    }

    /// Where this thread starts things now.
    fn current(&self) -> CUstream {
        self.stream(streams::stream())
    }

    /// A stream by its name; that of all kernels is where this thread starts things now.
    fn given(&self, stream: Stream) -> CUstream {
        if stream == Stream::Compute { self.current() } else { self.stream(stream) }
    }

    /// Copies through the staging memory are told apart on the compute stream: what another one is at comes before and
    /// behind them.
    fn on_compute(&self, copy: impl FnOnce() -> Result<()>) -> Result<()> {
        let stream = streams::stream();
        if stream == Stream::Compute {
            return copy();
        }
        self.order(stream, Stream::Compute)?;
        copy()?;
        self.order(Stream::Compute, stream)
    }

    /// `GPU 0 at 0000:3b:00.0`, as this process counts.
    pub fn name(&self) -> String {
        format!("GPU {} at {}", self.properties.index, self.properties.pci)
    }

    /// `; kernels started last: rope_rotate, attention_forward_64`, or nothing.
    pub fn last_kernels(&self) -> String {
        let recent = lock(&self.recent).iter().copied().collect::<Vec<_>>().join(", ");
        if recent.is_empty() { recent } else { format!("; kernels started last: {recent}") }
    }

    /// Names the GPU, and what may have failed: the driver tells of a kernel's fault at a later call.
    fn blame(&self, mut error: Error) -> Error {
        error.message = format!("{}, on {}{}", error.message, self.name(), self.last_kernels());
        error
    }

    /// Lets this thread wait for an event; `what` is waited for.
    pub fn await_event(&self, event: &Event, what: &'static str) -> Result<()> {
        self.enter()?;
        let _waiting = waiting(what);
        event.wait().map_err(|error| self.blame(error))
    }

    pub fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        self.enter()?;
        let _waiting = waiting("a copy to the GPU");
        let upload = || lock(&self.staging).upload(to, from, self.compute());
        self.on_compute(upload).map_err(|error| self.blame(error))
    }

    pub fn download(&self, to: &mut [u8], from: u64) -> Result<()> {
        self.enter()?;
        let _waiting = waiting("a copy from the GPU");
        let download = || lock(&self.staging).download(to, from, self.compute());
        self.on_compute(download).map_err(|error| self.blame(error))
    }

    /// Makes a call of the driver, which `call` names, in its context.
    fn call(&self, name: &str, call: impl FnOnce() -> CUresult) -> Result<()> {
        self.enter()?;
        check(name, call()).map_err(|error| self.blame(error))
    }

    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: views hold their bounds.
        self.call("cuMemcpyDtoDAsync", || unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.current()) })
    }

    pub fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: views hold their bounds.
        self.call("cuMemsetD8Async", || unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.current()) })
    }

    /// Pinned host memory.
    pub fn pinned(&self, bytes: usize) -> Result<Pages> {
        self.enter()?;
        Pages::new(bytes).map_err(|error| self.blame(error))
    }

    /// Begins to copy `bytes` of pinned memory to the GPU. The event is past when they may change.
    pub fn put(&self, to: u64, from: &Pages, bytes: usize, stream: Stream) -> Result<Event> {
        let (from, queue) = (from.address(), self.given(stream));
        // SAFETY: the caller holds both runs until the event is past, and as many bytes are there.
        self.call("cuMemcpyHtoDAsync", || unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, queue) })?;
        self.mark(stream)
    }

    /// Begins to copy `bytes` from the GPU into pinned memory, where they are when the event is past.
    pub fn fetch(&self, to: &mut Pages, from: u64, bytes: usize, stream: Stream) -> Result<Event> {
        let (to, queue) = (to.address(), self.given(stream));
        // SAFETY: as in `put`.
        self.call("cuMemcpyDtoHAsync", || unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, bytes, queue) })?;
        self.mark(stream)
    }

    fn mark(&self, stream: Stream) -> Result<Event> {
        let marked = Event::new().and_then(|event| event.record(self.given(stream)).map(|()| event));
        marked.map_err(|error| self.blame(error))
    }

    /// An event that knows when the compute stream comes here.
    pub fn timed_mark(&self) -> Result<Event> {
        self.enter()?;
        let event = Event::timed()?;
        event.record(self.compute())?;
        Ok(event)
    }

    /// What is started on `stream` from now on waits for `event`.
    pub fn hold_on(&self, stream: Stream, event: &Event) -> Result<()> {
        self.enter()?;
        event.hold(self.stream(stream)).map_err(|error| self.blame(error))
    }

    /// Bytes of the GPU that no process has taken.
    pub fn free_bytes(&self) -> Result<usize> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        self.call("cuMemGetInfo", || unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(free)
    }

    pub fn launch(
        &self,
        kernel: &'static str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: usize,
        args: &[Arg],
    ) -> Result<()> {
        let function = self.kernels.function(kernel).map_err(Error::fault)?;
        function.check(block, shared_bytes).map_err(Error::fault)?;
        if null_driver::is_active() {
            return Ok(());
        }
        let started = self.enter().and_then(|()| self.start(function, grid, block, shared_bytes, args));
        started.map_err(|error| self.blame(error))?;
        self.note_started(kernel);
        Ok(())
    }

    fn note_started(&self, kernel: &'static str) {
        let mut recent = lock(&self.recent);
        if recent.len() == NAMED {
            recent.pop_front();
        }
        recent.push_back(kernel);
    }

    fn start(&self, f: &Function, grid: [u32; 3], block: u32, shared_bytes: usize, args: &[Arg]) -> Result<()> {
        assert!(args.len() <= ARGS_MAX, "{} arguments, at most {ARGS_MAX} are passed", args.len());
        let mut words = [0u64; ARGS_MAX];
        let mut places = [ptr::null_mut::<c_void>(); ARGS_MAX];
        for ((arg, word), place) in args.iter().zip(&mut words).zip(&mut places) {
            *word = arg.word();
            *place = ptr::from_mut(word).cast();
        }
        let ([x, y, z], shared) = (grid, shared_bytes as u32);
        // The driver lets the host stand still where it has been given too much to do.
        let _waiting = waiting("the start of a kernel");
        // SAFETY: a place for each argument, of which little-endian machines read the first bytes; views hold their bounds.
        let status = unsafe {
            let (places, none) = (places.as_mut_ptr(), ptr::null_mut());
            sys::cuLaunchKernel(f.handle(), x, y, z, block, 1, 1, shared, self.current(), places, none)
        };
        check("cuLaunchKernel", status)
    }

    pub fn wait(&self, stream: Stream) -> Result<()> {
        let _waiting = waiting("a stream");
        // SAFETY: a stream that lives.
        self.call("cuStreamSynchronize", || unsafe { sys::cuStreamSynchronize(self.stream(stream)) })
    }

    /// Lets what is started on `then` from now on wait for what was started on `first`.
    pub fn order(&self, first: Stream, then: Stream) -> Result<()> {
        self.enter()?;
        let marks = lock(&self.marks);
        let mark = &marks[first as usize];
        mark.record(self.stream(first)).and_then(|()| mark.hold(self.stream(then))).map_err(|error| self.blame(error))
    }

    /// Marks the end of what `stream` was given.
    pub fn marks(&self, stream: Stream) -> Result<Marks> {
        self.enter()?;
        let marked = Marks::unrecorded().and_then(|marks| marks.done().record(self.stream(stream)).map(|()| marks));
        marked.map_err(|error| self.blame(error))
    }

    /// Lets the stream to which this thread starts things wait for a mark, and notes when it came there.
    pub fn wait_on(&self, marks: &Marks) -> Result<()> {
        self.enter()?;
        let held = marks.arrived().record(self.current()).and_then(|()| marks.done().hold(self.current()));
        held.map_err(|error| self.blame(error))
    }

    pub fn is_past(&self, event: &Event) -> Result<bool> {
        self.enter()?;
        event.is_past()
    }

    pub fn begin_capture(&self) -> Result<()> {
        self.enter()?;
        // Why relaxed: see `capture`.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a stream that lives.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.compute(), mode) })
    }

    pub fn end_capture(&self) -> Result<Captured> {
        self.enter()?;
        let mut graph: CUgraph = ptr::null_mut();
        let mut exec: CUgraphExec = ptr::null_mut();
        // SAFETY: the stream is being captured; each call writes a handle, and the graph is destroyed once.
        unsafe {
            check("cuStreamEndCapture", sys::cuStreamEndCapture(self.compute(), &raw mut graph))?;
            let made = check("cuGraphInstantiate", sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
            check("cuGraphDestroy", sys::cuGraphDestroy(graph))?;
            made?;
            let captured = Captured(Handle(exec));
            check("cuGraphUpload", sys::cuGraphUpload(exec, self.compute()))?;
            Ok(captured)
        }
    }

    pub fn replay(&self, graph: &Captured) -> Result<()> {
        self.enter()?;
        // SAFETY: handles that live; the graph holds the memory that its kernels use.
        let status = unsafe { sys::cuGraphLaunch(graph.0.0, self.compute()) };
        let launched = check("cuGraphLaunch", status).map_err(|error| self.blame(error));
        if launched.is_ok() {
            self.note_started("a graph");
        }
        // Nothing is lost with that: another way does the same.
        let hint = "rollout.graphs = false starts the same kernels one by one";
        if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY { launched.map_err(|error| error.hint(hint)) } else { launched }
    }
}

/// One of each `Stream`: collectives of the tensor axis come before all else.
fn streams(least: c_int, greatest: c_int) -> Result<[Handle<CUstream>; 6]> {
    let normal = || stream(least);
    Ok([normal()?, stream(greatest)?, normal()?, normal()?, normal()?, normal()?])
}

fn stream(priority: c_int) -> Result<Handle<CUstream>> {
    let mut stream: CUstream = ptr::null_mut();
    let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: writes a handle.
    let status = unsafe { sys::cuStreamCreateWithPriority(&raw mut stream, flags, priority) };
    check("cuStreamCreateWithPriority", status)?;
    Ok(Handle(stream))
}

impl Backing for Driver {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: writes a number. The driver aligns to 256 bytes at least.
        let status = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) };
        let error = match check("cuMemAlloc", status) {
            Ok(()) => return Ok(address),
            Err(error) => self.blame(error),
        };
        if status != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(error);
        }
        let size = |bytes: usize| format_bytes(bytes as u64);
        let (free, all) = (self.free_bytes()?, size(self.properties.memory_bytes));
        let message =
            format!("cuMemAlloc: {}: {} of the {all} of {} are free", describe(status), size(free), self.name());
        Err(Error::usage(message))
    }

    fn free(&self, address: u64, _bytes: usize) {
        // SAFETY: came from `allocate`, is freed once; the driver waits until the GPU has done with it. A failure is told
        // by the next call, too.
        let _ = unsafe { sys::cuMemFree_v2(address) };
    }
}
