//! Counts of the host's waits for the GPU and of copied bytes, and the current wait of each thread.

use crate::sys::lock::lock;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// The current wait of a thread: its start, and a description.
type Standing = Mutex<Option<(Instant, &'static str)>>;

/// The waits of all live threads. Only the thread itself writes its entry, so threads that start kernels do not
/// contend.
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

/// A guard for this thread's wait for the GPU, which ends when it is dropped. It stays with the thread.
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

/// The oldest current wait: its start, and a description.
pub(super) fn first() -> Option<(Instant, &'static str)> {
    lock(&THREADS).iter().filter_map(Weak::upgrade).filter_map(|standing| *lock(&standing)).min()
}

/// Counts since the GPU was opened.
#[derive(Debug, Default)]
pub struct Counts {
    /// Kernels.
    pub started: Count,
    /// Waits of the host for all kernels that were started: the GPU has nothing to do then.
    pub drained: Count,
    /// Waits for a copy after which more work was started (`Pinned`): the GPU continues with that.
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
    fn waiting_threads_are_listed_in_order_until_their_wait_ends() {
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
