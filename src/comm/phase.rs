//! What this rank is doing, for the messages of a job that ends.

use std::sync::{Mutex, PoisonError};

static NOW: Mutex<Option<(u64, &'static str)>> = Mutex::new(None);

/// Step (from 1) and phase (`rollout`, `reward`, `score`, `train`, `checkpoint`, `eval` ...) from now on.
pub fn set(step: u64, phase: &'static str) {
    *NOW.lock().unwrap_or_else(PoisonError::into_inner) = Some((step, phase));
}

/// `step 3, train`, or nothing before the first `set`.
pub fn words() -> Option<String> {
    NOW.lock().unwrap_or_else(PoisonError::into_inner).map(|(step, phase)| format!("step {step}, {phase}"))
}
