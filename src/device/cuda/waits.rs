//! How often the host waits for the GPU, and what it waits for now.

use super::gpu::{self, Gpu};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What a thread stands still for, and since when.
type Standing = Mutex<Option<(Instant, &'static str)>>;

/// The place of each thread that ever stood still: only it writes there, so that threads which start kernels do not meet.
static THREADS: Mutex<Vec<Arc<Standing>>> = Mutex::new(Vec::new());

struct Own(Arc<Standing>);

thread_local! {
    static OWN: Own = {
        let own = Arc::new(Standing::default());
        locked(&THREADS).push(own.clone());
        Own(own)
    };
}

impl Drop for Own {
    fn drop(&mut self) {
        locked(&THREADS).retain(|other| !Arc::ptr_eq(other, &self.0));
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that this thread stands still for the GPU until the guard is dropped, which stays with the thread.
#[derive(Debug)]
pub(super) struct Waiting(PhantomData<*const ()>);

pub(super) fn waiting(what: &'static str) -> Waiting {
    // A thread that ends may drop what it still waits for.
    let _ = OWN.try_with(|own| *locked(&own.0) = Some((Instant::now(), what)));
    Waiting(PhantomData)
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = OWN.try_with(|own| *locked(&own.0) = None);
    }
}

/// Since when a thread has stood still for the GPU, of several the first; and what for, with what may be why.
pub fn standing_still() -> Option<(Instant, String)> {
    let first = locked(&THREADS).iter().filter_map(|standing| *locked(standing)).min();
    let (since, what) = first?;
    let driver = &gpu::opened()?.driver;
    let (name, last) = (driver.name(), driver.last_kernels());
    Some((since, format!("{what} ({name}{last})")))
}

/// How often the host has waited since the GPU was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// For all kernels that were started: the GPU has nothing to do then.
    pub drained: u64,
    /// For a copy that others were started behind (`Pinned`): the GPU goes on with those.
    pub fetched: u64,
}

/// Bytes that were copied between the host and the GPU since it was opened, other than by `Pinned`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    pub up: u64,
    pub down: u64,
}

/// What is counted.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Kernels.
    started: AtomicU64,
    drained: AtomicU64,
    fetched: AtomicU64,
    /// Graphs.
    replayed: AtomicU64,
    up: AtomicU64,
    down: AtomicU64,
    within: AtomicU64,
}

impl Counts {
    pub fn add_up(&self, bytes: usize) {
        self.up.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn add_down(&self, bytes: usize) {
        self.down.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn add_within(&self, bytes: usize) {
        self.within.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn started(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    pub fn add_started(&self) {
        self.started.fetch_add(1, Ordering::Relaxed);
    }

    pub fn add_replayed(&self) {
        self.replayed.fetch_add(1, Ordering::Relaxed);
    }

    pub fn add_drained(&self) {
        self.drained.fetch_add(1, Ordering::Relaxed);
    }

    /// A copy is waited for, which began when as many kernels had been `started`.
    pub fn add_copy(&self, started: u64) {
        let count = if self.started() == started { &self.drained } else { &self.fetched };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Gpu {
    /// Graphs that were launched since the GPU was opened.
    pub fn replays(&self) -> u64 {
        self.counts.replayed.load(Ordering::Relaxed)
    }

    pub fn copied(&self) -> Copied {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Copied { up: of(&self.counts.up), down: of(&self.counts.down) }
    }

    /// Bytes that were copied within the GPU since it was opened, other than by kernels.
    pub fn copied_within(&self) -> u64 {
        self.counts.within.load(Ordering::Relaxed)
    }

    pub fn waits(&self) -> Waits {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Waits { drained: of(&self.counts.drained), fetched: of(&self.counts.fetched) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing() -> Vec<&'static str> {
        let mut all: Vec<_> = locked(&THREADS).iter().filter_map(|standing| *locked(standing)).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, what)| what).collect()
    }

    #[test]
    fn threads_stand_still_by_themselves_and_are_forgotten_when_they_end() {
        let (first, barrier) = (waiting("a"), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let other = waiting("b");
                barrier.wait();
                barrier.wait();
                drop(other);
            });
            barrier.wait();
            assert_eq!(standing(), ["a", "b"], "the first one first");
            barrier.wait();
            other.join().expect("the other thread");
        });
        assert_eq!((standing(), locked(&THREADS).len()), (vec!["a"], 1));
        drop(first);
        assert!(standing().is_empty());
    }
}
