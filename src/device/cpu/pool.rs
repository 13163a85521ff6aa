//! A fork-join pool for kernels of microseconds. A waiting thread spins for a moment, then sleeps. Yielding instead
//! would cost milliseconds each time if another program wants its core.
//!
//! Work is divided by thread number, never by load, and no kernel's arithmetic depends on the number of threads. A
//! null device does no work.

use crate::device::null;
use crate::sys::affinity;
use atomic_wait::{wait, wake_all};
use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock, TryLockError};
use std::thread::JoinHandle;

type Job = *const (dyn Fn(usize) + Sync);

/// Spins before the caller sleeps, and before its workers sleep until the next call: about 20 and 100 us.
const SPINS: [u32; 2] = [1_000, 5_000];
/// The same numbers if there are more threads than cores.
const CROWDED: [u32; 2] = [64; 2];

struct Shared {
    epoch: AtomicU32,
    left: AtomicU32,
    job: UnsafeCell<Option<Job>>,
    spins: [u32; 2],
    /// The number of workers that sleep on `epoch`, and whether the caller sleeps on `left`.
    asleep: AtomicU32,
    caller_sleeps: AtomicBool,
    quit: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: `job` is written only by the caller of `run` while no worker reads it: workers read after the epoch moves
// and `run` returns only when `left` is zero.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is only dereferenced while the closure it points to is alive (see `run`).
unsafe impl Send for Shared {}

pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads, the caller of `run` included.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            left: AtomicU32::new(0),
            job: UnsafeCell::new(None),
            spins: if threads > affinity::mask().len() { CROWDED } else { SPINS },
            asleep: AtomicU32::new(0),
            caller_sleeps: AtomicBool::new(false),
            quit: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let workers = (1..threads)
            .map(|id| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("cpu-{id}"))
                    .spawn(move || worker(&shared, id))
                    .expect("the system can start a thread")
            })
            .collect();
        Self { shared, workers, caller: Mutex::new(()) }
    }

    pub fn threads(&self) -> usize {
        null::device().map_or(self.workers.len() + 1, |device| device.threads)
    }

    /// Calls `f(0) .. f(threads - 1)`, each once, and returns when all are done. While another thread is inside `run`,
    /// which happens only in tests, the caller does all shares itself. The result is the same.
    ///
    /// # Panics
    /// If a share panics.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        if null::is_active() {
            return;
        }
        let guard = match self.caller.try_lock() {
            _ if self.workers.is_empty() => None,
            Ok(guard) => Some(guard),
            // A share of the caller panicked in an earlier call, which waited for all workers before it unwound.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if guard.is_none() {
            (0..self.threads()).for_each(f);
            return;
        }
        // SAFETY: extends the closure's lifetime; workers use it only until `left` is zero, which we wait for below,
        // also when our own share unwinds (Waiter).
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(f) };
        // SAFETY: no worker is running (`left` is zero and we hold `caller`).
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.left.store(self.workers.len() as u32, Ordering::Relaxed);
        // Still set if a worker's share and the caller's own panicked in the same call.
        self.shared.panicked.store(false, Ordering::Relaxed);
        self.wake();
        {
            let _waiter = Waiter(&self.shared);
            f(0);
        }
        assert!(!self.shared.panicked.load(Ordering::Relaxed), "a worker thread panicked");
    }

    /// Splits `0..len` into one contiguous range per thread, each a multiple of `unit` except for the last, and calls
    /// `f` on the ranges that are not empty. If the work is `small`, one thread does it all.
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

    /// Calls `f` with each row of `width` values of a slice, on the threads of `ranges`.
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
        if self.shared.asleep.load(Ordering::SeqCst) > 0 {
            wake_all(&raw const self.shared.epoch);
        }
    }
}

/// The part of `0..len` that belongs to share `id` of `shares`, cut at multiples of `unit`.
pub fn share(len: usize, unit: usize, id: usize, shares: usize) -> Range<usize> {
    let units = len.div_ceil(unit);
    let at = |i: usize| (i * units / shares * unit).min(len);
    at(id)..at(id + 1)
}

/// The tasks of share `id` out of several runs of equal tasks, as (run, its tasks). A run is (the number of its tasks, the
/// cost of each). All shares cost about the same.
pub fn deal(runs: &[(usize, usize)], id: usize, shares: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let total: usize = runs.iter().map(|(tasks, cost)| tasks * cost).sum();
    let (start, end) = (id * total / shares, (id + 1) * total / shares);
    let mut base = 0;
    runs.iter().enumerate().filter_map(move |(run, &(tasks, cost))| {
        // A task belongs to the share in which it starts.
        let at = |place: usize| place.saturating_sub(base).div_ceil(cost.max(1)).min(tasks);
        let own = at(start)..at(end);
        base += tasks * cost;
        (!own.is_empty()).then_some((run, own))
    })
}

