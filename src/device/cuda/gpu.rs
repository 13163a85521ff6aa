//! The GPU of this process: its context, its kernels and its memory. Everything runs in the order of one stream, except
//! for work on other streams (`work`).

use super::devices::{self, Properties};
use super::kernels::{Kernels, Resources};
use super::null_driver;
use super::pool::{Backing, Free, Pool, Usage};
use super::staging::{Event, STAGING_BYTES, Staging};
pub use super::streams::Stream;
use super::streams::{Capture, InFlight, Works};
use super::sys::{self, CUcontext, CUresult, CUstream, CUstream_flags, Handle, check, describe};
use super::waits::{self, Counts};
use crate::error::{Error, Result, format_bytes};
use crate::sys::lock::lock;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::fmt;
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// The number of recent kernels that an error names if the GPU fails.
const NAMED: usize = 4;

/// A GPU and its streams. It lives as long as the process.
#[derive(Debug)]
pub struct Gpu {
    properties: Properties,
    context: Handle<CUcontext>,
    /// The streams, in the order of `Stream`.
    streams: [Handle<CUstream>; 6],
    /// One for each stream.
    pub(super) marks: Mutex<Vec<Event>>,
    pub(super) kernels: Kernels,
    pub(super) staging: Mutex<Staging>,
    /// The kernels that were started last.
    recent: Mutex<VecDeque<&'static str>>,
    pool: Mutex<Pool>,
    pub(super) capture: Capture,
    pub(super) works: Works,
    pub(super) in_flight: InFlight,
    /// Counts since it was opened.
    pub counts: Counts,
    /// Whether cuBLASLt computes GEMMs of many rows.
    pub(super) is_fast: AtomicBool,
}

static GPU: OnceLock<Gpu> = OnceLock::new();

thread_local! {
    /// The null GPU of this thread, which it keeps for its next plan.
    static NULL: Cell<Option<&'static Gpu>> = const { Cell::new(None) };
    /// Whether this thread has the context.
    static ENTERED: Cell<bool> = const { Cell::new(false) };
}

/// The GPU that this process computes on.
///
/// # Panics
/// If none was started.
pub fn gpu() -> &'static Gpu {
    opened().expect("the GPU is started before its first use")
}

/// The GPU of this process, if it has one.
pub(super) fn opened() -> Option<&'static Gpu> {
    if null_driver::is_active() { NULL.get() } else { GPU.get() }
}

/// Whether this process has a GPU.
pub fn is_started() -> bool {
    opened().is_some()
}

/// The start of the oldest wait of a thread for the GPU, and a description: its purpose, the GPU and the latest
/// kernels.
pub fn standing_still() -> Option<(Instant, String)> {
    let (since, what) = waits::first()?;
    Some((since, format!("{what} ({})", opened()?.name_and_last())))
}

/// Makes `gpu` the GPU of this process. The first one is kept.
pub fn start(gpu: Gpu) -> &'static Gpu {
    GPU.get_or_init(|| gpu)
}

/// Starts a null GPU on this thread, if its null device is a GPU.
///
/// # Errors
/// Errors that a plan cannot handle.
pub fn start_null() -> Result<()> {
    let gpu = match NULL.get() {
        Some(gpu) => gpu,
        None => Box::leak(Box::new(Gpu::open(0)?)),
    };
    NULL.set(Some(gpu));
    // Clears the state of an earlier run.
    gpu.capture.end();
    gpu.works.clear();
    lock(&gpu.in_flight).clear();
    *gpu.pool() = Pool::null();
    gpu.pool().usage.pinned = STAGING_BYTES;
    Ok(())
}

impl Gpu {
    /// Opens GPU number `index` of the GPUs that the driver shows to this process, and loads the kernels.
    ///
    /// # Errors
    /// `Usage` if there is no such GPU, or it cannot run the kernels.
    pub fn open(index: usize) -> Result<Self> {
        let (version, all) = devices::devices().map_err(|why| Error::usage(format!("no GPU: {why}")))?;
        let count = all.len();
        let properties = all.into_iter().nth(index);
        let properties = properties
            .ok_or_else(|| Error::usage(format!("GPU {index} was requested, but this process sees only {count}")))?;
        let device = devices::handle(index as c_int)?;
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: a device that is there; writes a handle.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check("cuDevicePrimaryCtxRetain", retained).map_err(|error| {
            if !devices::is_exclusive(device) {
                return error;
            }
            Error::usage(format!("{}; the compute mode of GPU {index} is exclusive", error.message)).hint(
                "give each rank a GPU of its own, or let ranks share this one (nvidia-smi -c DEFAULT): \
                     another process holds it",
            )
        })?;
        // SAFETY: a context that lives as long as the process; it becomes this thread's.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })?;
        let kernels = Kernels::load(&properties, version)?;
        let (pool, capture, works, in_flight, counts, is_fast) = Default::default();
        let gpu = Self {
            properties,
            context: Handle(context),
            streams: streams()?,
            marks: Mutex::new((0..6).map(|_| Event::new()).collect::<Result<_>>()?),
            kernels,
            staging: Mutex::new(Staging::new()?),
            recent: Mutex::new(VecDeque::with_capacity(NAMED)),
            pool,
            capture,
            works,
            in_flight,
            counts,
            is_fast,
        };
        gpu.pool().usage.pinned += STAGING_BYTES;
        Ok(gpu)
    }

