//! A fork-join pool for kernels of microseconds: workers spin briefly, then park.
//!
//! Work is divided by thread number, never by load, and no kernel's arithmetic depends on the number of threads. On a null
//! device none is done.

use crate::device::null;
use crate::sys::affinity;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::thread::JoinHandle;

type Job = *const (dyn Fn(usize) + Sync);

const SPINS: u32 = 20_000;
/// Spins between yields.
const YIELD: u32 = 64;

struct Shared {
    epoch: AtomicUsize,
    left: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    asleep: Vec<AtomicBool>,
    quit: AtomicBool,
    panicked: AtomicBool,
    /// The cores of these threads, where there is one for each, and the one on which the caller of `run` is.
    cores: Vec<usize>,
    caller_core: AtomicUsize,
}

// SAFETY: `job` is written only by the caller of `run` while no worker reads it: workers read after the epoch moves
// and `run` returns only when `left` is zero.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is only dereferenced while the closure it points to is alive (see `run`).
unsafe impl Send for Shared {}

impl Shared {
    /// Binds this worker to the other cores where it shares one with the caller. Some kernels (seen: Linux 6.18, a virtual machine of
    /// two cores) keep two threads that spin and yield on one core for minutes while another idles.
    fn leave_caller(&self) {
        let caller = self.caller_core.load(Ordering::Relaxed);
        if affinity::core() == caller && !self.cores.is_empty() {
            let others: Vec<usize> = self.cores.iter().copied().filter(|&core| core != caller).collect();
            affinity::bind(&others);
        }
    }
}

pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads, the caller of `run` included.
    pub fn new(threads: usize) -> Self {
        let cores = affinity::mask();
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            asleep: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            quit: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            cores: if threads <= cores.len() { cores } else { Vec::new() },
            caller_core: AtomicUsize::new(0),
        });
        let workers = (1..threads)
            .map(|id| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("cpu-{id}"))
                    .spawn(move || worker(&shared, id))
                    .expect("the system starts a thread")
            })
            .collect();
        Self { shared, workers, caller: Mutex::new(()) }
    }

    pub fn threads(&self) -> usize {
        null::device().map_or(self.workers.len() + 1, |device| device.threads)
    }

    /// Calls `f(0) .. f(threads - 1)`, each once, and returns when all are done. While another thread is inside `run`
    /// (only tests do that) the caller does all shares itself; the result is the same.
    ///
    /// # Panics
    /// If a share panics.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        if null::is_active() {
            return;
        }
        let guard = if self.workers.is_empty() { None } else { self.caller.try_lock().ok() };
        if guard.is_none() {
            (0..self.threads()).for_each(f);
            return;
        }
        // SAFETY: extends the closure's lifetime; workers use it only until `left` is zero, which we wait for below,
        // also when our own share unwinds (Waiter).
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(f) };
        // SAFETY: no worker is running (`left` is zero and we hold `caller`).
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.left.store(self.workers.len(), Ordering::Relaxed);
        self.shared.caller_core.store(affinity::core(), Ordering::Relaxed);
        self.wake();
        {
            let _waiter = Waiter(&self.shared);
            f(0);
        }
        assert!(!self.shared.panicked.swap(false, Ordering::Relaxed), "a worker thread panicked");
    }

    /// Splits `0..len` into one contiguous range a thread, each a multiple of `unit` but for the last, and calls `f`
    /// on those that are not empty. Where the work is `small`, one thread does it all.
    pub fn ranges(&self, len: usize, unit: usize, small: bool, f: &(dyn Fn(Range<usize>) + Sync)) {
        if null::is_active() {
            return;
        }
        if small || self.threads() == 1 {
            if len > 0 {
                f(0..len);
            }
            return;
        }
        self.run(&|id| {
            let range = share(len, unit, id, self.threads());
            if !range.is_empty() {
                f(range);
            }
        });
    }

    /// `ranges` over a slice: `f` gets each range and its part of the slice.
    pub fn parts<T: Send>(
        &self,
        slice: &mut [T],
        unit: usize,
        small: bool,
        f: &(dyn Fn(Range<usize>, &mut [T]) + Sync),
    ) {
        let shares = Shares::new(slice);
        self.ranges(slice.len(), unit, small, &|range| {
            // SAFETY: ranges of different threads do not overlap and lie within the slice, which outlives the call.
            let part = unsafe { shares.slice(range.clone()) };
            f(range, part);
        });
    }

    /// Calls `f` with each row of `width` values of a slice, as `ranges`.
    pub fn rows<T: Send>(&self, slice: &mut [T], width: usize, small: bool, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let (rows, shares) = (slice.len() / width.max(1), Shares::new(slice));
        self.ranges(rows, 1, small, &|range| {
            for i in range {
                // SAFETY: rows do not overlap and lie within the slice, which outlives the call.
                f(i, unsafe { shares.slice(i * width..(i + 1) * width) });
            }
        });
    }

    fn wake(&self) {
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (handle, asleep) in self.workers.iter().zip(&self.shared.asleep) {
            if asleep.load(Ordering::SeqCst) {
                handle.thread().unpark();
            }
        }
    }
}

