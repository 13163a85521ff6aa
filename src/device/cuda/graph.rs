//! Sequences of launches that are started as one.

use super::capture::Captured;
use super::gpu::gpu;
use super::null_driver;
use super::pool::Free;

/// The most graphs that are kept. Each takes some MiB of the memory of its GPU (`bench/LOG.md`).
pub const GRAPHS_MAX: usize = 64;

/// Graphs by key that are never replayed at the same time: they share the memory that they write to.
#[derive(Debug)]
pub struct Graphs<K> {
    /// The last one is the one replayed last.
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

    /// Captures the launches of `work` as the graph of `key`. `work` frees all memory that it allocates. Of `GRAPHS_MAX`
    /// graphs, the one that was not replayed for the longest time is dropped.
    ///
    /// # Errors
    /// The reason why it cannot be captured. Nothing was run.
    pub fn capture(&mut self, key: K, work: impl FnOnce()) -> std::result::Result<(), String> {
        gpu().begin_capture_over(&mut self.held)?;
        work();
        let (steps, held) = gpu().captured();
        self.held = held;
        if self.graphs.len() >= GRAPHS_MAX {
            self.graphs.remove(0);
        }
        self.graphs.push((key, steps?));
        Ok(())
    }

    /// Starts the graph of `key` after all earlier work of the stream.
    pub fn replay(&mut self, key: &K) {
        let at = self.graphs.iter().position(|(of, _)| of == key);
        let at = at.expect("a graph must be captured before it is replayed");
        self.graphs[at..].rotate_left(1);
        gpu().replay(&self.graphs.last().expect("it was found").1);
    }
}

impl<K> Drop for Graphs<K> {
    fn drop(&mut self) {
        self.graphs.clear();
        gpu().release(std::mem::take(&mut self.held));
    }
}
