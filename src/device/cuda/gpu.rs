//! The GPU of this process: memory, copies, and kernels in the order of one stream.

pub use super::arg::Arg;
use super::devices::Properties;
use super::driver::{Captured, Driver};
use super::emulated::{Emulated, Step, Work};
use super::pool::{Backing, Pool, Run, Usage};
use super::staging::{Event, Pages, STAGING_BYTES};
use super::standing::Counts;
pub use super::streams::Stream;
use super::streams::{Capture, Leavers, Works};
use crate::error::{Error, Result, size_words};
use std::ffi::c_void;
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// A device and how it is reached.
#[derive(Debug)]
pub struct Gpu {
    pub(super) backend: Backend,
    pool: Mutex<Pool>,
    pub(super) capture: Capture,
    pub(super) works: Works,
    pub(super) leavers: Leavers,
    pub(super) counts: Counts,
}

#[derive(Debug)]
pub(super) enum Backend {
    Driver(Box<Driver>),
    Emulated(Emulated),
}

/// What a graph starts.
#[derive(Debug)]
pub(super) enum Steps {
    Captured(Captured),
    Played(Vec<Step>),
}

/// Host memory that the GPU copies from and to.
#[derive(Debug)]
pub(super) enum Host {
    Pages(Pages),
    /// In words, so that values of any type may lie there.
    Plain(Vec<u64>),
}

/// Blocks of a grid at most, in x, y and z.
const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

static GPU: OnceLock<Gpu> = OnceLock::new();

/// The GPU that this process computes on.
///
/// # Panics
/// If none was started.
pub fn gpu() -> &'static Gpu {
    GPU.get().expect("a GPU was started before anything was put on it")
}

/// The GPU of this process, if it has one.
pub(super) fn opened() -> Option<&'static Gpu> {
    GPU.get()
}

/// Whether this process has a GPU.
pub fn is_started() -> bool {
    GPU.get().is_some()
}

/// Makes `gpu` the one of this process. The first one stays.
pub fn start(gpu: Gpu) -> &'static Gpu {
    GPU.get_or_init(|| gpu)
}

/// Ends the job with what the GPU says: no layer can do without it, so none could go on.
pub(super) fn must<T>(result: Result<T>, doing: impl FnOnce() -> String) -> T {
    result.unwrap_or_else(|error| std::panic::panic_any(error.within(doing())))
}

impl Gpu {
    fn over(backend: Backend) -> Self {
        let pool = Mutex::new(Pool::default());
        let (capture, works, leavers, counts) = Default::default();
        Self { backend, pool, capture, works, leavers, counts }
    }

    /// The GPU number `index` of those that the driver shows to this process.
    ///
    /// # Errors
    /// `Usage` where there is none, or it cannot run the kernels.
    pub fn open(index: usize) -> Result<Self> {
        let gpu = Self::over(Backend::Driver(Box::new(Driver::open(index)?)));
        gpu.pool().usage.pinned += STAGING_BYTES;
        Ok(gpu)
    }

    /// A GPU played on the CPU by the kernels of a shared library (`tests/kernels/emulation`).
    ///
    /// # Errors
    /// `Io` where the library cannot be opened.
    pub fn emulated(library: &Path) -> Result<Self> {
        let mut played = Self::over(Backend::Emulated(Emulated::open(library)?));
        played.pool = Mutex::new(Pool::exact());
        Ok(played)
    }

    /// What the driver says of it; none for a played one.
    pub fn properties(&self) -> Option<&Properties> {
        match &self.backend {
            Backend::Driver(driver) => Some(&driver.properties),
            Backend::Emulated(_) => None,
        }
    }

    /// From where its kernels came, in words.
    pub fn origin(&self) -> String {
        match &self.backend {
            Backend::Driver(driver) => driver.origin().to_string(),
            Backend::Emulated(_) => "a library that plays them on the CPU".into(),
        }
    }

