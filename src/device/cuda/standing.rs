//! What threads stand still for while they wait for the GPU, and how often they do.

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

/// Of the threads that stand still the first: since when, and what for.
pub(super) fn first() -> Option<(Instant, &'static str)> {
    locked(&THREADS).iter().filter_map(|standing| *locked(standing)).min()
}

/// What is counted.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Kernels.
    started: AtomicU64,
    pub drained: AtomicU64,
    pub fetched: AtomicU64,
    /// Graphs.
    pub replayed: AtomicU64,
    pub up: AtomicU64,
    pub down: AtomicU64,
    pub within: AtomicU64,
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
