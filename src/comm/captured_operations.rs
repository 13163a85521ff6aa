//! Collectives that a graph holds: they are called when it is captured, and done when it is launched.

use super::accounting;
use crate::device::cuda::gpu;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// What a graph calls at each launch: (axis, operation) to the number of calls and their bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calls(BTreeMap<(&'static str, &'static str), (u64, u64)>);

/// As an operation: one launch of a graph.
const GRAPH: &str = "a graph of collectives";

thread_local! {
    /// Those of the capture that this thread is at.
    static NOTED: RefCell<Calls> = RefCell::default();
}

/// Notes a collective that is being captured.
pub(super) fn note(axis: &'static str, op: &'static str, bytes: usize) {
    NOTED.with_borrow_mut(|noted| {
        let (calls, sum) = noted.0.entry((axis, op)).or_default();
        (*calls, *sum) = (*calls + 1, *sum + bytes as u64);
    });
}

impl Calls {
    /// The collectives that `work` captures.
    pub fn of<T>(work: impl FnOnce() -> T) -> (T, Self) {
        NOTED.take();
        let value = work();
        (value, NOTED.take())
    }

    /// Books them, behind the launch of the graph that holds them: it is under way until the GPU has done it, and the watchdog
    /// knows of it. What a compute stream waits within a graph is not measured.
    pub fn launched(&self) {
        let Some(((axis, _), _)) = self.0.first_key_value() else { return };
        accounting::launched(&self.0);
        let bytes: u64 = self.0.values().map(|(_, bytes)| bytes).sum();
        accounting::begin_async(accounting::of_graph(axis, GRAPH, bytes as usize), Some(gpu().mark_here()));
    }
}
