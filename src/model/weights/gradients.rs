//! The gradients of all parameters, f32, unit by unit. With ZeRO stages 0 and 1 they are sums of whole units, which are
//! reduced once. With stages 2 and 3 they are sums of this rank's ranges: every unit is reduced after its backward.

use super::partition::{Partition, Shards, Streams};
use crate::comm::{Axes, Group, Pending};
use crate::config::optim::GradientOrder;
use crate::device::cuda::owned_by;
use crate::model::params::{ParamId, ParamTable};
use crate::ops::residual;
use crate::tensor::{Flat, Slice, SliceMut, WeightMut};
use std::collections::VecDeque;
use std::sync::Arc;

pub struct Gradients {
    pub table: Arc<ParamTable>,
    /// For each unit, the sums of the whole unit or of this rank's range.
    sums: Vec<Flat>,
    partition: Arc<Partition>,
    streams: Streams,
    /// Units whose reduction over ranks is in progress.
    in_flight: VecDeque<(usize, Pending<Flat>)>,
    mode: Mode,
}

enum Mode {
    Whole(Whole),
    /// The unit that accumulates now has a buffer of its own.
    Ranges(Option<(usize, Flat)>),
}

/// Each unit is reduced once, as soon as it is complete.
struct Whole {
    /// Whether every rank gets the sums of the whole unit, not only of its range (stage 0).
    everywhere: bool,
    /// The unit of the embedding: those before it are of a vision tower, whose backward is the last.
    embedding: usize,
    /// Whether this micro-batch is the last: a unit is complete after its backward.
    last: bool,
    /// The lowest layer that this micro-batch's backward has reached.
    lowest: usize,
    /// The end of the units still to reduce, counted down from the last unit. All ranks reduce in this order.
    next: usize,
}

impl Gradients {
    /// All zeros, on a single rank.
    pub fn new(table: Arc<ParamTable>) -> Self {
        let shards = Shards::new(&table, &Axes::one(), 0);
        let mut all = Self::for_shards(table, &shards);
        all.take_memory();
        all
    }

    /// All zeros, on the device of the table.
    pub fn for_shards(table: Arc<ParamTable>, shards: &Shards) -> Self {
        let (partition, streams) = (shards.partition.clone(), shards.streams.clone());
        let sums = (0..partition.units()).map(|_| Flat::none()).collect();
        let mode = if shards.gradients() {
            Mode::Ranges(None)
        } else {
            let next = partition.units();
            let embedding = table.embedding_unit();
            Mode::Whole(Whole { everywhere: !shards.optimizer(), embedding, last: false, lowest: next, next })
        };
        let mut all = Self { table, sums, partition, streams, in_flight: VecDeque::new(), mode };
        // On a GPU they take memory from the first minibatch on.
        if !all.table.device().frees_between_phases() {
            all.take_memory();
        }
        all
    }

    /// Allocates zeroed memory for units that have none.
    fn take_memory(&mut self) {
        let (device, ranges) = (self.table.device(), self.is_sharded());
        for (u, sum) in self.sums.iter_mut().enumerate() {
            let len = if ranges { self.partition.own_cut(u).len() } else { self.partition.padded_len(u) };
            if sum.len() != len || sum.device() != device {
                *sum = owned_by("gradients", || Flat::zeros(device, len));
            }
        }
    }

    /// Frees GPU memory until `zero`. The values are lost. Gradients on the CPU stay.
    pub fn free(&mut self) {
        self.settle();
        if self.table.device().frees_between_phases() {
            self.sums.iter_mut().for_each(|sum| *sum = Flat::none());
        }
    }

    /// Whether this rank holds the sums of its ranges only.
    pub fn is_sharded(&self) -> bool {
        matches!(self.mode, Mode::Ranges(_))
    }

    /// Begins a new sum.
    pub fn zero(&mut self) {
        self.settle();
        self.sums.iter_mut().filter(|sum| !sum.is_empty()).for_each(Flat::clear);
        self.take_memory();
    }

    /// Begins a micro-batch. If gradients are sharded, all ranks begin equally many. `last`: nothing is added after it,
    /// so a unit may be reduced as soon as this micro-batch's backward has finished it.
    pub fn begin_microbatch(&mut self, last: bool) {
        if let Mode::Whole(whole) = &mut self.mode {
            whole.last = last;
            whole.lowest = self.partition.units();
        }
    }

