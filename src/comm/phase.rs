//! The current step and phase of this rank, for the messages at the end of a job.

use crate::device::null;
use crate::sys::lock::lock;
use std::sync::{Mutex, OnceLock};

pub use null::Phase;

/// Step and the name of the phase. The step is `None` before the first one.
static NOW: Mutex<Option<(Option<u64>, &'static str)>> = Mutex::new(None);

/// This rank's stage of a pipeline.
static STAGE: OnceLock<String> = OnceLock::new();

/// Sets this rank's stage of `size`, if there are several, for messages at the end of a job.
pub fn set_stage(rank: usize, size: usize) {
    if size > 1 && !null::is_active() {
        let _ = STAGE.set(format!("stage {rank} of {size}"));
    }
}

/// Returns `stage 1 of 4` on a pipeline.
pub(super) fn stage() -> Option<&'static str> {
    STAGE.get().map(String::as_str)
}

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
