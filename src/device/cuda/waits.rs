//! How often the host waits for the GPU, what each thread waits for now, and how much is copied.

use crate::sys::lock::lock;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// What a thread stands still for, and since when.
type Standing = Mutex<Option<(Instant, &'static str)>>;

/// The place of each thread that stood still and lives: only it writes there, so that threads which start kernels do not meet.
static THREADS: Mutex<Vec<Weak<Standing>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: Arc<Standing> = {
        let own = Arc::default();
        let mut threads = lock(&THREADS);
        threads.retain(|other| other.strong_count() > 0);
        threads.push(Arc::downgrade(&own));
        own
    };
}

/// Notes that this thread stands still for the GPU until the guard is dropped, which stays with the thread.
#[derive(Debug)]
pub(super) struct Waiting(PhantomData<*const ()>);

pub(super) fn waiting(what: &'static str) -> Waiting {
    // A thread that ends may drop what it still waits for.
    let _ = OWN.try_with(|own| *lock(own) = Some((Instant::now(), what)));
    Waiting(PhantomData)
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = OWN.try_with(|own| *lock(own) = None);
    }
}

/// Of the threads that stand still the first: since when, and what for.
pub(super) fn first() -> Option<(Instant, &'static str)> {
    lock(&THREADS).iter().filter_map(Weak::upgrade).filter_map(|standing| *lock(&standing)).min()
}

/// What is counted since the GPU was opened.
#[derive(Debug, Default)]
pub struct Counts {
    /// Kernels.
    pub started: Count,
    /// Waits of the host for all kernels that were started: the GPU has nothing to do then.
    pub drained: Count,
    /// Waits for a copy that others were started behind (`Pinned`): the GPU goes on with those.
    pub fetched: Count,
    /// Graphs that were launched.
    pub replayed: Count,
    /// Bytes that were copied to the GPU, from it and within it, other than by `Pinned` and by kernels.
    pub up: Count,
    pub down: Count,
    pub within: Count,
}

#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    pub(super) fn add(&self, n: usize) {
        self.0.fetch_add(n as u64, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing() -> Vec<&'static str> {
        let mut all: Vec<_> =
            lock(&THREADS).iter().filter_map(Weak::upgrade).filter_map(|standing| *lock(&standing)).collect();
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
        assert_eq!(standing(), ["a"]);
        drop(first);
        assert!(standing().is_empty());
    }
}
