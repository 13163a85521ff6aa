//! How often the host waits for the GPU.

use super::gpu::Gpu;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// What is counted.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Kernels.
    started: AtomicU64,
    drained: AtomicU64,
    fetched: AtomicU64,
    /// Graphs.
    replayed: AtomicU64,
    up: AtomicU64,
    down: AtomicU64,
}

impl Counts {
    pub fn add_up(&self, bytes: usize) {
        self.up.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn add_down(&self, bytes: usize) {
        self.down.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn started(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    pub fn add_started(&self) {
        self.started.fetch_add(1, Ordering::Relaxed);
    }

    pub fn add_replayed(&self) {
        self.replayed.fetch_add(1, Ordering::Relaxed);
    }

    pub fn add_drained(&self) {
        self.drained.fetch_add(1, Ordering::Relaxed);
    }

    /// A copy is waited for, which began when as many kernels had been `started`.
    pub fn add_copy(&self, started: u64) {
        let count = if self.started() == started { &self.drained } else { &self.fetched };
        count.fetch_add(1, Ordering::Relaxed);
    }
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

    pub fn waits(&self) -> Waits {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Waits { drained: of(&self.counts.drained), fetched: of(&self.counts.fetched) }
    }
}
