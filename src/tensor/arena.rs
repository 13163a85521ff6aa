//! Memory for tensors: 64-byte aligned buffers. Dropped buffers are kept and reused, so steady-state steps neither ask
//! the system for memory nor cause page faults.
//!
//! The plan can reproduce these rules:
//!
//! 1. A buffer takes its [`size_class`]. *In use* is the sum over live buffers, *held* adds the kept ones, *peak* is
//!    the maximum of in use.
//! 2. A request gets a kept buffer of its class. If there is none and held would exceed [`bound`] = min(peak + max(peak
//!    / 64, 128 MiB), limit), a kept buffer of at most 5/4 of the class lends its first part. Otherwise kept buffers
//!    are returned to the system, the longest unused first, until a new one fits.
//! 3. So held never exceeds the bound, and resident memory follows held. The system backs a page when it is first
//!    written, and the padding of a class is never written.
//! 4. If in use itself would exceed the limit, the job ends with an error.

use super::host_pool::HostPool;
use crate::device::cpu::copy;
use crate::device::cuda::owner;
use crate::device::null;
use crate::error::Result;
use crate::sys::lock::lock;
use crate::sys::pages::{Pages, page_size};
use crate::sys::trace::{self, Category};
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

pub use super::host_pool::{HINT, bound, size_class};
pub use crate::sys::memory::Usage;

/// The number of values that are copied to a file before their pages are evicted.
const MOVED_AT_ONCE: usize = 16 << 20;

static ARENA: Mutex<HostPool> = Mutex::new(HostPool::new());

thread_local! {
    /// The arena of a null device.
    static NULL: RefCell<HostPool> = const { RefCell::new(HostPool::new()) };
}

fn with_arena<R>(f: impl FnOnce(&mut HostPool) -> R) -> R {
    if null::is_active() {
        return NULL.with_borrow_mut(|arena| {
            let done = f(arena);
            null::back(arena.usage.resident);
            done
        });
    }
    f(&mut lock(&ARENA))
}

pub fn usage() -> Usage {
    with_arena(|a| a.usage)
}

/// Resets the peak to the bytes in use now.
pub fn begin_peak() {
    with_arena(|a| a.usage.peak = a.usage.in_use);
}

/// Returns every kept buffer to the system.
pub fn trim() {
    with_arena(|a| a.shrink(0));
}

/// Limits the memory of tensors to `bytes`; 0 means no limit. Live buffers stay.
pub fn set_limit(bytes: u64) {
    with_arena(|a| {
        a.usage.limit = if bytes == 0 { usize::MAX } else { usize::try_from(bytes).unwrap_or(usize::MAX) };
        a.shrink(a.usage.limit);
    });
}

/// Runs `work` on a null device (`device::null`), with an arena of its own whose pages are never written.
pub fn on_null<R>(device: null::Null, work: impl FnOnce() -> R) -> (R, Usage, null::Record) {
    NULL.set(HostPool::new());
    let (done, record) = null::run(device, work);
    (done, NULL.replace(HostPool::new()).usage, record)
}

/// Seconds that this process has spent moving the state of `mesh.offload` out of memory and back, since it started.
pub fn moving_s() -> f64 {
    MOVING_NS.load(Ordering::Relaxed) as f64 * 1e-9
}

static MOVING_NS: AtomicU64 = AtomicU64::new(0);

/// Adds the time since `since` to `moving_s`.
pub fn count_moving(since: Instant) {
    trace::since(Category::Io, || "offload or onload", since);
    MOVING_NS.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
}

/// Ends the job with the arena's error: no layer can continue without its memory.
fn must<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| std::panic::panic_any(error))
}

/// An owned, 64-byte aligned run of f32. From 2 MiB up it is 2 MiB aligned and uses huge pages.
///
/// If there is no memory for a buffer, the thread panics with an [`Error`] as payload, and `comm::abort` ends the job
/// with it.
pub struct Buffer {
    /// `None` only while the buffer is dropped.
    pages: Option<Pages>,
    start: NonNull<f32>,
    len: usize,
    /// Whether the buffer is evicted, if it is in a mapped file.
    evicted: Option<AtomicBool>,
    /// The owner under which a null device counts it.
    owner: &'static str,
}

