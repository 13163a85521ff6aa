//! Which threads work in the background: those of streams, which leave their core to compute threads while these work.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static CURRENT: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Compute threads that stand still for a job.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// The stream that this thread belongs to.
pub(super) fn current() -> Option<&'static str> {
    CURRENT.get()
}

/// This thread belongs to `stream` from now on.
pub(super) fn belong_to(stream: &'static str) {
    CURRENT.set(Some(stream));
}

/// Whether a compute thread stands still for a job: its core is then free for the streams.
pub(super) fn is_awaited() -> bool {
    WAITING.load(Ordering::Relaxed) > 0
}

/// Stands still in `wait` for a job of a stream.
pub(super) fn awaiting<T>(wait: impl FnOnce() -> T) -> T {
    WAITING.fetch_add(1, Ordering::Relaxed);
    let value = wait();
    WAITING.fetch_sub(1, Ordering::Relaxed);
    value
}
