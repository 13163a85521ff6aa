//! How often the host waits for the GPU.

use super::gpu::{self, Backend, Gpu};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The next number, and threads that stand still for the GPU: a number for each, since when, and what for.
type Standing = (u64, Vec<(u64, Instant, &'static str)>);

static STANDING: Mutex<Standing> = Mutex::new((0, Vec::new()));

fn standing() -> MutexGuard<'static, Standing> {
    STANDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that this thread stands still for the GPU until the guard is dropped.
#[derive(Debug)]
pub(super) struct Waiting(u64);

pub(super) fn waiting(what: &'static str) -> Waiting {
    let mut all = standing();
    all.0 += 1;
    let id = all.0;
    all.1.push((id, Instant::now(), what));
    Waiting(id)
}

impl Drop for Waiting {
    fn drop(&mut self) {
        standing().1.retain(|(id, ..)| *id != self.0);
    }
}

/// Since when a thread has stood still for the GPU, of several the first; and what for, with what may be why.
pub fn standing_still() -> Option<(Instant, String)> {
    let (_, since, what) = standing().1.first().copied()?;
    let (name, last) = match &gpu::opened()?.backend {
        Backend::Driver(driver) => (driver.name(), driver.last_kernels()),
        Backend::Emulated(_) => return None,
    };
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