// SAFETY: a Buffer owns its memory exclusively, as a Box<[f32]> does.
unsafe impl Send for Buffer {}
// SAFETY: shared access is read-only, as for a Box<[f32]>.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn from_pages(pages: Pages, len: usize, evicted: Option<AtomicBool>) -> Self {
        Self { start: pages.start().cast(), pages: Some(pages), len, evicted, owner: owner() }
    }

    /// A buffer with unspecified contents (those of its last user). In debug builds it is filled with NaN.
    pub fn scratch(len: usize) -> Self {
        let bytes = size_class(len * size_of::<f32>());
        let pages = must(with_arena(|a| a.take_pages(bytes, len * size_of::<f32>())));
        let mut buffer = Self::from_pages(pages, len, None);
        null::count_tensor(buffer.owner, bytes);
        if cfg!(debug_assertions) && !null::is_active() {
            buffer.fill(f32::NAN);
        }
        buffer
    }

    pub fn zeros(len: usize) -> Self {
        let mut buffer = Self::scratch(len);
        copy::fill(&mut buffer, 0.0);
        buffer
    }

    /// Moves the contents into a memory-mapped file in `dir`. The file has no name and disappears with the buffer. A
    /// mapped buffer is used like any other. It is evicted at first; `prefetch` brings it back.
    ///
    /// # Errors
    /// `Io` if the disk has no space for it. The buffer is unchanged then.
    pub fn move_to_file(&mut self, dir: &Path) -> Result<()> {
        if self.evicted.is_some() {
            return Ok(());
        }
        let start = Instant::now();
        let bytes = (self.len * size_of::<f32>()).max(1).next_multiple_of(page_size());
        let pages = if null::is_active() { Pages::untouched(bytes) } else { Some(Pages::of_file(bytes, dir)?) };
        let Some(pages) = pages else { return Ok(()) };
        let in_files = with_arena(|a| {
            a.usage.evicted += bytes;
            a.usage.evicted
        });
        null::hold_on_host(in_files);
        let mut other = Self::from_pages(pages, self.len, Some(AtomicBool::new(true)));
        other.owner = self.owner;
        for at in (0..self.len).step_by(MOVED_AT_ONCE) {
            let part = at..self.len.min(at + MOVED_AT_ONCE);
            copy::copy(&self[part.clone()], &mut other[part]);
            other.pages().evict();
        }
        *self = other;
        count_moving(start);
        Ok(())
    }

    /// Evicts a mapped buffer from memory. Its contents stay in the file, and any access brings back the pages that it
    /// touches. Does nothing for other buffers.
    pub fn evict(&self) {
        let Some(evicted) = &self.evicted else { return };
        let start = Instant::now();
        // An evicted buffer may have been touched since.
        self.pages().evict();
        if !evicted.swap(true, Ordering::SeqCst) {
            with_arena(|a| a.evict(self.pages().bytes()));
            null::uncount_tensor(self.owner, self.pages().bytes());
        }
        count_moving(start);
    }

    /// Brings an evicted buffer back for reading, and counts it as in use again.
    pub fn prefetch(&self) {
        self.bring_back(false);
    }

    /// The same for writing.
    pub fn prefetch_mut(&mut self) {
        self.bring_back(true);
    }

    fn bring_back(&self, written: bool) {
        let Some(evicted) = &self.evicted else { return };
        let start = Instant::now();
        if evicted.swap(false, Ordering::SeqCst) {
            must(with_arena(|a| a.bring(self.pages().bytes())));
            null::count_tensor(self.owner, self.pages().bytes());
        }
        self.pages().prefetch(written);
        count_moving(start);
    }

    fn pages(&self) -> &Pages {
        self.pages.as_ref().expect("only a dropped buffer has no pages")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(pages) = self.pages.take() else { return };
        let evicted = self.evicted.as_mut().map(|evicted| *evicted.get_mut());
        if evicted != Some(true) {
            null::uncount_tensor(self.owner, pages.bytes());
        }
        with_arena(|a| match evicted {
            None => a.give(pages),
            Some(evicted) => {
                if !evicted {
                    a.evict(pages.bytes());
                }
                a.usage.evicted -= pages.bytes();
            }
        });
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: the pages hold at least len floats, are initialised (zero at first), and are owned by self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in deref, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[f32]> for Buffer {
    fn as_ref(&self) -> &[f32] {
        self
    }
}

impl AsMut<[f32]> for Buffer {
    fn as_mut(&mut self) -> &mut [f32] {
        self
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let mut other = Self::scratch(self.len);
        copy::copy(self, &mut other);
        other
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} f32)", self.len)
    }
}