/// The part of `0..len` that belongs to share `id` of `shares`, cut at multiples of `unit`.
pub fn share(len: usize, unit: usize, id: usize, shares: usize) -> Range<usize> {
    let units = len.div_ceil(unit);
    let at = |i: usize| (i * units / shares * unit).min(len);
    at(id)..at(id + 1)
}

/// Waits for the workers when dropped. Yields now and then: where two threads share a core, spinning stalls both.
struct Waiter<'a>(&'a Shared);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut spins = 0u32;
        while self.0.left.load(Ordering::Acquire) != 0 {
            spins += 1;
            spin(spins);
        }
    }
}

fn spin(spins: u32) {
    if spins.is_multiple_of(YIELD) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

fn worker(shared: &Shared, id: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0u32;
        while shared.epoch.load(Ordering::SeqCst) == seen {
            spins += 1;
            if spins < SPINS {
                spin(spins);
                continue;
            }
            shared.asleep[id - 1].store(true, Ordering::SeqCst);
            if shared.epoch.load(Ordering::SeqCst) == seen {
                std::thread::park();
            }
            shared.asleep[id - 1].store(false, Ordering::SeqCst);
        }
        seen += 1;
        if shared.quit.load(Ordering::SeqCst) {
            return;
        }
        shared.leave_caller();
        // SAFETY: `run` stored the job before it moved the epoch and waits for `left` before the closure dies.
        let job = unsafe { &*(*shared.job.get()).expect("a job is set before the epoch moves") };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(id))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.left.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        self.wake();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

static POOL: OnceLock<RwLock<Arc<Pool>>> = OnceLock::new();

/// The process's pool. Its first user decides nothing: until `set_threads` it has a thread per core of the mask.
pub fn pool() -> Arc<Pool> {
    let cell = POOL.get_or_init(|| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        RwLock::new(Arc::new(Pool::new(threads)))
    });
    cell.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
}

/// Replaces the process's pool by one of `threads` threads, on the cores of this thread.
pub fn set_threads(threads: usize) {
    let made = Arc::new(Pool::new(threads.max(1)));
    let cell = POOL.get_or_init(|| RwLock::new(made.clone()));
    *cell.write().unwrap_or_else(std::sync::PoisonError::into_inner) = made;
}

/// A raw pointer that shares of a job may write through, each to its own part.
#[derive(Debug)]
pub struct Shares<T>(*mut T);

impl<T> Clone for Shares<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shares<T> {}

// SAFETY: whoever dereferences promises (in `slice`) that shares do not overlap.
unsafe impl<T: Send> Sync for Shares<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shares<T> {}

impl<T> Shares<T> {
    pub fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    pub fn ptr(self) -> *mut T {
        self.0
    }

    /// The part `range` of the slice given to `new`.
    ///
    /// # Safety
    /// The range lies within that slice, the slice outlives `'a`, and no two live parts overlap.
    pub unsafe fn slice<'a>(self, range: Range<usize>) -> &'a mut [T] {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_everything_once_for_any_thread_count() {
        for threads in 1..5 {
            let pool = Pool::new(threads);
            for len in [0, 1, 7, 64, 1000] {
                let mut hits = vec![0u8; len];
                let out = Shares::new(&mut hits);
                pool.ranges(len, 8, false, &|r| {
                    // SAFETY: ranges of different shares do not overlap and lie in 0..len.
                    unsafe { out.slice(r) }.iter_mut().for_each(|h| *h += 1);
                });
                assert!(hits.iter().all(|&h| h == 1), "{threads} threads, len {len}");
            }
        }
    }

    #[test]
    fn a_worker_on_the_callers_core_leaves_it_where_there_is_another() {
        let cores = affinity::mask();
        if cores.len() < 2 {
            return;
        }
        let pool = Pool::new(2);
        assert!(affinity::bind(&cores[..1]));
        let worked_on = AtomicUsize::new(usize::MAX);
        pool.run(&|id| {
            if id == 1 {
                affinity::bind(&cores[..1]);
            }
        });
        pool.run(&|id| {
            if id == 1 {
                worked_on.store(affinity::core(), Ordering::Relaxed);
            }
        });
        assert_ne!(worked_on.into_inner(), cores[0]);
        affinity::bind(&cores);
    }

    #[test]
    fn a_panic_in_a_share_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(&|id| assert!(id != 2, "share two fails"));
        }));
        assert!(caught.is_err());
        pool.run(&|_| {});
    }
}
