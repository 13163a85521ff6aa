//! How often the host waits for the GPU, and what it waits for now.

use super::gpu::{self, Gpu};
use super::standing;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Since when a thread has stood still for the GPU, of several the first; and what for, with what may be why.
pub fn standing_still() -> Option<(Instant, String)> {
    let (since, what) = standing::first()?;
    let driver = &gpu::opened()?.driver;
    let (name, last) = (driver.name(), driver.last_kernels());
    Some((since, format!("{what} ({name}{last})")))
}

/// How often the host has waited since the GPU was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// For all kernels that were started: the GPU has nothing to do then.
    pub drained: u64,
    /// For a copy that others were started behind (`Pinned`): the GPU goes on with those.
    pub fetched: u64,
}

/// Bytes that were copied between the host and the GPU since it was opened, other than by `Pinned`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    pub up: u64,
    pub down: u64,
}

impl Gpu {
    /// Graphs that were launched since the GPU was opened.
    pub fn replays(&self) -> u64 {
        self.counts.replayed.load(Ordering::Relaxed)
    }

    pub fn copied(&self) -> Copied {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Copied { up: of(&self.counts.up), down: of(&self.counts.down) }
    }

    /// Bytes that were copied within the GPU since it was opened, other than by kernels.
    pub fn copied_within(&self) -> u64 {
        self.counts.within.load(Ordering::Relaxed)
    }

    pub fn waits(&self) -> Waits {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Waits { drained: of(&self.counts.drained), fetched: of(&self.counts.fetched) }
    }
}
