//! The gradients of all parameters, f32, unit by unit: sums of whole units that are reduced once (ZeRO stages 0 and 1), or
//! of this rank's ranges, to which every unit is reduced after its backward (stages 2 and 3).

use super::params::{ParamId, ParamTable};
use super::partition::{Partition, Shards};
use crate::comm::{Axes, Pending, Stream};
use crate::config::optim::GradientOrder;
use crate::device::Device;
use crate::device::cuda::owned_by;
use crate::ops::residual;
use crate::tensor::{Flat, Slice, SliceMut, WeightMut};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

pub struct Gradients {
    pub table: Arc<ParamTable>,
    /// By unit: sums of all of it, or of this rank's range.
    sums: Vec<Flat>,
    device: Device,
    partition: Arc<Partition>,
    stream: Arc<Stream>,
    mode: Mode,
}

enum Mode {
    Whole(Whole),
    Ranges(Ranges),
}

/// Units are reduced once, each as soon as it is complete.
struct Whole {
    /// Every rank gets the sums of all of a unit, not of its range alone (stage 0).
    everywhere: bool,
    /// Whether the micro-batch at work is the last: what its backward leaves behind is complete.
    last: bool,
    /// The lowest layer that this micro-batch's backward came to.
    lowest: usize,
    /// Next unit to be reduced, counted from the last down; all ranks reduce in this order.
    next: usize,
    in_flight: Vec<(usize, Pending<Flat>)>,
}

/// The unit that is added to now lies in a buffer of its own.
struct Ranges {
    open: Option<(usize, Flat)>,
    in_flight: VecDeque<(usize, Pending<Flat>)>,
}

impl Gradients {
    /// All zeros, of a rank alone.
    pub fn new(table: Arc<ParamTable>) -> Self {
        let shards = Shards::new(&table, &Axes::one(), 0);
        let mut all = Self::over(table, &shards);
        all.take_memory();
        all
    }

    /// All zeros, on the device that the table lays parameters out for.
    pub fn over(table: Arc<ParamTable>, shards: &Shards) -> Self {
        let device = table.device();
        let (partition, stream) = (shards.partition.clone(), shards.stream.clone());
        let ranges = shards.gradients();
        let sums = (0..partition.units()).map(|_| Flat::none()).collect();
        let mode = if ranges {
            Mode::Ranges(Ranges { open: None, in_flight: VecDeque::new() })
        } else {
            let next = partition.units();
            let everywhere = !shards.optimizer();
            Mode::Whole(Whole { everywhere, last: false, lowest: next, next, in_flight: Vec::new() })
        };
        let mut all = Self { table, sums, device, partition, stream, mode };
        // On a GPU they take memory from the first minibatch on.
        if !device.frees_between_phases() {
            all.take_memory();
        }
        all
    }

    /// Zeros where there is no memory yet.
    fn take_memory(&mut self) {
        let (device, ranges) = (self.device, self.is_sharded());
        for (u, sum) in self.sums.iter_mut().enumerate() {
            let len = if ranges { self.partition.own_cut(u).len() } else { self.partition.unit(u).len() };
            if sum.len() != len || sum.device() != device {
                *sum = owned_by("gradients", || Flat::zeros(device, len));
            }
        }
    }

    /// Frees the memory that they take of a GPU, until `zero`; their values are lost. Those of the CPU stay.
    pub fn free(&mut self) {
        self.send_open();
        self.wait_for_all_but(0);
        if self.device.frees_between_phases() {
            self.sums.iter_mut().for_each(|sum| *sum = Flat::none());
        }
    }

    /// Whether this rank holds the sums of its ranges only.
    pub fn is_sharded(&self) -> bool {
        matches!(self.mode, Mode::Ranges(_))
    }

    /// Begins a new sum.
    pub fn zero(&mut self) {
        self.send_open();
        self.wait_for_all_but(0);
        if let Mode::Whole(whole) = &mut self.mode {
            whole.last = false;
            whole.next = self.partition.units();
        }
        self.sums.iter_mut().filter(|sum| !sum.is_empty()).for_each(Flat::clear);
        self.take_memory();
    }

    /// Begins a micro-batch. Where gradients are sharded all ranks begin as many. `last`: nothing is added after it, so
    /// that a unit may be reduced as soon as this micro-batch's backward has left it.
    pub fn begin_microbatch(&mut self, last: bool) {
        if let Mode::Whole(whole) = &mut self.mode {
            whole.last = last;
            whole.lowest = self.partition.units();
        }
    }

