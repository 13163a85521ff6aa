//! The values of a model's parameters, unit by unit: all of them, or this rank's range of each unit (ZeRO stage 3).

pub mod collect;
mod gradients;
mod in_use;
mod moves;
pub mod pack;
pub mod partition;
pub(super) mod quantized;
pub mod reshard;
mod unit;

use self::in_use::{Held, InUse};
use self::partition::{Partition, Shards, Streams};
use self::quantized::{QuantizedUnit, QuantizedUnits};
use self::unit::check_cut;
use super::params::ParamTable;
use crate::comm::Pending;
use crate::device::Device;
use crate::device::cuda::{Arg, owned_by, owner};
use crate::sys::lock::lock;
use crate::tensor::DType;
use crate::tensor::arena::{self, Buffer};
use std::cell::OnceCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Instant;

pub use self::gradients::Gradients;
pub use self::in_use::Unit;
pub use self::unit::UnitValues;

/// The owner of their memory.
const ON_USE: &str = "gathered units";
/// The largest number of prefetched units: a layer's experts (two), the next layer and, after the last one, a tied head's.
const PREFETCHED_MAX: usize = 4;

/// All parameters of one model, in the working dtype.
pub struct Weights {
    pub table: Arc<ParamTable>,
    /// The frozen parameters, if only a part of the model trains. Other models may share them.
    pub base: Option<Rc<Self>>,
    dtype: DType,
    /// For each unit all values, or this rank's range if `gathered` is set.
    units: Vec<UnitValues>,
    gathered: Option<Gathered>,
    /// The units in nf4, of which `units` has no values.
    quantized: Option<QuantizedUnits>,
    /// The units that `all_gather` still gathers.
    gathering: Vec<(usize, Pending<UnitValues>)>,
}

/// The state for gathering units on use.
struct Gathered {
    partition: Arc<Partition>,
    streams: Streams,
    /// Whether units are gathered on use (stage 3). Otherwise a rank only lacks experts that it does not compute.
    on_use: bool,
    cache: Mutex<Cache>,
}

impl Gathered {
    /// `None` if each rank holds all weights.
    fn new(shards: &Shards) -> Option<Self> {
        let (partition, streams, on_use) = (shards.partition.clone(), shards.streams.clone(), shards.weights());
        let is_sharded = (0..partition.units()).any(|unit| shards.is_part(unit));
        is_sharded.then(|| Self { partition, streams, on_use, cache: Mutex::default() })
    }
}

#[derive(Default)]
struct Cache {
    /// The unit that was requested last.
    held: Option<(usize, Whole)>,
    prefetched: VecDeque<(usize, Pending<Whole>)>,
}

/// A gathered unit.
#[derive(Clone)]
enum Whole {
    Values(Arc<UnitValues>),
    Quantized(Arc<QuantizedUnit>),
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weights({} {:?}, {} bytes here)", self.table.len(), self.dtype, self.bytes())
    }
}

impl Weights {
    /// Unsharded weights from the values of each unit.
    pub(super) fn from_units(table: Arc<ParamTable>, dtype: DType, units: Vec<UnitValues>) -> Self {
        let ranges = units.iter().map(|values| (values.dtype(), values.range()));
        assert!(ranges.eq(table.units().iter().map(|unit| (dtype, unit.clone()))), "the units of another table");
        Self::of_units(table, dtype, units, None, None)
    }

    /// Builds weights. `fill` sets the values of one unit after another. At stage 3 a unit is this rank's range. At the
    /// other stages it is whole, and padded by `shards.partition` at stages 1 and 2.
    ///
    /// # Errors
    /// The error of `fill`.
    pub fn build<E>(
        table: Arc<ParamTable>,
        dtype: DType,
        shards: &Shards,
        mut fill: impl FnMut(UnitValues) -> Result<UnitValues, E>,
    ) -> Result<Self, E> {
        let units = (0..table.units().len()).map(|u| fill(room(&table, u, dtype, shards))).collect::<Result<_, E>>()?;
        Ok(Self::of_units(table, dtype, units, Gathered::new(shards), None))
    }

