//! What this rank is doing, for the messages of a job that ends.

use crate::device::null;
use crate::sys::lock::lock;
use std::sync::Mutex;

/// No step: before the first one.
static NOW: Mutex<Option<(Option<u64>, &'static str)>> = Mutex::new(None);

/// Step (from 1) and phase (`rollout`, `reward`, `score`, `train`, `checkpoint`, `eval` ...) from now on.
pub fn set(step: u64, phase: &'static str) {
    if null::is_active() {
        return null::enter(phase);
    }
    *lock(&NOW) = Some((Some(step), phase));
}

/// Does `work`, before the first step.
pub fn before_steps<T>(phase: &'static str, work: impl FnOnce() -> T) -> T {
    *lock(&NOW) = Some((None, phase));
    let done = work();
    *lock(&NOW) = None;
    done
}

/// `step 3, train`, or nothing before the first phase is set.
pub fn describe() -> Option<String> {
    let (step, phase) = (*lock(&NOW))?;
    Some(step.map_or_else(|| phase.to_string(), |step| format!("step {step}, {phase}")))
}
