//! The threads of streams, which yield their core while compute threads work.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static CURRENT: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// The number of compute threads that wait for a job.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// The stream that this thread belongs to.
pub(super) fn current() -> Option<&'static str> {
    CURRENT.get()
}

/// Assigns this thread to `stream`.
pub(super) fn belong_to(stream: &'static str) {
    CURRENT.set(Some(stream));
}

/// Whether a compute thread waits for a job and so leaves its core to the streams.
pub(super) fn is_awaited() -> bool {
    WAITING.load(Ordering::Relaxed) > 0
}

/// Calls `wait`, in which this thread waits for a job on a stream.
pub(super) fn awaiting<T>(wait: impl FnOnce() -> T) -> T {
    WAITING.fetch_add(1, Ordering::Relaxed);
    let value = wait();
    WAITING.fetch_sub(1, Ordering::Relaxed);
    value
}