    /// Weights of a frozen base in nf4. `quantize` returns this rank's share of a layer, and `fill` sets the values of
    /// another unit, as in `build`.
    pub(super) fn quantized<E>(
        table: Arc<ParamTable>,
        dtype: DType,
        shards: &Shards,
        mut quantize: impl FnMut(usize) -> Result<QuantizedUnit, E>,
        mut fill: impl FnMut(UnitValues) -> Result<UnitValues, E>,
    ) -> Result<Self, E> {
        let (mut units, mut quantized) = (Vec::new(), Vec::new());
        for u in 0..table.units().len() {
            let is_quantized = table.is_quantized(u);
            quantized.push(if is_quantized { Some(Arc::new(quantize(u)?)) } else { None });
            units.push(if is_quantized {
                UnitValues::absent(&table, u, dtype)
            } else {
                fill(room(&table, u, dtype, shards))?
            });
        }
        Ok(Self::of_units(table, dtype, units, Gathered::new(shards), Some(QuantizedUnits::new(quantized))))
    }

    fn of_units(
        table: Arc<ParamTable>,
        dtype: DType,
        units: Vec<UnitValues>,
        gathered: Option<Gathered>,
        quantized: Option<QuantizedUnits>,
    ) -> Self {
        Self { table, base: None, dtype, units, gathered, quantized, gathering: Vec::new() }
    }

    /// Whether layers are in nf4.
    pub fn is_quantized(&self) -> bool {
        self.quantized.is_some()
    }

    /// The same on a base, whose table the model's own table refers to.
    #[must_use]
    pub fn on_base(mut self, base: Option<Rc<Self>>) -> Self {
        let tables = [self.table.base(), base.as_ref().map(|base| &base.table)];
        assert!(matches!(tables, [None, None]) || matches!(tables, [Some(a), Some(b)] if Arc::ptr_eq(a, b)));
        self.base = base;
        self
    }

    /// This rank's weights with unspecified values.
    pub fn scratch(table: Arc<ParamTable>, dtype: DType, shards: &Shards) -> Self {
        let Ok(weights) = Self::build(table, dtype, shards, Ok::<_, std::convert::Infallible>);
        weights
    }

    /// The partition of units over ranks, if a rank holds only a part of this one.
    pub(super) fn partition(&self, unit: usize) -> Option<&Arc<Partition>> {
        let gathered = self.gathered.as_ref().filter(|all| all.on_use || all.partition.is_divided(unit));
        gathered.map(|gathered| &gathered.partition)
    }

    /// The bytes of a copy with all values in the layout of `table`, without the base. It shares units in nf4 that this
    /// rank has whole.
    pub fn whole_bytes(&self, table: &ParamTable) -> usize {
        let of = |(unit, range): (usize, &Range<usize>)| match (self.quantized_unit(unit), self.partition(unit)) {
            (None, _) => range.len() * self.dtype.bytes(),
            (Some(quantized), Some(partition)) => partition.parts(unit) * quantized.shared_bytes(),
            (Some(_), None) => 0,
        };
        table.units().iter().enumerate().map(of).sum()
    }

    /// Whether this rank holds only a part of the weights.
    pub fn is_sharded(&self) -> bool {
        self.gathered.is_some()
    }

    /// Whether this rank holds only its ranges, and gathers units on use.
    pub(super) fn gathers_on_use(&self) -> bool {
        self.gathered.as_ref().is_some_and(|gathered| gathered.on_use)
    }

