//! Units of sharded weights, gathered for use: the one asked for last, and those that are prefetched.

use super::params::ParamTable;
use super::partition::{Partition, Shards};
use super::unit::UnitValues;
use crate::comm::{Pending, Stream};
use crate::device::cuda::owned_by;
use crate::sys::lock::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Units that are prefetched at a time: the next one, and a tied head's after the last layer.
const PREFETCHED_MAX: usize = 2;

pub(super) struct Gathered {
    partition: Arc<Partition>,
    stream: Arc<Stream>,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Cache {
    held: Option<(usize, Arc<UnitValues>)>,
    prefetched: VecDeque<(usize, Pending<UnitValues>)>,
}

impl Gathered {
    pub(super) fn new(shards: &Shards) -> Self {
        let (partition, stream) = (shards.partition.clone(), shards.stream.clone());
        Self { partition, stream, cache: Mutex::new(Cache::default()) }
    }

    pub(super) fn partition(&self) -> &Arc<Partition> {
        &self.partition
    }

    /// All values of a unit of which `own` is this rank's range.
    fn submit(&self, own: &UnitValues, table: &Arc<ParamTable>, unit: usize) -> Pending<UnitValues> {
        let partition = self.partition.clone();
        let scratch = || UnitValues::padded_scratch(table, unit, own.dtype(), partition.padded_len(unit));
        let mut values = owned_by("gathered units", scratch);
        values.take(own);
        self.stream.submit(move |groups| {
            values.gather(&groups[0], partition.shares(unit));
            values
        })
    }

    pub(super) fn unit(&self, own: &UnitValues, table: &Arc<ParamTable>, unit: usize) -> Arc<UnitValues> {
        let mut cache = lock(&self.cache);
        if cache.held.as_ref().is_none_or(|(held, _)| *held != unit) {
            // Its memory serves the next one.
            cache.held = None;
            let prefetched = cache.prefetched.iter().position(|(prefetched, _)| *prefetched == unit);
            let pending = if let Some((_, pending)) = prefetched.and_then(|i| cache.prefetched.remove(i)) {
                pending
            } else {
                self.submit(own, table, unit)
            };
            let values = Arc::new(pending.wait());
            cache.held = Some((unit, values));
        }
        cache.held.as_ref().expect("just set").1.clone()
    }

    pub(super) fn prefetch(&self, own: &UnitValues, table: &Arc<ParamTable>, unit: usize) {
        let mut cache = lock(&self.cache);
        let held = cache.held.as_ref().is_some_and(|(held, _)| *held == unit);
        if held || cache.prefetched.iter().any(|(prefetched, _)| *prefetched == unit) {
            return;
        }
        while cache.prefetched.len() >= PREFETCHED_MAX {
            cache.prefetched.pop_front();
        }
        let pending = self.submit(own, table, unit);
        cache.prefetched.push_back((unit, pending));
    }

    pub(super) fn clear(&self) {
        let mut cache = lock(&self.cache);
        cache.held = None;
        cache.prefetched.clear();
    }
}
