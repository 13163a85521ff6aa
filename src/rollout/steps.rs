//! The decode steps that are run: all of them, or on a null device two of each response, which represent the others.

use crate::device::null;

/// The decode steps that an engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DecodeSteps {
    All,
    /// The first and the last step of a response. Each represents half of its steps, so the keys that they read are the
    /// mean over all steps.
    FirstAndLast,
}

impl DecodeSteps {
    /// The decode steps that an engine runs on this thread's device.
    pub fn here() -> Self {
        if null::is_active() { Self::FirstAndLast } else { Self::All }
    }
}
