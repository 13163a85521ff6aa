//! Weights from the layout of training into that of the rollout: in memory, once, unit by unit.
//!
//! In training this rank holds part r of T of each matrix, of which ZeRO stage 3 leaves it a range; in the rollout it holds
//! part q of Q. A unit is gathered over the ranks that ZeRO shards over and, where T and Q differ, over those of the tensor
//! axis; the new part is cut out of it and the rest dropped. On GPUs only what the new part lacks travels (`reshard_cuda`). The
//! next unit is on its way meanwhile. Values keep their dtype and their bits.

use super::cut::{Flat, cut, join};
use super::params::{ParamSpec, ParamTable};
use super::part::TensorPart;
use super::partition::Partition;
use super::reshard_cuda::{Coming, Cuda, Parts};
use super::transformer::Transformer;
use super::unit::UnitValues;
use super::weights::Weights;
use crate::comm::{Axes, Group, Pending, Stream};
use crate::device::Device;
use crate::tensor::DType;
use crate::tensor::arena::Buffer;
use bytemuck::Pod;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The way from one layout to another, for one model.
#[derive(Debug)]
pub struct Reshard {
    /// Gathers over the ranks that ZeRO shards over, and over those of the tensor axis.
    stream: Stream,
    /// What each rank of training's tensor axis holds; this rank is `rank` of them.
    pub(super) from: Vec<Arc<ParamTable>>,
    pub(super) rank: usize,
    whole: Arc<ParamTable>,
    pub(super) to: Arc<ParamTable>,
    /// Where models are on GPUs.
    pub(super) cuda: Option<Cuda>,
}

