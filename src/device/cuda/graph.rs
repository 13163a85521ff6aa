//! A row of launches that is started as one, and copies that run beside the host.

use super::driver::Captured;
use super::emulated::Step;
use super::gpu::gpu;
use super::memory::{View, ViewMut};
use super::pool::Run;
use super::staging::{Event, Pages};

/// What was started between `Gpu::begin_capture` and `Gpu::end_capture`, on the memory that it was started on.
#[derive(Debug)]
pub struct Graph {
    pub(super) steps: Steps,
    /// Memory that was freed within the capture: the graph writes there at each replay.
    pub(super) held: Vec<Run>,
}

#[derive(Debug)]
pub(super) enum Steps {
    Captured(Captured),
    Played(Vec<Step>),
}

impl Graph {
    /// Starts all of it, behind what was started before. What the graph reads must still live.
    pub fn replay(&self) {
        gpu().replay(&self.steps);
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        gpu().release(std::mem::take(&mut self.held));
    }
}

/// Host memory that the GPU copies from and to beside the host's work: pinned where the GPU is real.
#[derive(Debug)]
pub struct Pinned(pub(super) Host);

#[derive(Debug)]
pub(super) enum Host {
    Pages(Pages),
    Plain(Vec<u8>),
}

impl Pinned {
    /// Zeros.
    ///
    /// # Panics
    /// With an [`crate::error::Error`] as payload, where the host has not as much to pin.
    pub fn new(bytes: usize) -> Self {
        gpu().pinned(bytes)
    }

    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Host::Pages(pages) => pages.as_slice(),
            Host::Plain(bytes) => bytes,
        }
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Host::Pages(pages) => pages.as_mut_slice(),
            Host::Plain(bytes) => bytes,
        }
    }

    /// Begins to copy the values of `from` here, behind what was started before.
    ///
    /// # Panics
    /// If there is no room for them.
    #[must_use = "the values are there when `finish` returns"]
    pub fn fetch(mut self, from: View) -> Transfer {
        let bytes = from.len() * from.dtype().bytes();
        assert!(bytes <= self.as_slice().len(), "{bytes} bytes into {}", self.as_slice().len());
        let event = gpu().fetch(&mut self, from.address(), bytes);
        Transfer { pinned: Some(self), event }
    }

    /// Begins to copy from here to `to`, behind what was started before. What is started on `to` later comes behind it.
    ///
    /// # Panics
    /// If there are fewer bytes here.
    #[must_use = "the memory is free again when `finish` returns"]
    pub fn put(self, to: &mut ViewMut) -> Transfer {
        let bytes = to.len() * to.dtype().bytes();
        assert!(bytes <= self.as_slice().len(), "{bytes} bytes from {}", self.as_slice().len());
        let event = gpu().put(to.address(), &self, bytes);
        Transfer { pinned: Some(self), event }
    }
}

/// A copy under way, and the host memory that it needs.
#[derive(Debug)]
pub struct Transfer {
    pinned: Option<Pinned>,
    /// None where the copy is done.
    event: Option<Event>,
}

impl Transfer {
    /// Waits for its end.
    pub fn finish(mut self) -> Pinned {
        self.wait();
        self.pinned.take().expect("a transfer ends once")
    }

    fn wait(&mut self) {
        if let Some(event) = self.event.take() {
            event.wait().unwrap_or_else(|error| std::panic::panic_any(error.within("a copy beside the host")));
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.wait();
        }
    }
}
