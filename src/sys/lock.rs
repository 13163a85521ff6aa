//! Locks of what every thread of a job may look at, also while one of them panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also where a thread panicked with it: what is guarded so is whole at every step, and that panic ends the job.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
