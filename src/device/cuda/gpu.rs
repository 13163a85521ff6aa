//! The GPU of this process: memory, copies, and kernels in the order of one stream.

pub use super::arg::Arg;
use super::devices::Properties;
use super::driver::Driver;
use super::null_driver;
use super::pool::{Pool, Run, Usage};
use super::staging::{Event, Pages, STAGING_BYTES};
pub use super::streams::Stream;
use super::streams::{Capture, InFlight, Works};
use super::waits::{self, Copied, Counts, Waits};
use crate::device::null;
use crate::error::{Error, Result, format_bytes};
use crate::sys::lock::lock;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// A device and how it is reached.
#[derive(Debug)]
pub struct Gpu {
    pub(super) driver: Driver,
    pool: Mutex<Pool>,
    pub(super) capture: Capture,
    pub(super) works: Works,
    pub(super) in_flight: InFlight,
    pub(super) counts: Counts,
    /// Whether products of many rows are cuBLASLt's.
    pub(super) is_fast: AtomicBool,
}

/// Blocks of a grid at most, in x, y and z.
const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

static GPU: OnceLock<Gpu> = OnceLock::new();

thread_local! {
    /// The null GPU of this thread, which it keeps for its next plan.
    static NULL: Cell<Option<&'static Gpu>> = const { Cell::new(None) };
}

/// The GPU that this process computes on.
///
/// # Panics
/// If none was started.
pub fn gpu() -> &'static Gpu {
    opened().expect("a GPU was started before anything was put on it")
}

/// The GPU of this process, if it has one.
pub(super) fn opened() -> Option<&'static Gpu> {
    if null_driver::is_active() { NULL.get() } else { GPU.get() }
}

/// Whether this process has a GPU.
pub fn is_started() -> bool {
    opened().is_some()
}

/// Since when a thread has stood still for the GPU, of several the first; and what for, with what may be why.
pub fn standing_still() -> Option<(Instant, String)> {
    let (since, what) = waits::first()?;
    let driver = &opened()?.driver;
    let (name, last) = (driver.name(), driver.last_kernels());
    Some((since, format!("{what} ({name}{last})")))
}

/// Makes `gpu` the one of this process. The first one stays.
pub fn start(gpu: Gpu) -> &'static Gpu {
    GPU.get_or_init(|| gpu)
}

/// Starts a null GPU on this thread, where a null device is that.
///
/// # Errors
/// None that a plan could do anything about.
pub fn start_null() -> Result<()> {
    let gpu = match NULL.get() {
        Some(gpu) => gpu,
        None => Box::leak(Box::new(Gpu::open(0)?)),
    };
    NULL.set(Some(gpu));
    // What a run before has left behind.
    gpu.capture.end();
    gpu.works.clear();
    lock(&gpu.in_flight).clear();
    *gpu.pool() = Pool::null();
    gpu.pool().usage.pinned = STAGING_BYTES;
    Ok(())
}

/// Ends the job with what the GPU says: no layer can do without it, so none could go on.
pub(super) fn must<T>(result: Result<T>, doing: impl FnOnce() -> String) -> T {
    result.unwrap_or_else(|error| std::panic::panic_any(error.within(doing())))
}

impl Gpu {
    /// The GPU number `index` of those that the driver shows to this process.
    ///
    /// # Errors
    /// `Usage` where there is none, or it cannot run the kernels.
    pub fn open(index: usize) -> Result<Self> {
        let driver = Driver::open(index)?;
        let (pool, capture, works, in_flight, counts, is_fast) = Default::default();
        let gpu = Self { driver, pool, capture, works, in_flight, counts, is_fast };
        gpu.pool().usage.pinned += STAGING_BYTES;
        Ok(gpu)
    }

    /// What the driver says of it.
    pub fn properties(&self) -> &Properties {
        &self.driver.properties
    }

    /// From where its kernels came, in words.
    pub fn origin(&self) -> String {
        self.driver.origin().to_string()
    }