/// Waits for the workers when dropped.
struct Waiter<'a>(&'a Shared);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let Shared { left, caller_sleeps, spins, .. } = self.0;
        if spin(spins[0], || left.load(Ordering::Acquire) == 0) {
            return;
        }
        caller_sleeps.store(true, Ordering::SeqCst);
        loop {
            match left.load(Ordering::SeqCst) {
                0 => break,
                some => wait(left, some),
            }
        }
        caller_sleeps.store(false, Ordering::Relaxed);
    }
}

/// Spins until `is_over`, at most `spins` times. Returns whether it is over.
fn spin(spins: u32, is_over: impl Fn() -> bool) -> bool {
    (0..spins).any(|_| {
        std::hint::spin_loop();
        is_over()
    })
}

fn worker(shared: &Shared, id: usize) {
    let mut seen = 0;
    loop {
        let has_work = || shared.epoch.load(Ordering::SeqCst) != seen;
        if !spin(shared.spins[1], has_work) {
            shared.asleep.fetch_add(1, Ordering::SeqCst);
            while !has_work() {
                wait(&shared.epoch, seen);
            }
            shared.asleep.fetch_sub(1, Ordering::SeqCst);
        }
        seen = seen.wrapping_add(1);
        if shared.quit.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: `run` stored the job before it moved the epoch and waits for `left` before the closure dies.
        let job = unsafe { &*(*shared.job.get()).expect("the job is set before the epoch changes") };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(id))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        if shared.left.fetch_sub(1, Ordering::SeqCst) == 1 && shared.caller_sleeps.load(Ordering::SeqCst) {
            wake_all(&raw const shared.left);
        }
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

/// The process's pool. Until `set_threads` it has one thread per core of the affinity mask.
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

// SAFETY: callers that dereference guarantee (in `slice`) that shares do not overlap.
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
    fn runs_of_tasks_are_dealt_once_and_evenly() {
        for runs in [&[(24, 100)][..], &[(64, 7), (8, 7), (8, 7)], &[(0, 5), (3, 1), (1, 1000), (16, 30)], &[]] {
            let total: usize = runs.iter().map(|(tasks, cost)| tasks * cost).sum();
            let most = runs.iter().map(|(_, cost)| *cost).max().unwrap_or(0);
            for shares in 1..9 {
                let mut dealt: Vec<(usize, usize)> = Vec::new();
                for id in 0..shares {
                    let own: Vec<_> =
                        deal(runs, id, shares).flat_map(|(run, tasks)| tasks.map(move |t| (run, t))).collect();
                    let cost: usize = own.iter().map(|(run, _)| runs[*run].1).sum();
                    assert!(cost <= total.div_ceil(shares) + most, "share {id} of {shares} costs {cost} of {total}");
                    dealt.extend(own);
                }
                let all: Vec<_> =
                    runs.iter().enumerate().flat_map(|(run, (n, _))| (0..*n).map(move |t| (run, t))).collect();
                assert_eq!(dealt, all, "{shares} shares");
            }
        }
    }

    #[test]
    fn sleeping_threads_are_woken_by_the_event_they_wait_for() {
        let pool = Pool::new(3);
        let long = |of: u32| std::thread::sleep(std::time::Duration::from_millis(u64::from(of)));
        for (caller, worker) in [(0, 5), (5, 0), (5, 5)] {
            let done = AtomicU32::new(0);
            pool.run(&|id| {
                long(if id == 0 { caller } else { worker });
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 3);
            long(5);
        }
    }

    #[test]
    fn a_panic_in_any_thread_reaches_the_caller_and_the_next_run_uses_all_threads() {
        let pool = Pool::new(3);
        for failing in [&[2][..], &[0], &[0, 2], &[0, 1, 2]] {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pool.run(&|id| assert!(!failing.contains(&id), "share {id} fails"));
            }));
            assert!(caught.is_err(), "{failing:?}");
            let threads = Mutex::new(Vec::new());
            pool.run(&|_| threads.lock().unwrap().push(std::thread::current().id()));
            let threads = threads.into_inner().unwrap();
            let distinct = threads.iter().collect::<std::collections::HashSet<_>>().len();
            assert_eq!((threads.len(), distinct), (3, 3), "after a panic in {failing:?}");
        }
    }
}
