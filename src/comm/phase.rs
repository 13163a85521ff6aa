//! The current step and phase of this rank, for the messages at the end of a job.

use crate::device::null;
use crate::sys::lock::lock;
use std::sync::Mutex;

pub use null::Phase;

/// Step and the name of the phase. The step is `None` before the first one.
static NOW: Mutex<Option<(Option<u64>, &'static str)>> = Mutex::new(None);

/// Sets the step (from 1) and the phase.
pub fn set(step: u64, phase: Phase) {
    if null::is_active() {
        return null::enter(phase);
    }
    *lock(&NOW) = Some((Some(step), phase.name()));
}

/// Runs `work` as a phase before the first step.
pub fn before_steps<T>(phase: &'static str, work: impl FnOnce() -> T) -> T {
    *lock(&NOW) = Some((None, phase));
    let done = work();
    *lock(&NOW) = None;
    done
}

/// Returns `step 3, train`, or `None` before the first phase is set.
pub fn describe() -> Option<String> {
    let (step, phase) = (*lock(&NOW))?;
    Some(step.map_or_else(|| phase.to_string(), |step| format!("step {step}, {phase}")))
}