    pub(super) fn pool(&self) -> MutexGuard<'_, Pool> {
        lock(&self.pool)
    }

    /// What its memory is used for, in bytes.
    pub fn usage(&self) -> Usage {
        self.pool().usage
    }

    /// From now on the peak of its memory is that of what comes; what it was.
    pub fn begin_peak(&self) -> usize {
        let usage = &mut self.pool().usage;
        std::mem::replace(&mut usage.peak, usage.in_use)
    }

    /// From now on this process takes at most `bytes` of its memory, 0: what there is. What is in use beyond that stays.
    pub fn set_limit(&self, bytes: u64) {
        let limit = if bytes == 0 { usize::MAX } else { usize::try_from(bytes).unwrap_or(usize::MAX) };
        let mut pool = self.pool();
        pool.usage.limit = limit;
        pool.shrink(limit, &self.driver);
    }

    /// Asks the driver at once for what this process will need, so that it is not asked again.
    pub fn reserve(&self, bytes: usize) {
        self.pool().reserve(bytes, &self.driver);
    }

    /// Who uses how much of its memory, the most first.
    pub fn owners(&self) -> Vec<(&'static str, usize)> {
        self.pool().owners()
    }

    /// Bytes of its memory that no process has taken.
    pub fn free_bytes(&self) -> usize {
        must(self.driver.free_bytes(), || "how much of the GPU is free".into())
    }

    /// Gives kept memory back to the driver.
    pub fn trim(&self) {
        self.pool().shrink(0, &self.driver);
    }

    /// The address of `bytes` of memory for `owner`, aligned to 256, which `stream` uses first. Contents unspecified.
    ///
    /// # Errors
    /// `Usage` where there is not as much.
    pub(super) fn allocate(&self, bytes: usize, owner: &'static str, stream: Stream) -> Result<u64> {
        let mut pool = self.pool();
        let address = pool.take(bytes, owner, &self.driver)?;
        let end = address + pool.size_of(address) as u64;
        drop(pool);
        self.behind_copies(address..end, stream);
        Ok(address)
    }

    /// Where a work on another stream uses it, it is given back when that is joined.
    pub(super) fn free(&self, address: u64) {
        let mut pool = self.pool();
        let end = address + pool.size_of(address) as u64;
        if !self.works.keep(address..end) {
            pool.give(address, &self.driver);
        }
    }

    /// Copies to the device, behind what was started before. `from` may change when this returns.
    pub(super) fn upload(&self, to: u64, from: &[u8]) {
        self.outside_captures("an upload");
        self.counts.up.add(from.len());
        must(self.driver.upload(to, from), || format!("{} bytes to the GPU", from.len()));
    }

    /// Copies from the device when all that was started before has ended.
    pub(super) fn download(&self, to: &mut [u8], from: u64) {
        self.outside_captures("a download");
        self.counts.drained.add(1);
        self.counts.down.add(to.len());
        let bytes = to.len();
        must(self.driver.download(to, from), || format!("{bytes} bytes from the GPU"));
    }

    /// Copies within the device, behind what was started before.
    pub(super) fn copy(&self, to: u64, from: u64, bytes: usize) {
        self.works.note([to, from]);
        self.counts.within.add(bytes);
        if bytes > 0 {
            self.must_start(self.driver.copy(to, from, bytes), || format!("{bytes} bytes within the GPU"));
        }
    }

    /// Sets `bytes` to 0, behind what was started before.
    pub(super) fn clear(&self, at: u64, bytes: usize) {
        self.works.note([at]);
        if bytes > 0 {
            self.must_start(self.driver.clear(at, bytes), || format!("{bytes} bytes to 0"));
        }
    }

    /// Starts a kernel behind what was started before. Blocks are of `block` threads in x. A grid without blocks starts
    /// nothing.
    ///
    /// # Panics
    /// With an [`Error`] as payload, where there is no such kernel, or it fails: it names the kernel, its grid and its arguments.
    pub fn launch(&self, kernel: &'static str, grid: [usize; 3], block: usize, shared_bytes: usize, args: &[Arg]) {
        if grid.contains(&0) {
            return;
        }
        self.works.note(args.iter().filter_map(|arg| if let Arg::Address(at) = arg { Some(*at) } else { None }));
        self.counts.started.add(1);
        let [x, y, z] = grid;
        let launch = |(grid, block)| self.driver.launch(kernel, grid, block, shared_bytes, args);
        let started = counted(grid, block).and_then(launch);
        // What failed comes before what the kernel was given, which may be long.
        let started = started.map_err(|mut error| {
            let given = args.iter().map(Arg::to_string).collect::<Vec<_>>().join(", ");
            error.message = format!("{}; it was given {given}", error.message);
            error
        });
        self.must_start(started, || format!("kernel {kernel}, grid {x} x {y} x {z} of {block} threads"));
    }

    /// Waits until all that was started on the compute stream has ended.
    pub fn wait(&self) {
        self.wait_for(Stream::Compute);
    }

    /// Waits until all that was started on `stream` has ended.
    pub fn wait_for(&self, stream: Stream) {
        self.outside_captures("a wait");
        self.counts.drained.add(1);
        must(self.driver.wait(stream), || format!("waiting for the {stream:?} stream"));
    }

    /// Seconds that the compute stream is at what `work` starts there, between two of its own marks: without what the host
    /// takes to start and to wait. The host waits.
    ///
    /// # Panics
    /// If a graph is being captured.
    pub fn seconds(&self, work: impl FnOnce()) -> f64 {
        self.outside_captures("a measurement");
        let mark = || must(self.driver.timed_mark(), || "a mark".into());
        let begun = mark();
        work();
        let ended = mark();
        self.wait();
        must(ended.seconds_since(&begun), || "the time between two marks".into())
    }

    /// Graphs that were launched since the GPU was opened.
    pub fn replays(&self) -> u64 {
        self.counts.replayed.get()
    }

    pub fn copied(&self) -> Copied {
        Copied { up: self.counts.up.get(), down: self.counts.down.get() }
    }

    /// Bytes that were copied within the GPU since it was opened, other than by kernels.
    pub fn copied_within(&self) -> u64 {
        self.counts.within.get()
    }

    pub fn waits(&self) -> Waits {
        Waits { drained: self.counts.drained.get(), fetched: self.counts.fetched.get() }
    }

    /// What is started on `then` from now on waits for what was started on `first`.
    pub fn order(&self, first: Stream, then: Stream) {
        self.must_start(self.driver.order(first, then), || format!("{then:?} behind {first:?}"));
    }

    /// The driver's handle of the stream to which this thread starts things now, for libraries of CUDA.
    pub fn queue(&self) -> *mut c_void {
        self.stream(super::streams::stream())
    }

    /// The driver's handle of a stream, for libraries of CUDA.
    pub fn stream(&self, stream: Stream) -> *mut c_void {
        self.driver.stream(stream).cast()
    }

    /// Gives this thread the GPU's context, which libraries of CUDA look for.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enter(&self) -> std::result::Result<(), String> {
        self.driver.enter().map_err(|error| error.to_string())
    }

    pub(super) fn release(&self, runs: Vec<Run>) {
        self.pool().release(runs, &self.driver);
    }

    pub(super) fn pinned(&self, bytes: usize) -> Pages {
        let pages = self.driver.pinned(bytes).map_err(|mut error| {
            let has = format_bytes(self.usage().pinned as u64);
            error.message = format!("{}; this process has pinned {has}", error.message);
            error
        });
        let pages = pages.unwrap_or_else(|error| std::panic::panic_any(error));
        let usage = &mut self.pool().usage;
        usage.pinned += bytes;
        null::hold_on_host(usage.pinned);
        usage.pinned_requests += 1;
        pages
    }

    /// Lets this thread wait for an event; `what` is waited for.
    pub(super) fn await_event(&self, event: &Event, what: &'static str) {
        must(self.driver.await_event(event, what), || what.into());
    }

    pub(super) fn unpinned(&self, bytes: usize) {
        self.pool().usage.pinned -= bytes;
    }

    pub(super) fn fetch(&self, to: &mut Pages, from: u64, bytes: usize, stream: Stream) -> Event {
        self.outside_captures("a download");
        must(self.driver.fetch(to, from, bytes, stream), || format!("{bytes} bytes from the GPU"))
    }

    pub(super) fn put(&self, to: u64, from: &Pages, bytes: usize, stream: Stream) -> Event {
        self.outside_captures("an upload");
        must(self.driver.put(to, from, bytes, stream), || format!("{bytes} bytes to the GPU"))
    }
}

/// A grid and the threads of a block as GPUs take them.
fn counted(grid: [usize; 3], block: usize) -> Result<([u32; 3], u32)> {
    if grid.iter().zip(GRID_MAX).any(|(blocks, most)| *blocks > most as usize) {
        let [x, y, z] = GRID_MAX;
        return Err(Error::fault(format!("a GPU takes a grid of {x} x {y} x {z} blocks at most")));
    }
    let threads = u32::try_from(block).map_err(|_| Error::fault(format!("a GPU takes no block of {block} threads")))?;
    Ok((grid.map(|blocks| blocks as u32), threads))
}