    pub(super) fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
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
        pool.shrink(limit, &self.backend);
    }

    /// Asks the driver at once for what this process will need, so that it is not asked again.
    pub fn reserve(&self, bytes: usize) {
        self.pool().reserve(bytes, &self.backend);
    }

    /// Who uses how much of its memory, the most first.
    pub fn owners(&self) -> Vec<(&'static str, usize)> {
        self.pool().owners()
    }

    /// Bytes of its memory that no process has taken; none for a played one.
    pub fn free_bytes(&self) -> Option<usize> {
        match &self.backend {
            Backend::Driver(driver) => Some(must(driver.free_bytes(), || "how much of the GPU is free".into())),
            Backend::Emulated(_) => None,
        }
    }

    /// Gives kept memory back to the driver.
    pub fn trim(&self) {
        self.pool().shrink(0, &self.backend);
    }

    /// The address of `bytes` of memory for `owner`, aligned to 256, which `stream` uses first. Contents unspecified.
    ///
    /// # Errors
    /// `Usage` where there is not as much.
    pub(super) fn allocate(&self, bytes: usize, owner: &'static str, stream: Stream) -> Result<u64> {
        let mut pool = self.pool();
        let address = pool.take(bytes, owner, &self.backend)?;
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
            pool.give(address, &self.backend);
        }
    }

    /// Copies to the device, behind what was started before. `from` may change when this returns.
    pub(super) fn upload(&self, to: u64, from: &[u8]) {
        self.outside_captures("an upload");
        self.counts.add_up(from.len());
        match &self.backend {
            Backend::Driver(driver) => must(driver.upload(to, from), || format!("{} bytes to the GPU", from.len())),
            Backend::Emulated(_) => Emulated::upload(to, from),
        }
    }

    /// Copies from the device when all that was started before has ended.
    pub(super) fn download(&self, to: &mut [u8], from: u64) {
        self.outside_captures("a download");
        self.counts.add_drained();
        self.counts.add_down(to.len());
        match &self.backend {
            Backend::Driver(driver) => {
                let bytes = to.len();
                must(driver.download(to, from), || format!("{bytes} bytes from the GPU"));
            }
            Backend::Emulated(_) => Emulated::download(to, from),
        }
    }

    /// Copies within the device, behind what was started before.
    pub(super) fn copy(&self, to: u64, from: u64, bytes: usize) {
        self.works.note([to, from]);
        self.counts.add_within(bytes);
        match &self.backend {
            Backend::Driver(driver) if bytes > 0 => {
                self.must_start(driver.copy(to, from, bytes), || format!("{bytes} bytes within the GPU"));
            }
            Backend::Driver(_) => {}
            Backend::Emulated(emulated) => played(emulated.start(Step::Copy { to, from, bytes })),
        }
    }

    /// Sets `bytes` to 0, behind what was started before.
    pub(super) fn clear(&self, at: u64, bytes: usize) {
        self.works.note([at]);
        match &self.backend {
            Backend::Driver(driver) if bytes > 0 => {
                self.must_start(driver.clear(at, bytes), || format!("{bytes} bytes to 0"));
            }
            Backend::Driver(_) => {}
            Backend::Emulated(emulated) => played(emulated.start(Step::Clear { at, bytes })),
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
        self.counts.add_started();
        let [x, y, z] = grid;
        let started = counted(grid, block).and_then(|(grid, block)| match &self.backend {
            Backend::Driver(driver) => driver.launch(kernel, grid, block, shared_bytes, args),
            Backend::Emulated(emulated) => {
                let args = args.to_vec();
                let step = Step::Launch { kernel, grid, block, shared_bytes, args };
                emulated.start(step).map_err(Error::fault)
            }
        });
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
        self.counts.add_drained();
        match &self.backend {
            Backend::Driver(driver) => must(driver.wait(stream), || format!("waiting for the {stream:?} stream")),
            Backend::Emulated(_) => {}
        }
    }

    /// What is started on `then` from now on waits for what was started on `first`.
    pub fn order(&self, first: Stream, then: Stream) {
        match &self.backend {
            Backend::Driver(driver) => {
                self.must_start(driver.order(first, then), || format!("{then:?} behind {first:?}"));
            }
            Backend::Emulated(_) => {}
        }
    }

    /// Whether work is done when the call that starts it returns: on a played GPU.
    pub fn is_immediate(&self) -> bool {
        matches!(self.backend, Backend::Emulated(_))
    }

    /// The driver's handle of the stream to which this thread starts things now, for libraries of CUDA; null on a played GPU.
    pub fn queue(&self) -> *mut c_void {
        self.stream(super::streams::stream()).unwrap_or(std::ptr::null_mut())
    }

    /// The driver's handle of a stream, for libraries of CUDA; none on a played GPU, where everything runs at once.
    pub fn stream(&self, stream: Stream) -> Option<*mut c_void> {
        match &self.backend {
            Backend::Driver(driver) => Some(driver.stream(stream).cast()),
            Backend::Emulated(_) => None,
        }
    }

    /// Lets a library of CUDA start work on the stream to which this thread starts things now, behind what was started before;
    /// on a played GPU that is null. `work` runs again at each replay of a played graph that noted it.
    ///
    /// # Errors
    /// What `work` says.
    pub fn with_stream(
        &self,
        work: impl Fn(*mut c_void) -> std::result::Result<(), String> + Send + Sync + 'static,
    ) -> std::result::Result<(), String> {
        self.enter()?;
        match &self.backend {
            Backend::Driver(driver) => work(driver.stream(super::streams::stream()).cast()),
            Backend::Emulated(emulated) => emulated.start(Step::Library(Work::new(move || work(ptr::null_mut())))),
        }
    }

    /// Gives this thread the GPU's context, which libraries of CUDA look for.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enter(&self) -> std::result::Result<(), String> {
        match &self.backend {
            Backend::Driver(driver) => driver.enter().map_err(|error| error.to_string()),
            Backend::Emulated(_) => Ok(()),
        }
    }

    /// The library that plays this GPU; none of a real one.
    pub(super) fn played_by(&self) -> Option<&Path> {
        match &self.backend {
            Backend::Driver(_) => None,
            Backend::Emulated(emulated) => Some(&emulated.path),
        }
    }

    pub(super) fn release(&self, runs: Vec<Run>) {
        self.pool().release(runs, &self.backend);
    }

    pub(super) fn pinned(&self, bytes: usize) -> Host {
        let host = match &self.backend {
            Backend::Driver(driver) => {
                let pages = driver.pinned(bytes).map_err(|mut error| {
                    let has = size_words(self.usage().pinned as u64);
                    error.message = format!("{}; this process has pinned {has}", error.message);
                    error
                });
                Host::Pages(pages.unwrap_or_else(|error| std::panic::panic_any(error)))
            }
            Backend::Emulated(_) => Host::Plain(vec![0; bytes.div_ceil(size_of::<u64>())]),
        };
        let usage = &mut self.pool().usage;
        usage.pinned += bytes;
        usage.pinned_requests += 1;
        host
    }

    /// Lets this thread wait for an event; `what` is waited for.
    pub(super) fn await_event(&self, event: &Event, what: &'static str) {
        if let Backend::Driver(driver) = &self.backend {
            must(driver.await_event(event, what), || what.into());
        }
    }

    pub(super) fn unpinned(&self, bytes: usize) {
        self.pool().usage.pinned -= bytes;
    }

    /// What is started on the compute stream from now on waits for a copy.
    pub(super) fn hold(&self, event: &Event) {
        if let Backend::Driver(driver) = &self.backend {
            must(driver.hold(event), || "the compute stream behind a copy".into());
        }
    }

    pub(super) fn fetch(&self, to: &mut Host, from: u64, bytes: usize, stream: Stream) -> Option<Event> {
        self.outside_captures("a download");
        match (&self.backend, to) {
            (Backend::Driver(driver), Host::Pages(pages)) => {
                Some(must(driver.fetch(pages, from, bytes, stream), || format!("{bytes} bytes from the GPU")))
            }
            (_, Host::Plain(to)) => {
                Emulated::download(&mut bytemuck::cast_slice_mut(to)[..bytes], from);
                None
            }
            (Backend::Emulated(_), Host::Pages(_)) => unreachable!("a process has one GPU"),
        }
    }

    pub(super) fn put(&self, to: u64, from: &Host, bytes: usize, stream: Stream) -> Option<Event> {
        self.outside_captures("an upload");
        match (&self.backend, from) {
            (Backend::Driver(driver), Host::Pages(pages)) => {
                Some(must(driver.put(to, pages, bytes, stream), || format!("{bytes} bytes to the GPU")))
            }
            (_, Host::Plain(from)) => {
                self.upload(to, &bytemuck::cast_slice(from)[..bytes]);
                None
            }
            (Backend::Emulated(_), Host::Pages(_)) => unreachable!("a process has one GPU"),
        }
    }

    /// Runs the fibers of the played GPU in another order (0 to 4); no effect on a real one.
    pub fn set_order(&self, order: i32) {
        match &self.backend {
            Backend::Driver(_) => {}
            Backend::Emulated(emulated) => emulated.set_order(order),
        }
    }
}

impl Backing for Backend {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        match self {
            Self::Driver(driver) => driver.allocate(bytes),
            Self::Emulated(emulated) => {
                emulated.allocate(bytes).ok_or_else(|| Error::usage("the host that plays the GPU has not as much"))
            }
        }
    }

    fn free(&self, address: u64, bytes: usize) {
        match self {
            Self::Driver(driver) => driver.free(address, bytes),
            Self::Emulated(emulated) => emulated.free(address, bytes),
        }
    }
}

/// Only kernels can fail on a played GPU, and `launch` says how.
pub(super) fn played(outcome: std::result::Result<(), String>) {
    outcome.unwrap_or_else(|why| std::panic::panic_any(Error::fault(why)));
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
