//! Sequences of launches that are started as one.

use super::capture::Captured;
use super::gpu::gpu;
use super::null_driver;
use super::pool::Free;

/// Graphs by key that are never replayed at the same time: they share the memory that they write to.
#[derive(Debug)]
pub struct Graphs<K> {
    graphs: Vec<(K, Captured)>,
    held: Free,
}

impl<K> Default for Graphs<K> {
    fn default() -> Self {
        Self { graphs: Vec::new(), held: Free::new() }
    }
}

impl<K: PartialEq> Graphs<K> {
    /// Whether the graph of `key` need not be captured. On a null GPU only a capture is counted, so it is captured for
    /// every replay.
    pub fn has(&self, key: &K) -> bool {
        !null_driver::is_active() && self.graphs.iter().any(|(of, _)| of == key)
    }

    /// Captures the launches of `work` as the graph of `key`. `work` frees all memory that it allocates.
    ///
    /// # Errors
    /// The reason why it cannot be captured. Nothing was run.
    pub fn capture(&mut self, key: K, work: impl FnOnce()) -> std::result::Result<(), String> {
        gpu().begin_capture_over(&mut self.held)?;
        work();
        let (steps, held) = gpu().captured();
        self.held = held;
        self.graphs.push((key, steps?));
        Ok(())
    }

    /// Starts the graph of `key` after all earlier work of the stream.
    pub fn replay(&self, key: &K) {
        let graph = self.graphs.iter().find(|(of, _)| of == key);
        gpu().replay(&graph.expect("a graph must be captured before it is replayed").1);
    }
}

impl<K> Drop for Graphs<K> {
    fn drop(&mut self) {
        self.graphs.clear();
        gpu().release(std::mem::take(&mut self.held));
    }
}
