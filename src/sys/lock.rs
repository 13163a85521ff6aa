//! Locks for state that every thread of a job may read, even while one of them panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even after a panic of its holder. The guarded state is consistent at every step, and the panic ends
/// the job.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