    /// The properties that the driver reports.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// The resources of each of its kernels.
    pub fn resources(&self) -> Vec<(&'static str, Resources)> {
        self.kernels.resources().collect()
    }

    /// A description of the origin of its kernels.
    pub fn origin(&self) -> String {
        self.kernels.origin()
    }

    /// The name of its kernels' machine code, equal on two GPUs only if the code is.
    pub fn code(&self) -> &str {
        &self.kernels.code
    }

    /// Sets the GPU's context on this thread. CUDA libraries use the current context.
    ///
    /// # Errors
    /// The driver's message.
    pub fn enter(&self) -> std::result::Result<(), String> {
        self.set_context().map_err(|error| error.to_string())
    }

    /// Sets the context, once per thread.
    fn set_context(&self) -> Result<()> {
        if ENTERED.get() || null_driver::is_active() {
            return Ok(());
        }
        // SAFETY: a context that lives as long as the process.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context.0) })?;
        ENTERED.set(true);
        Ok(())
    }

    /// Makes driver calls in the GPU's context. An error names the GPU and the latest kernels: the driver reports a
    /// kernel's fault at a later call.
    pub(super) fn call<T>(&self, calls: impl FnOnce() -> Result<T>) -> Result<T> {
        self.set_context()?;
        calls().map_err(|mut error| {
            error.message = format!("{}, on {}", error.message, self.name_and_last());
            error
        })
    }

    /// Same as `call`, but ends the job with the driver's error.
    pub(super) fn must<T>(&self, doing: impl FnOnce() -> String, calls: impl FnOnce() -> Result<T>) -> T {
        self.call(calls).unwrap_or_else(|error| std::panic::panic_any(error.within(doing())))
    }

    /// The number and the PCI address: `GPU 0 at 0000:3b:00.0`.
    pub fn name(&self) -> String {
        self.properties.address()
    }

    /// The name of the GPU and the latest kernels:
    /// `GPU 0 at 0000:3b:00.0; kernels started last: rope_rotate, attention_forward_64`.
    fn name_and_last(&self) -> String {
        let recent = lock(&self.recent).iter().copied().collect::<Vec<_>>().join(", ");
        let last = if recent.is_empty() { recent } else { format!("; kernels started last: {recent}") };
        self.name() + &last
    }

    pub(super) fn note_started(&self, kernel: &'static str) {
        let mut recent = lock(&self.recent);
        if recent.len() == NAMED {
            recent.pop_front();
        }
        recent.push_back(kernel);
    }

    /// The driver's handle of the stream on which this thread starts work now; CUDA libraries use it, too.
    pub fn queue(&self) -> CUstream {
        self.stream(Stream::Compute.here())
    }

    /// The driver's handle of a stream.
    pub fn stream(&self, stream: Stream) -> CUstream {
        self.streams[stream as usize].0
    }