/// A unit of which the new part is to be cut.
enum Old<'a> {
    /// This rank has all of it.
    Here(&'a UnitValues),
    /// The parts of all tensor ranks, end to end.
    Coming(Pending<Buffer>),
    /// What the new part lacks, on the GPU.
    ComingCuda(Coming<'a>),
    /// It is the new part.
    Same(Pending<UnitValues>),
}

impl Reshard {
    /// From the layout `axes` of a model, whose part on this rank is `table`, to part `to`. All ranks of `axes` call this.
    ///
    /// # Panics
    /// If the model cannot be cut into so many parts (`Arch::check_tensor`).
    pub fn new(transformer: &Transformer, table: &Arc<ParamTable>, axes: &Axes, to: TensorPart) -> Self {
        let part = |part: TensorPart| {
            if part == table.tensor_part() {
                return table.clone();
            }
            Arc::new(ParamTable::on(table.device(), &transformer.arch, table.head(), part))
        };
        let size = axes.tensor.size();
        let cuda =
            (table.device() == Device::Cuda).then(|| Cuda::new(axes, to.rank, |rank| part(TensorPart { rank, ..to })));
        Self {
            stream: Stream::new("reshard", &[&axes.zero, &axes.tensor]),
            from: (0..size).map(|rank| part(TensorPart { rank, size })).collect(),
            rank: axes.tensor.rank(),
            whole: part(TensorPart::whole()),
            to: part(to),
            cuda,
        }
    }

    /// What this rank holds afterwards.
    pub fn table(&self) -> &Arc<ParamTable> {
        &self.to
    }

    /// This rank's part in the new layout of weights in the old one, and the bytes that it received for it. A collective of
    /// all ranks.
    pub fn weights(&self, from: &Weights) -> (Weights, usize) {
        let mut units = Vec::with_capacity(self.to.units().len());
        let received = self.each(from, |_, values| units.push(values));
        (Weights::of(self.to.clone(), from.dtype(), units), received)
    }

    /// Gives the new part of each unit in turn to `take`; returns the bytes that this rank received. A collective of all
    /// ranks.
    pub fn each(&self, from: &Weights, mut take: impl FnMut(usize, UnitValues)) -> usize {
        let count = self.to.units().len();
        let mut next = Some(self.start(from, 0));
        for u in 0..count {
            let here = next.take().expect("started in the turn before").arrive(self, u);
            // Not before this one is here: two old units at a time, the one that is cut and the one on its way.
            next = (u + 1 < count).then(|| self.start(from, u + 1));
            take(u, self.cut(u, here, from.dtype()));
        }
        (0..count).map(|u| self.received(from, u)).sum::<usize>() * from.dtype().bytes()
    }

    /// Elements of a unit that come from other ranks.
    fn received(&self, from: &Weights, unit: usize) -> usize {
        if let Some(cuda) = self.cuda.as_ref().filter(|_| !self.same()) {
            return cuda.received(self, from, unit);
        }
        let own = self.from[self.rank].units()[unit].len();
        let others = if self.same() { 0 } else { self.from.iter().map(|t| t.units()[unit].len()).sum::<usize>() - own };
        others + own - from.local(unit).range().len()
    }

    /// Whether the tensor axis is cut alike in both layouts.
    fn same(&self) -> bool {
        Arc::ptr_eq(&self.from[self.rank], &self.to)
    }

    /// Starts to bring a unit here.
    fn start<'a>(&self, from: &'a Weights, unit: usize) -> Old<'a> {
        let own = from.local(unit);
        let partition = from.partition().cloned();
        if partition.is_none() && self.from.len() == 1 {
            return Old::Here(own);
        }
        if self.same() {
            let mut values = UnitValues::scratch(&self.to, unit, from.dtype());
            values.take(own);
            // The axis of ZeRO goes its own way where the other goes another.
            let stream = self.cuda.as_ref().map_or(&self.stream, |cuda| &cuda.zero);
            return Old::Same(stream.submit(move |groups| {
                if let Some(partition) = partition {
                    values.gather(&groups[0], partition.cuts(unit));
                }
                values.refresh();
                values
            }));
        }
        if let Some(cuda) = &self.cuda {
            return Old::ComingCuda(cuda.start(self, from, unit));
        }
        let slots = self.slots(unit);
        let len = slots.last().map_or(0, |slot| slot.end);
        let mine = slots[self.rank].clone();
        let flat = self.from[self.rank].units()[unit].clone();
        let at = mine.start + own.range().start - flat.start;
        let place = at..at + own.range().len();
        let dtype = from.dtype();
        let mut all = Buffer::scratch(len * dtype.bytes() / size_of::<f32>());
        match dtype {
            DType::F32 => all[place].copy_from_slice(own.f32()),
            DType::Bf16 => bytemuck::cast_slice_mut::<f32, u16>(&mut all)[place].copy_from_slice(own.bf16()),
        }
        Old::Coming(self.stream.submit(move |groups| {
            if let Some(partition) = partition {
                gather(&groups[0], dtype, &mut all, &behind(mine.start, &partition, unit));
            }
            gather(&groups[1], dtype, &mut all, &slots);
            all
        }))
    }

    /// Where the part of each tensor rank lies when those of a unit lie end to end.
    fn slots(&self, unit: usize) -> Vec<Range<usize>> {
        let mut end = 0;
        let next = |table: &Arc<ParamTable>| {
            let start = end;
            end += table.units()[unit].len();
            start..end
        };
        self.from.iter().map(next).collect()
    }

    /// The new part of a unit.
    fn cut(&self, unit: usize, here: Here, dtype: DType) -> UnitValues {
        match here {
            Here::Part(values) => values,
            Here::One(values) if self.to.device() == Device::Cuda => self.put_together(unit, &Parts::here(values)),
            Here::AllCuda(parts) => self.put_together(unit, &parts),
            Here::One(values) => self.cut_cpu(unit, values.raw(), dtype),
            Here::All(parts) => self.cut_cpu(unit, &parts, dtype),
        }
    }

    fn cut_cpu(&self, unit: usize, parts: &[f32], dtype: DType) -> UnitValues {
        let mut out = UnitValues::scratch(&self.to, unit, dtype);
        match dtype {
            DType::F32 => self.cut_unit::<f32>(unit, parts, out.f32_mut()),
            DType::Bf16 => self.cut_unit::<u16>(unit, bytemuck::cast_slice(parts), out.bf16_mut()),
        }
        out.refresh();
        out
    }

    /// `out`, the new part of a unit, from the old parts, which lie end to end in `parts`.
    fn cut_unit<T: Flat + Pod + Send + Sync>(&self, unit: usize, parts: &[T], out: &mut [T]) {
        let slots = self.slots(unit);
        let mut rest = out;
        let mut places = Vec::new();
        for (i, to) in self.to.specs().iter().enumerate().filter(|(_, to)| self.to.units()[unit].contains(&to.offset)) {
            let (place, after) = rest.split_at_mut(to.len);
            places.push((i, to, place));
            rest = after;
        }
        places.into_par_iter().for_each(|(i, to, place)| {
            let whole = &self.whole.specs()[i];
            let mut old: Vec<(&ParamSpec, &[T])> = Vec::with_capacity(slots.len());
            for (table, slot) in self.from.iter().zip(&slots) {
                let spec = &table.specs()[i];
                let at = slot.start + spec.offset - table.units()[unit].start;
                old.push((spec, &parts[at..at + spec.len]));
            }
            match &old[..] {
                [(spec, values)] => cut(spec, values, to, place),
                old if to.is_whole() => join(old, whole, place),
                old => {
                    let mut joined = Buffer::scratch(whole.len * size_of::<T>() / size_of::<f32>());
                    join::<T>(old, whole, bytemuck::cast_slice_mut(&mut joined));
                    cut(whole, bytemuck::cast_slice(&joined), to, place);
                }
            }
        });
    }
}

/// A unit that has come.
enum Here<'a> {
    One(&'a UnitValues),
    All(Buffer),
    AllCuda(Parts<'a>),
    Part(UnitValues),
}

impl<'a> Old<'a> {
    fn arrive(self, reshard: &Reshard, unit: usize) -> Here<'a> {
        match self {
            Self::Here(values) => Here::One(values),
            Self::Coming(pending) => Here::All(pending.wait()),
            Self::ComingCuda(coming) => Here::AllCuda(coming.arrive(reshard, unit)),
            Self::Same(pending) => Here::Part(pending.wait()),
        }
    }
}

/// The range of each rank that shares a unit which begins at `start` of a buffer.
pub(super) fn behind(start: usize, partition: &Partition, unit: usize) -> Vec<Range<usize>> {
    partition.cuts(unit).iter().map(|cut| start + cut.start..start + cut.end).collect()
}

fn gather(group: &Group, dtype: DType, all: &mut [f32], ranges: &[Range<usize>]) {
    match dtype {
        DType::F32 => group.all_gather(all, ranges),
        DType::Bf16 => group.all_gather_u16(bytemuck::cast_slice_mut(all), ranges),
    }
}