    /// The backward of unit `index` is about to add to its gradients.
    pub fn begin(&mut self, index: usize) {
        assert!(index < self.sums.len(), "unit {index} of {}", self.sums.len());
        match &mut self.mode {
            Mode::Whole(whole) if index > 0 => {
                whole.lowest = index;
                self.reduce_above(index + 1, GradientOrder::Fast);
            }
            Mode::Whole(whole) => {
                // The embedding's backward comes after the first layer's; a tied head's, before all layers.
                if whole.lowest == 1 {
                    self.reduce_above(1, GradientOrder::Fast);
                }
            }
            Mode::Ranges(ranges) if ranges.open.as_ref().is_some_and(|(open, _)| *open == index) => {}
            Mode::Ranges(_) => {
                self.send_open();
                self.wait_for_all_but(1);
                let len = self.partition.unit(index).len();
                let buffer = owned_by("gradients", || Flat::zeros(self.device, len));
                let Mode::Ranges(ranges) = &mut self.mode else { unreachable!("matched above") };
                ranges.open = Some((index, buffer));
            }
        }
    }

    /// The backward of unit `index` has added all that it adds now.
    pub fn finish(&mut self, index: usize) {
        assert!(index < self.sums.len(), "unit {index} of {}", self.sums.len());
        let complete = matches!(&self.mode, Mode::Whole(whole) if whole.lowest == 1);
        if index == 0 && complete {
            self.reduce_above(0, GradientOrder::Fast);
        }
    }

    /// Stages 0 and 1: starts to reduce the units from `first` up that are not in flight, if nothing more is added.
    fn reduce_above(&mut self, first: usize, order: GradientOrder) {
        let Mode::Whole(whole) = &mut self.mode else { return };
        while whole.last && whole.next > first {
            whole.next -= 1;
            let u = whole.next;
            let mut sum = std::mem::replace(&mut self.sums[u], Flat::scratch(self.device, 0));
            clear_frozen(&self.table, u, &mut sum);
            let (partition, everywhere) = (self.partition.clone(), whole.everywhere);
            let job = self.stream.submit(move |groups| {
                groups[0].sum_scattered(&mut sum, partition.cuts(u), order);
                if everywhere {
                    groups[0].gather_slice(sum.all_mut(), partition.cuts(u));
                }
                sum
            });
            whole.in_flight.push((u, job));
        }
    }

    /// Stages 2 and 3: starts to reduce the unit that was added to last.
    fn send_open(&mut self) {
        let Mode::Ranges(ranges) = &mut self.mode else { return };
        let Some((u, mut buffer)) = ranges.open.take() else { return };
        clear_frozen(&self.table, u, &mut buffer);
        let partition = self.partition.clone();
        let job = self.stream.submit(move |groups| {
            groups[0].sum_scattered(&mut buffer, partition.cuts(u), GradientOrder::Fast);
            buffer
        });
        ranges.in_flight.push_back((u, job));
    }

    /// Waits until at most `most` units are in flight.
    fn wait_for_all_but(&mut self, most: usize) {
        match &mut self.mode {
            Mode::Whole(whole) => {
                for (u, job) in whole.in_flight.drain(..) {
                    self.sums[u] = job.wait();
                }
            }
            Mode::Ranges(ranges) => {
                while ranges.in_flight.len() > most {
                    let (u, job) = ranges.in_flight.pop_front().expect("one is in flight");
                    let (sum, buffer) = (&mut self.sums[u], job.wait());
                    let len = sum.len();
                    residual::accumulate(buffer.slice(self.partition.own_cut(u)), sum.slice_mut(0..len));
                }
            }
        }
    }

    /// After the last micro-batch: starts to reduce what is not in flight yet.
    pub fn seal(&mut self, order: GradientOrder) {
        if let Mode::Whole(whole) = &mut self.mode {
            whole.last = true;
        }
        self.reduce_above(0, order);
        self.send_open();
    }

    /// Seals the sums and waits. Then `own` holds sums over all ranks of the axis.
    pub fn reduce(&mut self, order: GradientOrder) {
        self.seal(order);
        self.wait_for_all_but(0);
        // A rank that has no chunk of the next minibatch begins no new sum, but goes along.
        if let Mode::Whole(whole) = &mut self.mode {
            whole.last = false;
            whole.next = self.partition.units();
        }
    }

