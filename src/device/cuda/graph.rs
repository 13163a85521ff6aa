//! Rows of launches that are started as one, and copies that run beside the host.

use super::capture::Captured;
use super::gpu::gpu;
use super::memory::View;
use super::pool::Run;
use super::staging::{Event, Pages};
use super::streams::Stream;

/// Graphs that are never replayed beside each other, found by a key; one writes where the others have written.
#[derive(Debug)]
pub struct Graphs<K> {
    graphs: Vec<(K, Captured)>,
    held: Vec<Run>,
}

impl<K> Default for Graphs<K> {
    fn default() -> Self {
        Self { graphs: Vec::new(), held: Vec::new() }
    }
}

impl<K: PartialEq> Graphs<K> {
    pub fn has(&self, key: &K) -> bool {
        self.graphs.iter().any(|(of, _)| of == key)
    }

    /// Captures what `work` starts as the graph of `key`; memory that `work` takes it gives back.
    ///
    /// # Errors
    /// Why it cannot be captured. Nothing was run.
    pub fn capture(&mut self, key: K, work: impl FnOnce()) -> std::result::Result<(), String> {
        if let Err((why, held)) = gpu().begin_capture_over(std::mem::take(&mut self.held)) {
            self.held = held;
            return Err(why);
        }
        work();
        let (steps, held) = gpu().captured();
        self.held = held;
        self.graphs.push((key, steps?));
        Ok(())
    }

    /// Starts the graph of `key`, behind what was started before.
    ///
    /// # Panics
    /// If there is none.
    pub fn replay(&self, key: &K) {
        let graph = self.graphs.iter().find(|(of, _)| of == key);
        gpu().replay(&graph.expect("a graph is captured before it is replayed").1);
    }
}

impl<K> Drop for Graphs<K> {
    fn drop(&mut self) {
        self.graphs.clear();
        gpu().release(std::mem::take(&mut self.held));
    }
}

/// Pinned host memory, which the GPU copies from and to beside the host's work.
#[derive(Debug)]
pub struct Pinned {
    pub(super) pages: Pages,
    pub(super) bytes: usize,
}

impl Pinned {
    /// Zeros.
    ///
    /// # Panics
    /// With an [`crate::error::Error`] as payload, where the host has not as much to pin.
    pub fn new(bytes: usize) -> Self {
        Self { pages: gpu().pinned(bytes), bytes }
    }

    pub fn as_slice(&self) -> &[u8] {
        self.pages.as_slice()
    }

    /// Begins to copy the values of `from` here, behind what was started before.
    ///
    /// # Panics
    /// If there is no room for them.
    #[must_use = "the values are there when `finish` returns"]
    pub fn fetch(mut self, from: View) -> Transfer {
        let bytes = from.len() * from.dtype().bytes();
        assert!(bytes <= self.as_slice().len(), "{bytes} bytes into {}", self.as_slice().len());
        let event = Some(gpu().fetch(&mut self.pages, from.address(), bytes, Stream::Compute));
        Transfer { pinned: Some(self), event, started: gpu().counts.started.get() }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        gpu().unpinned(self.bytes);
    }
}

/// A copy under way, and the host memory that it needs.
#[derive(Debug)]
pub struct Transfer {
    pinned: Option<Pinned>,
    /// None where it was waited for.
    event: Option<Event>,
    /// Kernels that had been started when it began.
    started: u64,
}

impl Transfer {
    /// Waits for its end.
    pub fn finish(mut self) -> Pinned {
        let counts = &gpu().counts;
        let count = if counts.started.get() == self.started { &counts.drained } else { &counts.fetched };
        count.add(1);
        self.wait();
        self.pinned.take().expect("a transfer ends once")
    }

    fn wait(&mut self) {
        if let Some(event) = self.event.take() {
            gpu().await_event(&event, "a copy beside the host");
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