    pub(super) fn pool(&self) -> MutexGuard<'_, Pool> {
        lock(&self.pool)
    }

    /// The use of its memory, in bytes.
    pub fn usage(&self) -> Usage {
        self.pool().usage
    }

    /// Restarts the peak of its memory. Returns the previous peak.
    pub fn begin_peak(&self) -> usize {
        let usage = &mut self.pool().usage;
        std::mem::replace(&mut usage.peak, usage.in_use)
    }

    /// Limits the memory of this process to `bytes` (0: no limit). Memory in use beyond the limit is kept.
    pub fn set_limit(&self, bytes: u64) {
        let limit = if bytes == 0 { usize::MAX } else { usize::try_from(bytes).unwrap_or(usize::MAX) };
        let mut pool = self.pool();
        pool.usage.limit = limit;
        pool.shrink(limit, self);
    }

    /// Asks the driver at once for all memory that this process may use, so that it is not asked again.
    pub fn reserve(&self) {
        let mut pool = self.pool();
        let bytes = pool.usage.limit;
        pool.reserve(bytes, self);
    }

    /// The owners of its memory and their bytes, the largest first.
    pub fn owners(&self) -> Vec<(&'static str, usize)> {
        self.pool().owners()
    }

    /// Bytes of its memory that no process has allocated.
    pub fn free_bytes(&self) -> usize {
        self.must(|| "reading the free GPU memory".into(), ask_free)
    }

    /// Gives kept memory back to the driver.
    pub fn trim(&self) {
        self.pool().shrink(0, self);
    }

    /// Allocates `bytes` of memory for `owner`, aligned to 256, which `stream` uses first. Contents are unspecified.
    ///
    /// # Errors
    /// `Usage` if there is not enough memory.
    pub(super) fn allocate(&self, bytes: usize, owner: &'static str, stream: Stream) -> Result<u64> {
        let mut pool = self.pool();
        let address = pool.allocate(bytes, owner, self)?;
        let end = address + pool.size_of(address) as u64;
        drop(pool);
        self.behind_copies(address..end, stream);
        Ok(address)
    }

    /// Frees memory. If work on another stream uses it, it is freed when that work is joined.
    pub(super) fn free(&self, address: u64) {
        let mut pool = self.pool();
        let end = address + pool.size_of(address) as u64;
        if !self.works.keep(address..end) {
            pool.give(address, self);
        }
    }

    pub(super) fn release(&self, runs: Free) {
        self.pool().release(runs, self);
    }
}

fn ask_free() -> Result<usize> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes two numbers.
    check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
    Ok(free)
}

/// Creates one stream for each `Stream`. Collectives have the highest priority: other ranks wait for their few blocks.
fn streams() -> Result<[Handle<CUstream>; 6]> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: writes two numbers.
    let status = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
    check("cuCtxGetStreamPriorityRange", status)?;
    let mut streams = [Handle(ptr::null_mut()); 6];
    for (i, stream) in streams.iter_mut().enumerate() {
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let collectives = [Stream::Tensor, Stream::Zero, Stream::Ring];
        let priority = if collectives.iter().any(|stream| *stream as usize == i) { greatest } else { least };
        // SAFETY: writes a handle.
        let status = unsafe { sys::cuStreamCreateWithPriority(&raw mut stream.0, flags, priority) };
        check("cuStreamCreateWithPriority", status)?;
    }
    Ok(streams)
}

impl Backing for Gpu {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        let (mut address, mut status) = (0, CUresult::CUDA_SUCCESS);
        let given = self.call(|| {
            // SAFETY: writes a number. The driver aligns to 256 bytes at least.
            status = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) };
            check("cuMemAlloc", status)
        });
        if status != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return given.map(|()| address);
        }
        let size = |bytes: usize| format_bytes(bytes as u64);
        let (free, all) = (size(self.call(ask_free)?), size(self.properties.memory_bytes));
        Err(Error::usage(format!("cuMemAlloc: {}: {free} of {all} is free on {}", describe(status), self.name())))
    }

    fn free(&self, address: u64, _bytes: usize) {
        // SAFETY: came from `allocate`, is freed once; the driver waits until the GPU is done with it. The next call
        // reports a failure, too.
        let _ = unsafe { sys::cuMemFree_v2(address) };
    }
}

/// An argument of a kernel, with the type of its parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    Address(u64),
    I32(i32),
    U32(u32),
    U64(u64),
    F32(f32),
}

impl Arg {
    /// Its bits, in the lower bytes.
    pub(super) fn word(self) -> u64 {
        match self {
            Self::Address(x) | Self::U64(x) => x,
            Self::I32(x) => u64::from(x as u32),
            Self::U32(x) => u64::from(x),
            Self::F32(x) => u64::from(x.to_bits()),
        }
    }
}

impl fmt::Display for Arg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(x) => write!(f, "{x:#x}"),
            Self::I32(x) => x.fmt(f),
            Self::U32(x) => x.fmt(f),
            Self::U64(x) => x.fmt(f),
            Self::F32(x) => x.fmt(f),
        }
    }
}

impl From<usize> for Arg {
    /// Lengths go to kernels as u64; dims that kernels take as int are `i32`.
    fn from(x: usize) -> Self {
        Self::U64(x as u64)
    }
}