    /// Called before the backward of unit `index` adds to its gradients.
    pub fn begin(&mut self, index: usize) {
        assert!(index < self.sums.len(), "unit {index} of {}", self.sums.len());
        match &mut self.mode {
            Mode::Whole(whole) if index != whole.embedding => {
                whole.lowest = index;
                self.reduce_above(index + 1, GradientOrder::Fast);
            }
            Mode::Whole(whole) => {
                // The embedding's backward comes after the first layer's; a tied head's, before all layers.
                if whole.lowest == index + 1 {
                    self.reduce_above(index + 1, GradientOrder::Fast);
                }
            }
            Mode::Ranges(Some((open, _))) if *open == index => {}
            Mode::Ranges(_) => {
                self.send_open();
                self.wait_for_all_but(1);
                let len = self.partition.padded_len(index);
                let buffer = owned_by("gradients", || Flat::zeros(self.table.device(), len));
                self.mode = Mode::Ranges(Some((index, buffer)));
            }
        }
    }

    /// Called after the backward of unit `index` has added to its gradients.
    pub fn finish(&mut self, index: usize) {
        assert!(index < self.sums.len(), "unit {index} of {}", self.sums.len());
        let last = |whole: &Whole| usize::from(whole.embedding == 0);
        let complete = matches!(&self.mode, Mode::Whole(whole) if whole.lowest == last(whole));
        if index == 0 && complete {
            self.reduce_above(0, GradientOrder::Fast);
        }
    }

    /// Stages 0 and 1: starts to reduce the units from `first` on that are not in flight, in the last micro-batch only.
    fn reduce_above(&mut self, first: usize, order: GradientOrder) {
        while let Mode::Whole(whole) = &mut self.mode
            && whole.last
            && whole.next > first
        {
            whole.next -= 1;
            let (u, everywhere) = (whole.next, whole.everywhere);
            let sum = self.take_unit(u);
            self.send(u, sum, order, everywhere);
        }
    }

    /// Stages 2 and 3: starts to reduce the unit that accumulated last.
    fn send_open(&mut self) {
        let Mode::Ranges(open) = &mut self.mode else { return };
        let Some((u, sum)) = open.take() else { return };
        self.send(u, sum, GradientOrder::Fast, false);
    }

    /// Starts to sum a unit over ranks: each gets its range or, with `everywhere`, the whole unit. A unit of frozen
    /// parameters alone has no sum.
    fn send(&mut self, unit: usize, mut sum: Flat, order: GradientOrder, everywhere: bool) {
        if sum.is_empty() {
            self.sums[unit] = sum;
            return;
        }
        let partition = self.partition.clone();
        let job = self.streams.of(&self.partition, unit).submit(move |group| {
            group.sum_scattered(&mut sum, partition.shares(unit), order);
            if everywhere {
                group.gather_slice(sum.all_mut(), partition.shares(unit));
            }
            sum
        });
        self.in_flight.push_back((unit, job));
    }

    /// Waits until at most `most` units are in flight.
    fn wait_for_all_but(&mut self, most: usize) {
        while self.in_flight.len() > most {
            let (u, job) = self.in_flight.pop_front().expect("one is in flight");
            let (sum, unit) = (&mut self.sums[u], job.wait());
            match &self.mode {
                Mode::Whole(_) => *sum = unit,
                Mode::Ranges(_) => residual::accumulate(unit.slice(self.partition.own_share(u)), sum.all_mut()),
            }
        }
    }

    /// Starts to reduce the remaining units after the last micro-batch.
    pub fn seal(&mut self, order: GradientOrder) {
        if let Mode::Whole(whole) = &mut self.mode {
            whole.last = true;
        }
        self.reduce_above(0, order);
        self.send_open();
    }

    /// Seals the sums and waits. `own` then returns sums over all ranks of the axis.
    pub fn reduce(&mut self, order: GradientOrder) {
        self.seal(order);
        self.settle();
    }

    /// Waits for all reductions in progress. A rank without samples in the next minibatch starts no new sum, but takes
    /// part.
    fn settle(&mut self) {
        self.send_open();
        self.wait_for_all_but(0);
        if let Mode::Whole(whole) = &mut self.mode {
            whole.last = false;
            whole.next = self.partition.units();
        }
    }

