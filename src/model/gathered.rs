//! Units of sharded weights, gathered for use: the one asked for last, and those on their way.

use super::params::ParamTable;
use super::partition::{Partition, Shards};
use super::unit::UnitValues;
use crate::comm::{Pending, Stream};
use crate::device::cuda::owned_by;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Units on their way at a time: the next one, and a tied head's behind the last layer.
const COMING_MAX: usize = 2;

/// What happens to a gathered unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Its gather was submitted.
    Submitted,
    /// Its values are used from here
    Opened,
    /// to here.
    Closed,
}

#[derive(Debug)]
pub(super) struct Gathered {
    partition: Arc<Partition>,
    stream: Arc<Stream>,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Cache {
    held: Option<(usize, Arc<UnitValues>)>,
    coming: VecDeque<(usize, Pending<UnitValues>)>,
    watched: Option<Vec<(Moment, usize)>>,
    /// Units that may still be in use.
    lent: Vec<Weak<UnitValues>>,
    live_max: usize,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let coming: Vec<usize> = self.coming.iter().map(|(unit, _)| *unit).collect();
        write!(f, "Cache(held {:?}, coming {coming:?})", self.held.as_ref().map(|(unit, _)| unit))
    }
}

impl Cache {
    /// Counts the units whose memory lives when one more is gathered.
    fn submitted(&mut self, unit: usize) {
        self.note(Moment::Submitted, unit);
        self.lent.retain(|values| values.strong_count() > 0);
        self.live_max = self.live_max.max(self.lent.len() + self.coming.len() + 1);
    }

    fn note(&mut self, moment: Moment, unit: usize) {
        if let Some(watched) = &mut self.watched {
            watched.push((moment, unit));
        }
    }
}

impl Gathered {
    pub(super) fn new(shards: &Shards) -> Self {
        let (partition, stream) = (shards.partition.clone(), shards.stream.clone());
        Self { partition, stream, cache: Mutex::new(Cache::default()) }
    }

    pub(super) fn partition(&self) -> &Arc<Partition> {
        &self.partition
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All values of a unit of which `own` is this rank's range.
    fn submit(&self, own: &UnitValues, table: &Arc<ParamTable>, unit: usize) -> Pending<UnitValues> {
        let mut values = owned_by("gathered units", || UnitValues::scratch(table, unit, own.dtype()));
        values.take(own);
        let partition = self.partition.clone();
        self.stream.submit(move |groups| {
            values.gather(&groups[0], partition.cuts(unit));
            values
        })
    }

    pub(super) fn unit(&self, own: &UnitValues, table: &Arc<ParamTable>, unit: usize) -> Arc<UnitValues> {
        let mut cache = self.cache();
        if cache.held.as_ref().is_none_or(|(held, _)| *held != unit) {
            // Its memory serves the next one.
            cache.held = None;
            let coming = cache.coming.iter().position(|(coming, _)| *coming == unit);
            let pending = if let Some((_, pending)) = coming.and_then(|i| cache.coming.remove(i)) {
                pending
            } else {
                cache.submitted(unit);
                self.submit(own, table, unit)
            };
            let values = Arc::new(pending.wait());
            cache.lent.push(Arc::downgrade(&values));
            cache.held = Some((unit, values));
        }
        cache.note(Moment::Opened, unit);
        cache.held.as_ref().expect("just set").1.clone()
    }

    pub(super) fn prefetch(&self, own: &UnitValues, table: &Arc<ParamTable>, unit: usize) {
        let mut cache = self.cache();
        let held = cache.held.as_ref().is_some_and(|(held, _)| *held == unit);
        if held || cache.coming.iter().any(|(coming, _)| *coming == unit) {
            return;
        }
        while cache.coming.len() >= COMING_MAX {
            cache.coming.pop_front();
        }
        cache.submitted(unit);
        let pending = self.submit(own, table, unit);
        cache.coming.push_back((unit, pending));
    }

    pub(super) fn closed(&self, unit: usize) {
        self.cache().note(Moment::Closed, unit);
    }

    pub(super) fn clear(&self) {
        let mut cache = self.cache();
        cache.held = None;
        cache.coming.clear();
    }

    pub(super) fn live_max(&self) -> usize {
        self.cache().live_max
    }

    pub(super) fn watch(&self) -> Vec<(Moment, usize)> {
        self.cache().watched.replace(Vec::new()).unwrap_or_default()
    }
}