    /// The parameters of unit `index`, those of the base included. If weights are sharded, this is a collective, unless the unit is also the last
    /// one requested. Every rank requests the same units in the same order. Gathered values live as long as the `Unit`,
    /// and at least until the next request.
    pub fn unit(&self, index: usize) -> Unit<'_> {
        Unit { own: self.own_unit(index), base: self.base.as_ref().map(|base| base.own_unit(index)) }
    }

    /// The same without those of the base.
    pub(super) fn own_unit(&self, index: usize) -> Held<'_> {
        let whole = match (self.gathered_on_use(index), self.quantized_unit(index)) {
            (Some(gathered), _) => self.gathered_unit(gathered, index),
            (None, Some(unit)) => Whole::Quantized(unit.clone()),
            (None, None) => return Held::Here(self.local(index)),
        };
        match (whole, &self.quantized) {
            (Whole::Values(values), _) => Held::Gathered(values),
            (Whole::Quantized(unit), Some(units)) => {
                let (table, dtype, values) = (&self.table, self.dtype, OnceCell::new());
                Held::Quantized(InUse { units, table, dtype, index, unit, values })
            }
            (Whole::Quantized(_), None) => unreachable!("a quantized unit of other weights"),
        }
    }

    fn gathered_unit(&self, gathered: &Gathered, index: usize) -> Whole {
        let mut cache = lock(&gathered.cache);
        if let Some((held, whole)) = &cache.held
            && *held == index
        {
            return whole.clone();
        }
        // Its memory serves the next one.
        cache.held = None;
        let prefetched = cache.prefetched.iter().position(|(prefetched, _)| *prefetched == index);
        let pending = match prefetched.and_then(|i| cache.prefetched.remove(i)) {
            Some((_, pending)) => pending,
            None => self.gather(gathered, index, ON_USE),
        };
        let whole = pending.wait();
        cache.held = Some((index, whole.clone()));
        whole
    }

    /// This rank's codes, or share of them, of a unit in nf4.
    fn quantized_unit(&self, unit: usize) -> Option<&Arc<QuantizedUnit>> {
        self.quantized.as_ref().and_then(|all| all.units[unit].as_ref())
    }

    /// How to gather a unit on use, unless all of it is here that this rank computes. A unit of frozen parameters alone has
    /// nothing to gather.
    fn gathered_on_use(&self, unit: usize) -> Option<&Gathered> {
        let is_gathered = |gathered: &&Gathered| {
            let partition = &gathered.partition;
            gathered.on_use && partition.shares(unit).len() > 1 && partition.is_here(unit)
        };
        self.gathered.as_ref().filter(is_gathered).filter(|_| !self.table.units()[unit].is_empty())
    }

    /// Starts to gather unit `index` in the background for the next `unit(index)`. Does nothing if weights are not
    /// sharded.
    pub fn prefetch(&self, index: usize) {
        if let Some(base) = &self.base {
            base.prefetch(index);
        }
        let Some(gathered) = self.gathered_on_use(index) else { return };
        let mut cache = lock(&gathered.cache);
        let held = cache.held.iter().map(|(held, _)| held);
        if held.chain(cache.prefetched.iter().map(|(prefetched, _)| prefetched)).any(|unit| *unit == index) {
            return;
        }
        while cache.prefetched.len() >= PREFETCHED_MAX {
            cache.prefetched.pop_front();
        }
        cache.prefetched.push_back((index, self.gather(gathered, index, ON_USE)));
    }

    /// Starts to gather a unit of which this rank holds a range, into memory of `owner`.
    fn gather(&self, gathered: &Gathered, unit: usize, owner: &'static str) -> Pending<Whole> {
        let partition = gathered.partition.clone();
        let stream = gathered.streams.of(&partition, unit);
        if let Some(quantized) = self.quantized_unit(unit) {
            let job = owned_by(owner, || quantized.gathering(partition.sharing(unit)));
            return stream.submit(|group| Whole::Quantized(Arc::new(job(group))));
        }
        let (range, len) = (partition.shared(unit), partition.padded_len(unit));
        let mut values = owned_by(owner, || UnitValues::padded_scratch(&self.table, range, self.dtype, len));
        values.copy_part(self.local(unit));
        stream.submit(move |group| {
            values.gather(group, partition.shares(unit));
            Whole::Values(Arc::new(values))
        })
    }

    /// Starts to gather all of a unit into memory of `owner`, whatever this rank holds of it. Units in nf4 that are here
    /// are shared.
    fn gather_all(&self, gathered: &Gathered, unit: usize, owner: &'static str) -> Pending<Whole> {
        let (partition, is_share) = (gathered.partition.clone(), gathered.on_use);
        let whole = match self.quantized_unit(unit).cloned() {
            Some(quantized) if partition.is_divided(unit) => {
                return gathered.streams.all.submit(move |group| {
                    let all = || quantized.with_all_experts(group, &partition, unit, is_share);
                    Whole::Quantized(Arc::new(owned_by(owner, all)))
                });
            }
            _ if is_share => return self.gather(gathered, unit, owner),
            Some(quantized) => Whole::Quantized(quantized),
            None => {
                let mut values = owned_by(owner, || UnitValues::scratch(&self.table, unit, self.dtype));
                values.copy_part(self.local(unit));
                values.refresh();
                Whole::Values(Arc::new(values))
            }
        };
        gathered.streams.all.submit(move |_| whole)
    }

    /// A copy of sharded weights with all units gathered, and the bytes received for it. A collective.
    ///
    /// # Panics
    /// If weights are not sharded.
    pub(super) fn all_gathered(&self) -> (Self, usize) {
        let gathered = self.gathered.as_ref().expect("sharded weights");
        let under_way: Vec<_> = (0..self.units.len()).map(|u| self.gather_all(gathered, u, owner())).collect();
        let (mut units, mut quantized, mut received) = (Vec::new(), Vec::new(), 0);
        for (u, pending) in under_way.into_iter().enumerate() {
            match pending.wait() {
                Whole::Values(values) => {
                    received += (values.range().len() - self.local(u).range().len()) * self.dtype.bytes();
                    units.push(Arc::into_inner(values).expect("it was gathered for this"));
                    quantized.push(None);
                }
                Whole::Quantized(unit) => {
                    received += unit.bytes() - self.quantized_unit(u).map_or(0, |own| own.bytes());
                    units.push(UnitValues::absent(&self.table, u, self.dtype));
                    quantized.push(Some(unit));
                }
            }
        }
        let quantized = self.quantized.is_some().then(|| QuantizedUnits::new(quantized));
        (Self::of_units(self.table.clone(), self.dtype, units, None, quantized), received)
    }

    /// Offloads weights of a GPU: copies them to pinned host memory, if they `have_changed` since the last offload, and
    /// frees their GPU memory until `onload`. Weights on the CPU stay.
    pub fn offload(&mut self, have_changed: bool) {
        self.release();
        let start = Instant::now();
        self.units.iter_mut().for_each(|unit| unit.offload(have_changed));
        arena::count_moving(start);
    }

    /// Starts to copy offloaded weights back to the GPU, in the order of a forward, which may begin at once.
    pub fn onload(&mut self) {
        if !self.units.iter().any(UnitValues::is_offloaded) {
            return;
        }
        let start = Instant::now();
        self.units.iter_mut().for_each(UnitValues::onload);
        arena::count_moving(start);
    }

    /// Drops the unit that was gathered last and the prefetched units.
    pub fn release(&self) {
        if let Some(gathered) = &self.gathered {
            *lock(&gathered.cache) = Cache::default();
        }
        self.quantized.iter().for_each(QuantizedUnits::release);
        if let Some(base) = &self.base {
            base.release();
        }
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn device(&self) -> Device {
        self.table.device()
    }

    /// The buffers of the weights that stay on this rank.
    pub fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.units.iter().flat_map(UnitValues::buffers)
    }

    pub fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.units.iter_mut().flat_map(UnitValues::buffers_mut)
    }

    /// The bytes that stay on this rank, without the base. Gathered units are not included.
    pub fn bytes(&self) -> usize {
        let quantized = self.quantized.iter().flat_map(|all| all.units.iter().flatten().map(|unit| unit.bytes()));
        self.units.iter().map(UnitValues::bytes).chain(quantized).sum()
    }

    /// This rank's values of a unit.
    pub fn local(&self, unit: usize) -> &UnitValues {
        self.units[unit].wait();
        &self.units[unit]
    }

    /// This rank's values of a unit. One in nf4 is gathered, which is a collective, and dequantized.
    pub(super) fn here(&self, unit: usize) -> Held<'_> {
        if self.quantized_unit(unit).is_some() { self.own_unit(unit) } else { Held::Here(self.local(unit)) }
    }

    /// The addresses of everything on this rank's GPU, the base included.
    pub fn addresses(&self) -> Vec<Arg> {
        let units = (0..self.units.len()).filter_map(|unit| self.local(unit).address());
        let quantized =
            self.quantized.iter().flat_map(|all| all.units.iter().flatten().flat_map(|unit| unit.addresses()));
        let base = self.base.iter().flat_map(|base| base.addresses());
        units.chain(quantized).chain(base).collect()
    }

    /// This rank's values of a unit. Call `all_gather` and `finish_update` after a change.
    pub fn local_mut(&mut self, unit: usize) -> &mut UnitValues {
        self.units[unit].wait();
        &mut self.units[unit]
    }

    /// The f32 values (in f32 panel order) of a flat range that is cut at multiples of `FLAT_ALIGN`.
    ///
    /// # Panics
    /// If part of it is on other ranks.
    pub fn to_master(&self, range: Range<usize>) -> Buffer {
        check_cut(&range);
        let mut out = Buffer::scratch(range.len());
        for (u, part) in self.touched(&range) {
            self.local(u).to_master(&part, &mut out[part.start - range.start..part.end - range.start]);
        }
        out
    }

    /// Stores f32 values (in f32 panel order) into a flat range that is cut at multiples of `FLAT_ALIGN`. For bf16 they
    /// are rounded to nearest even. If weights are sharded, values of other ranks' ranges are skipped.
    pub fn store_master(&mut self, range: Range<usize>, master: &[f32]) {
        check_cut(&range);
        assert_eq!(range.len(), master.len(), "store_master: the number of values must match the range");
        for (u, part) in self.touched(&range) {
            let here = self.units[u].range();
            let part = part.start.max(here.start)..part.end.min(here.end);
            if part.start < part.end {
                self.units[u].wait();
                self.units[u].store_master(&part, &master[part.start - range.start..part.end - range.start]);
            }
        }
    }

    /// The units that a flat range overlaps, with the overlap of each.
    fn touched(&self, range: &Range<usize>) -> Vec<(usize, Range<usize>)> {
        let parts = self.table.units().iter().map(|u| range.start.max(u.start)..range.end.min(u.end));
        parts.enumerate().filter(|(_, part)| part.start < part.end).collect()
    }

    /// Starts to all-gather a unit in the background after each rank has updated its own range of it (stages 1 and 2).
    /// The unit is not available until `finish_update`.
    pub fn all_gather(&mut self, unit: usize, shards: &Shards) {
        if !shards.optimizer() || shards.weights() || shards.partition.shared(unit).is_empty() {
            return;
        }
        let absent = UnitValues::absent(&self.table, unit, self.dtype);
        self.units[unit].wait();
        let mut values = std::mem::replace(&mut self.units[unit], absent);
        let partition = shards.partition.clone();
        let job = shards.streams.of(&partition, unit).submit(move |group| {
            values.gather(group, partition.shares(unit));
            values
        });
        self.gathering.push((unit, job));
    }

    /// Ends an update: waits for the units of `all_gather`, and drops units that were gathered on use.
    pub fn finish_update(&mut self) {
        for (unit, job) in self.gathering.drain(..) {
            self.units[unit] = job.wait();
        }
        self.release();
    }
}

/// Memory for this rank's part of a unit.
fn room(table: &Arc<ParamTable>, unit: usize, dtype: DType, shards: &Shards) -> UnitValues {
    if shards.weights() {
        UnitValues::part_scratch(table, shards.partition.own(unit), dtype)
    } else {
        // Padded if the ranks gather it after an update.
        UnitValues::padded_scratch(table, shards.updated.shared(unit), dtype, shards.updated.padded_len(unit))
    }
}