    /// The sums of a unit that this rank's optimizer works on: all of it at stage 0, else its range. Other elements are
    /// unspecified after `reduce`.
    pub fn own(&self, unit: usize) -> Slice<'_> {
        let sum = &self.sums[unit];
        match &self.mode {
            Mode::Whole(whole) if !whole.everywhere => sum.slice(self.partition.own_cut(unit)),
            _ => sum.slice(0..sum.len()),
        }
    }

    /// Bytes that stay on this rank, and of the units that are added to or in flight.
    pub fn bytes(&self) -> usize {
        let unit_len = |unit: usize| self.partition.unit(unit).len();
        let kept: usize = match &self.mode {
            Mode::Whole(_) => (0..self.partition.units()).map(unit_len).sum(),
            Mode::Ranges(ranges) => {
                let in_flight: usize = ranges.in_flight.iter().map(|(unit, _)| unit_len(*unit)).sum();
                self.partition.own_len() + in_flight + ranges.open.as_ref().map_or(0, |(_, buffer)| buffer.len())
            }
        };
        kept * size_of::<f32>()
    }

    /// Units whose sums over ranks are in flight.
    pub fn under_way(&self) -> usize {
        match &self.mode {
            Mode::Whole(whole) => whole.in_flight.len(),
            Mode::Ranges(ranges) => ranges.in_flight.len(),
        }
    }

    /// Takes the sums of a whole unit out; `zero` makes new ones.
    pub fn take(&mut self, unit: usize) -> Flat {
        std::mem::replace(&mut self.sums[unit], Flat::none())
    }

    /// Puts other sums in the place of those of a whole unit.
    ///
    /// # Panics
    /// If they are of another length, or on another device.
    pub fn replace(&mut self, unit: usize, with: Flat) {
        let whole = self.partition.unit(unit).len();
        assert_eq!((with.device(), with.len()), (self.device, whole), "sums of unit {unit}");
        self.sums[unit] = with;
    }

    /// All of it, in the order of the table, where units are whole.
    pub fn to_vec(&self) -> Vec<f32> {
        assert!(!self.is_sharded(), "gradients of other ranks' ranges are not here");
        self.sums.iter().flat_map(|sum| sum.slice(0..sum.len()).to_host()).collect()
    }

    /// The gradient of a parameter, padding included, where units are whole.
    pub fn of(&self, id: ParamId) -> &[f32] {
        let (u, range) = self.place(id);
        self.sums[u].slice(range).f32()
    }

    pub fn weight_mut(&mut self, id: ParamId) -> WeightMut<'_> {
        let (n, k) = self.table.spec(id).dims();
        let layout = self.table.spec(id).layout;
        WeightMut { n, k, layout, values: self.values_mut(id) }
    }

    /// The gradient of a norm, a bias or a value head.
    pub fn vector_mut(&mut self, id: ParamId) -> SliceMut<'_> {
        let (u, range) = self.place(id);
        let end = range.start + self.table.spec(id).elements();
        self.unit_mut(u).slice_mut(range.start..end)
    }

    fn values_mut(&mut self, id: ParamId) -> SliceMut<'_> {
        let (u, range) = self.place(id);
        self.unit_mut(u).slice_mut(range)
    }

    /// What is added to in unit `u`.
    fn unit_mut(&mut self, u: usize) -> &mut Flat {
        match &mut self.mode {
            Mode::Whole(_) => &mut self.sums[u],
            Mode::Ranges(Ranges { open: Some((open, buffer)), .. }) if *open == u => buffer,
            Mode::Ranges(_) => panic!("unit {u} is added to, but was not begun"),
        }
    }

    /// The unit of a parameter and its range from there.
    fn place(&self, id: ParamId) -> (usize, Range<usize>) {
        let (u, spec) = (self.table.unit_of(id), self.table.spec(id));
        let at = spec.offset - self.partition.unit(u).start;
        (u, at..at + spec.len)
    }
}

/// What is frozen has no gradient, whatever its backward added.
fn clear_frozen(table: &ParamTable, unit: usize, sums: &mut Flat) {
    table.frozen(unit).for_each(|range| sums.slice_mut(range).clear());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Arch, Head};

    #[test]
    fn a_frozen_parameter_has_no_gradient_and_no_weight_decay() {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20
        });
        let arch = Arch::from_config(config.as_object().expect("an object")).expect("a known family");
        let mut table = ParamTable::new(&arch, Head::LanguageModel);
        table.freeze(|spec| spec.name.contains("gate_proj"));
        let mut grads = Gradients::new(Arc::new(table));
        grads.begin_microbatch(false);
        for id in (0..grads.table.specs().len()).map(ParamId) {
            grads.begin(grads.table.unit_of(id));
            let SliceMut::F32(values) = grads.values_mut(id) else { unreachable!("a model on the CPU") };
            values.fill(1.0);
        }
        grads.reduce(GradientOrder::Fixed);
        for (i, spec) in grads.table.specs().iter().enumerate() {
            let want = f32::from(u8::from(spec.trainable));
            assert!(grads.of(ParamId(i)).iter().all(|x| *x == want), "{}", spec.name);
            assert_eq!(spec.decays(), spec.trainable && spec.shape.len() == 2, "{}", spec.name);
        }
        assert_eq!(grads.table.specs().iter().filter(|spec| !spec.trainable).count(), 1);
    }
}
