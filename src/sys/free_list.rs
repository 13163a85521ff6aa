//! A list of free runs of memory, for the arenas of the host and of the GPU.

use std::collections::BTreeMap;
use std::ops::RangeBounds;

/// Free runs by their size in bytes. Of runs with equal sizes the one with the lowest mark is taken first: a mark is an
/// address, or [`latest`].
#[derive(Debug, Default)]
pub struct FreeList<R> {
    runs: BTreeMap<(usize, u64), R>,
}

impl<R> FreeList<R> {
    pub const fn new() -> Self {
        Self { runs: BTreeMap::new() }
    }

    pub fn insert(&mut self, bytes: usize, mark: u64, run: R) {
        self.runs.insert((bytes, mark), run);
    }

    pub fn remove(&mut self, bytes: usize, mark: u64) -> Option<R> {
        self.runs.remove(&(bytes, mark))
    }

    /// Takes a run of the smallest size within `sizes`, and returns that size with it.
    pub fn take(&mut self, sizes: impl RangeBounds<usize>) -> Option<(usize, R)> {
        let bounds = (sizes.start_bound().map(|bytes| (*bytes, 0)), sizes.end_bound().map(|bytes| (*bytes, u64::MAX)));
        let key = *self.runs.range(bounds).next()?.0;
        self.runs.remove(&key).map(|run| (key.0, run))
    }

    /// Takes the run with the highest mark.
    pub fn take_last(&mut self) -> Option<R> {
        let key = self.runs.keys().copied().max_by_key(|(_, mark)| *mark)?;
        self.runs.remove(&key)
    }

    pub fn len(&self) -> usize {
        self.runs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

/// The mark that lets later runs be taken first, from a count of runs.
pub fn latest(count: u64) -> u64 {
    u64::MAX - count
}