    /// The sums of a unit that this rank's optimizer uses: the whole unit at stage 0, else its range. Other elements
    /// are unspecified after `reduce`.
    pub fn own(&self, unit: usize) -> Slice<'_> {
        let sum = &self.sums[unit];
        match &self.mode {
            Mode::Whole(whole) if !whole.everywhere => sum.slice(self.partition.own_share(unit)),
            Mode::Whole(_) => sum.slice(0..self.partition.shared(unit).len()),
            Mode::Ranges(_) => sum.all(),
        }
    }

    /// Adds the sums of the tied embedding, which the first and the last stage both have: the first one's, then the last
    /// one's. Called after `reduce` by all ranks.
    pub fn sum_tied(&mut self, tied: &Group) {
        let unit = self.table.embedding_unit();
        if !self.table.is_tied() || tied.size() == 1 || self.sums[unit].is_empty() {
            return;
        }
        let own = match &self.mode {
            Mode::Whole(whole) if !whole.everywhere => self.partition.own_share(unit),
            Mode::Whole(_) => 0..self.partition.shared(unit).len(),
            Mode::Ranges(_) => 0..self.sums[unit].len(),
        };
        tied.sum_slice(self.sums[unit].slice_mut(own));
    }

    /// Bytes of the sums that stay on this rank.
    pub fn bytes(&self) -> usize {
        self.sums.iter().map(Flat::bytes).sum()
    }

    /// The number of units whose reduction over ranks is in progress.
    pub fn under_way(&self) -> usize {
        self.in_flight.len()
    }

    /// Takes out the sums of a whole unit, padding included. `zero` makes new ones.
    pub fn take_unit(&mut self, unit: usize) -> Flat {
        std::mem::replace(&mut self.sums[unit], Flat::none())
    }

    /// Replaces the sums of a whole unit.
    ///
    /// # Panics
    /// If their length or device differs.
    pub fn replace(&mut self, unit: usize, with: Flat) {
        let whole = self.partition.padded_len(unit);
        assert_eq!((with.device(), with.len()), (self.table.device(), whole), "sums of unit {unit}");
        self.sums[unit] = with;
    }

    /// All values in the order of the table. Units must be whole.
    pub fn to_vec(&self) -> Vec<f32> {
        assert!(!self.is_sharded(), "this rank does not hold the gradients of other ranks' ranges");
        let unit = |(u, sum): (usize, &Flat)| sum.slice(0..self.partition.unit(u).len()).to_host();
        self.sums.iter().enumerate().flat_map(unit).collect()
    }

    pub fn weight_mut(&mut self, id: ParamId) -> WeightMut<'_> {
        let (u, spec) = (self.table.unit_of(id), self.table.spec(id));
        let ((n, k), layout) = (spec.dims(), spec.layout);
        let at = spec.offset - self.partition.shared(u).start;
        let range = at..at + spec.len;
        WeightMut { n, k, layout, values: self.open_unit(u).slice_mut(range) }
    }

    /// The gradients of several matrices of one unit, in the order of the table.
    pub fn weights_mut(&mut self, ids: &[ParamId]) -> Vec<WeightMut<'_>> {
        let Some(first) = ids.first() else { return Vec::new() };
        let (table, u) = (self.table.clone(), self.table.unit_of(*first));
        let mut end = self.partition.shared(u).start;
        let mut rest = self.open_unit(u).all_mut();
        let mut all = Vec::with_capacity(ids.len());
        for id in ids {
            let spec = table.spec(*id);
            let (values, after) = rest.split(spec.offset - end).1.split(spec.len);
            (rest, end) = (after, spec.range().end);
            let (n, k) = spec.dims();
            all.push(WeightMut { n, k, layout: spec.layout, values });
        }
        all
    }

    /// The sums of a unit that accumulates now.
    fn open_unit(&mut self, u: usize) -> &mut Flat {
        match &mut self.mode {
            Mode::Whole(_) => &mut self.sums[u],
            Mode::Ranges(Some((open, buffer))) if *open == u => buffer,
            Mode::Ranges(_) => panic!("unit {u} gets a gradient before `begin`"),
        }
    }

    /// Adds to the gradient of a vector or the taps of a convolution, in f32, unless it is frozen.
    pub fn add_vector<'a>(&mut self, id: ParamId, values: impl Into<Slice<'a>>) {
        if !id.is_frozen {
            residual::accumulate(values.into(), self.vector_mut(id));
        }
    }

    /// The gradient of a norm, a bias or a value head.
    pub fn vector_mut(&mut self, id: ParamId) -> SliceMut<'_> {
        let elements = 0..self.table.spec(id).elements();
        self.weight_mut(id).values.part(elements)
    }
}
