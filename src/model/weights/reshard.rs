//! Reshards weights from the training layout to the rollout layout: in memory, unit by unit.
//!
//! In training this rank holds part r of T of each matrix, or with ZeRO stage 3 a range of that part. In the rollout it
//! holds part q of Q. A unit is exchanged first over the ZeRO axis, then over the tensor axis. Ranks send only values
//! that the others lack. Over the ZeRO axis these are the values of the common part that any rank of the receiver's
//! tensor axis needs. Over the tensor axis they are the values that the receiver itself needs.
//!
//! On a pipeline, the stage of a unit first sends its ranks' ranges to the ranks at the same place of the other stages.
//!
//! Collectives use the backend of their axis. Values are packed and unpacked on their device, and
//! keep their dtype and their bits. The next unit is in transfer while one is unpacked.

use super::Weights;
use super::in_use::Held;
use super::moves::{Take, len, pack, takes, union, unpack, within};
use super::partition::Partition;
use super::unit::UnitValues;
use crate::comm::{Axes, Group, Pending, Stream};
use crate::model::params::ParamTable;
use crate::model::part::TensorPart;
use crate::model::transformer::Transformer;
use crate::tensor::{DType, Flat, Layout, Piece, Slice};
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

/// The exchange between two layouts of one model.
#[derive(Debug)]
pub struct Reshard {
    zero: Stream,
    tensor: Stream,
    pipeline: Group,
    /// The stage that has each unit, and the partition of units over the ranks of any stage.
    stages: Vec<usize>,
    partition: Arc<Partition>,
    /// This rank on the ZeRO axis.
    zero_rank: usize,
    /// The table of each rank of training's tensor axis. This rank has index `rank`.
    from: Vec<Arc<ParamTable>>,
    rank: usize,
    to: Arc<ParamTable>,
    /// The new part of each rank, by its rank on the ZeRO axis and on the tensor axis.
    all: Vec<Vec<Arc<ParamTable>>>,
    /// Elements received from other ranks so far for the current weights.
    received: Cell<usize>,
}

/// A unit in transfer.
enum Transfer {
    /// The new part itself.
    Same(Pending<UnitValues>),
    /// The values that the new part needs from other old parts, if any. This rank's own old part is complete.
    Sent(Option<Pending<Flat>>),
    /// All of this rank's old part.
    Gathered(Pending<Flat>),
    /// The values of the old part that this rank's tensor axis needs, without this rank's own range.
    Shared(Pending<Flat>),
}

/// The values from which a new part is assembled.
enum Parts {
    /// The new part itself.
    Whole(UnitValues),
    /// This rank's old part if it was received, and the values that are needed from the other old parts, end to end.
    Of(Option<Flat>, Option<Flat>),
}

impl Reshard {
    /// Reshards from the layout `axes` of a model, with part `table` on this rank, to part `to`. All ranks of `axes`
    /// call this. `base` is the new part's table of frozen parameters.
    ///
    /// # Panics
    /// If the model cannot be split into this many parts (`Arch::check_tensor`).
    pub fn new(
        transformer: &Transformer,
        table: &Arc<ParamTable>,
        axes: &Axes,
        to: TensorPart,
        base: Option<&Arc<ParamTable>>,
    ) -> Self {
        let mut known = vec![(table.tensor_part(), table.clone())];
        let mut part = |part: TensorPart| {
            if let Some((_, table)) = known.iter().find(|(other, _)| *other == part) {
                return table.clone();
            }
            let other = table.for_part(&transformer.arch, part);
            let other = base.filter(|_| part == to).map(|base| other.on_base(&transformer.arch, base)).unwrap_or(other);
            known.push((part, Arc::new(other)));
            known[known.len() - 1].1.clone()
        };
        let size = axes.tensor.size();
        let from = (0..size).map(|rank| part(TensorPart { rank, size })).collect();
        let peers = axes.tensor.all_gather_numbers(&[to.rank as f64]).concat();
        let of = |ranks: Vec<f64>| ranks.iter().map(|rank| part(TensorPart { rank: *rank as usize, ..to })).collect();
        let all = axes.zero.all_gather_numbers(&peers).into_iter().map(of).collect();
        let stream = |group| Stream::new("reshard", group);
        let (zero, tensor) = (stream(&axes.zero), stream(&axes.tensor));
        let [rank, ranks] = [axes.zero.rank(), axes.zero.size()];
        let of_experts = table.units_of_experts();
        let partition = Partition::with_experts(table.units(), of_experts, rank, ranks, axes.expert.size());
        Self {
            zero,
            tensor,
            pipeline: axes.pipeline.clone(),
            stages: table.stages_of_units(axes.pipeline.size(), axes.chunks),
            partition: Arc::new(partition),
            zero_rank: axes.zero.rank(),
            from,
            rank: axes.tensor.rank(),
            to: part(to),
            all,
            received: Cell::new(0),
        }
    }

    /// The table of this rank's new part.
    pub fn table(&self) -> &Arc<ParamTable> {
        &self.to
    }

    /// Converts weights in the old layout to this rank's part in the new layout. Also returns the bytes that were
    /// received for it. A collective of all ranks.
    pub fn weights(&self, from: &Weights) -> (Weights, usize) {
        if from.is_quantized() {
            assert!(self.same(), "codes are not split again over the tensor axis");
            return from.all_gathered();
        }
        let count = self.to.units().len();
        self.received.set(0);
        let mut units = Vec::with_capacity(count);
        let begin = |unit| {
            let own = self.own(from, unit);
            let transfer = self.start(from, own.values(), unit);
            (own, transfer)
        };
        let mut next = Some(begin(0));
        for u in 0..count {
            let (own, transfer) = next.take().expect("the previous turn started it");
            let parts = self.finish(from, own.values(), u, transfer);
            // Not before this one is here: two old units at a time, the one that is cut and the one on its way.
            next = (u + 1 < count).then(|| begin(u + 1));
            units.push(match parts {
                Parts::Whole(values) => values,
                Parts::Of(came, others) => {
                    let own = came.as_ref().map_or_else(|| own.values().slice(), Flat::all);
                    self.put_together(u, own, others.as_ref(), from.dtype())
                }
            });
        }
        (Weights::from_units(self.to.clone(), from.dtype(), units), self.received.get() * from.dtype().bytes())
    }

    /// The values of a unit that the rank at this rank's place of its stage has.
    fn own<'a>(&self, from: &'a Weights, unit: usize) -> Held<'a> {
        let (stages, root) = (self.pipeline.size(), self.stages[unit]);
        if stages == 1 {
            return Held::Here(from.local(unit));
        }
        let is_here = self.pipeline.rank() == root;
        let all = &self.partition;
        let range = if from.gathers_on_use() { all.own(unit) } else { all.shared(unit) };
        let (dtype, len) = (from.dtype(), range.len());
        let mut values = UnitValues::part_scratch(self.own_table(), range, dtype);
        if is_here {
            values.copy_part(from.local(unit));
        } else {
            self.receives(len);
        }
        self.pipeline.broadcast_slice(root, values.slice_mut());
        Held::Gathered(Arc::new(values))
    }

    /// The partition of a unit over the ranks of its stage, if they have only parts of it.
    fn partition<'a>(&'a self, from: &'a Weights, unit: usize) -> Option<&'a Arc<Partition>> {
        from.partition(unit).map(|own| if self.pipeline.size() == 1 { own } else { &self.partition })
    }

    fn receives(&self, elements: usize) {
        self.received.set(self.received.get() + elements);
    }

    /// Whether the tensor axis is split in the same way in both layouts.
    fn same(&self) -> bool {
        Arc::ptr_eq(self.own_table(), &self.to)
    }

    fn own_table(&self) -> &Arc<ParamTable> {
        &self.from[self.rank]
    }

    /// The transfers into this rank's new part of a unit.
    fn takes(&self, unit: usize, dtype: DType) -> Vec<Take> {
        takes(&self.from, self.rank, &self.to, unit, dtype)
    }

    /// The pieces of this rank's old part that rank `zero` of the ZeRO axis needs, for all of its tensor axis.
    fn needed(&self, zero: usize, unit: usize, dtype: DType) -> Vec<Piece> {
        let of = |(rank, to): (usize, &Arc<ParamTable>)| takes(&self.from, rank, to, unit, dtype);
        let all = self.all[zero].iter().enumerate().flat_map(of);
        let mine = all.filter(|take| take.source == Some(self.rank)).map(|take| take.from);
        union(self.own_table(), unit, mine.collect())
    }

    /// The same for all ranks. `None` if each needs the whole part, which is then gathered in place, unless it
    /// `is_divided`.
    fn all_needed(&self, unit: usize, dtype: DType, is_divided: bool) -> Option<Vec<Vec<Piece>>> {
        let all: Vec<Vec<Piece>> = (0..self.all.len()).map(|zero| self.needed(zero, unit, dtype)).collect();
        let table = self.own_table();
        let whole: usize = table.parts(&table.units()[unit]).map(|(id, _)| table.spec(id).elements()).sum();
        (is_divided || all.iter().any(|needed| len(needed) < whole)).then_some(all)
    }

    /// Starts the transfer of a unit, of which `own` is this rank's part.
    fn start(&self, from: &Weights, own: &UnitValues, unit: usize) -> Transfer {
        let dtype = from.dtype();
        let partition = self.partition(from, unit);
        // Ranks of an expert axis have different parts of a unit of experts, which are not gathered in place.
        let is_divided = partition.is_some_and(|partition| partition.is_divided(unit));
        let begins = &self.own_table().units()[unit];
        if self.same() && !is_divided {
            self.receives(begins.len() - own.range().len());
            return Transfer::Same(self.gather_part(own, partition.cloned(), unit));
        }
        let Some(partition) = partition.cloned() else {
            return Transfer::Sent((self.from.len() > 1).then(|| self.send(unit, own.slice(), dtype)));
        };
        if let Some(needed) = self.all_needed(unit, dtype, is_divided) {
            return Transfer::Shared(self.share(&needed, own, &partition, unit));
        }
        self.receives(begins.len() - own.range().len());
        let mut all = Flat::weights(own.device(), dtype, partition.padded_len(unit));
        let at = partition.own_cut(unit).start;
        all.all_mut().copy_from(own.slice(), &run(0, own), &run(at, own));
        Transfer::Gathered(self.zero.submit(move |group| {
            group.gather_slice(all.all_mut(), partition.shares(unit));
            all
        }))
    }

    /// Gathers the new part if it equals this rank's old one.
    fn gather_part(&self, own: &UnitValues, partition: Option<Arc<Partition>>, unit: usize) -> Pending<UnitValues> {
        let padded_len = partition.as_ref().map_or_else(|| own.range().len(), |partition| partition.padded_len(unit));
        let range = self.to.units()[unit].clone();
        let mut values = UnitValues::padded_scratch(&self.to, range, own.dtype(), padded_len);
        values.copy_part(own);
        self.zero.submit(move |group| {
            if let Some(partition) = partition {
                values.gather(group, partition.shares(unit));
            }
            values.refresh();
            values
        })
    }

    /// Exchanges over the ZeRO axis the values that each rank needs from the others' ranges.
    fn share(&self, needed: &[Vec<Piece>], own: &UnitValues, partition: &Partition, unit: usize) -> Pending<Flat> {
        let (cuts, rank) = (partition.cuts(unit), self.zero_rank);
        let (mine, start) = (&cuts[rank], own.range().start - partition.unit(unit).start);
        let from_here = |pieces: &[Piece]| -> Vec<Piece> {
            within(pieces, mine).into_iter().map(|piece| Piece { at: piece.at - start, ..piece }).collect()
        };
        let sends = needed.iter().enumerate().map(|(r, all)| if r == rank { vec![] } else { from_here(all) });
        let lens = cuts.iter().enumerate().map(|(r, cut)| if r == rank { 0 } else { len(&within(&needed[rank], cut)) });
        let (sends, lens): (Vec<_>, Vec<_>) = (sends.collect(), lens.collect());
        self.receives(lens.iter().sum());
        exchange(&self.zero, own.slice(), own.dtype(), &sends, &lens)
    }

    /// Exchanges over the tensor axis the values that each rank's new part needs from the others' old parts. `own` is
    /// this rank's.
    fn send(&self, unit: usize, own: Slice, dtype: DType) -> Pending<Flat> {
        let peers = self.all[self.zero_rank].iter().enumerate();
        let sends: Vec<Vec<Piece>> = peers
            .map(|(rank, to)| {
                let all = if rank == self.rank { Vec::new() } else { takes(&self.from, rank, to, unit, dtype) };
                all.iter().filter(|take| take.source == Some(self.rank)).map(|take| take.from).collect()
            })
            .collect();
        let all = self.takes(unit, dtype);
        let lens = (0..sends.len()).map(|rank| if rank == self.rank { 0 } else { len(&places(&all, rank)) });
        let lens: Vec<usize> = lens.collect();
        self.receives(lens.iter().sum());
        exchange(&self.tensor, own, dtype, &sends, &lens)
    }

    fn finish(&self, from: &Weights, own: &UnitValues, unit: usize, transfer: Transfer) -> Parts {
        let dtype = from.dtype();
        let came = match transfer {
            Transfer::Same(pending) => return Parts::Whole(pending.wait()),
            Transfer::Sent(pending) => return Parts::Of(None, pending.map(Pending::wait)),
            Transfer::Gathered(pending) => pending.wait(),
            Transfer::Shared(pending) => {
                let shared = pending.wait();
                let begins = &self.own_table().units()[unit];
                let mut part = Flat::weights(own.device(), dtype, begins.len());
                let mut place = part.all_mut();
                place.copy_from(own.slice(), &run(0, own), &run(own.range().start - begins.start, own));
                let needed = self.needed(self.zero_rank, unit, dtype);
                let cuts = self.partition(from, unit).expect("a shared unit has a partition").cuts(unit);
                let mut start = 0;
                for (_, cut) in cuts.iter().enumerate().filter(|(rank, _)| *rank != self.zero_rank) {
                    let pieces = within(&needed, cut);
                    unpack(&pieces, shared.all().part(start..start + len(&pieces)), &mut place);
                    start += len(&pieces);
                }
                part
            }
        };
        let others = (self.from.len() > 1).then(|| self.send(unit, came.all(), dtype).wait());
        Parts::Of(Some(came), others)
    }

    /// Assembles the new part of a unit from this rank's old part and the values of others.
    fn put_together(&self, unit: usize, own: Slice, others: Option<&Flat>, dtype: DType) -> UnitValues {
        let mut out = UnitValues::scratch(&self.to, unit, dtype);
        let range = out.range();
        let mut place = out.slice_mut();
        for (id, part) in self.to.parts(&range) {
            let (spec, at) = (self.to.spec(id), part.start - range.start);
            // In panels the padding lies between values.
            let values = if spec.layout == Layout::Row { spec.elements() } else { 0 };
            if spec.len > spec.elements() {
                place.reborrow().part(at + values..at + spec.len).clear();
            }
        }
        let all = self.takes(unit, dtype);
        for take in all.iter().filter(|take| take.source == Some(self.rank)) {
            place.copy_from(own, &take.from, &take.to);
        }
        let mut start = 0;
        for source in (0..self.from.len()).filter(|source| *source != self.rank) {
            let pieces = places(&all, source);
            if let Some(others) = others {
                unpack(&pieces, others.all().part(start..start + len(&pieces)), &mut place);
            }
            start += len(&pieces);
        }
        // A copy comes after its original.
        for Take { from, to, .. } in all.iter().filter(|take| take.source.is_none()) {
            let (before, mut behind) = place.split_at(to.at);
            behind.copy_from(before.as_slice(), from, &Piece { at: 0, ..*to });
        }
        out.refresh();
        out
    }
}

/// The piece with all of a rank's values, from `at` on.
fn run(at: usize, values: &UnitValues) -> Piece {
    Piece::run(at, values.range().len())
}

/// Starts to send each rank its pieces of `from`, and to receive `lens[r]` values from each rank r, end to end. Pieces
/// that several ranks get are packed once.
fn exchange(stream: &Stream, from: Slice, dtype: DType, sends: &[Vec<Piece>], lens: &[usize]) -> Pending<Flat> {
    let mut packed: Vec<(&[Piece], Range<usize>)> = Vec::new();
    let mut end = 0;
    let mut to = Vec::with_capacity(sends.len());
    for pieces in sends {
        let known = packed.iter().find(|(other, _)| *other == &pieces[..]).map(|(_, range)| range.clone());
        to.push(known.unwrap_or_else(|| {
            let range = end..end + len(pieces);
            end = range.end;
            packed.push((pieces, range.clone()));
            range
        }));
    }
    let mut send = Flat::weights(from.device(), dtype, end);
    for (pieces, range) in packed {
        pack(pieces, from, &mut send.all_mut().part(range));
    }
    let mut end = 0;
    let begins = lens.iter().map(|len| {
        end += len;
        end - len..end
    });
    let places: Vec<Range<usize>> = begins.collect();
    let mut receive = Flat::weights(from.device(), dtype, end);
    stream.submit(move |group| {
        group.slice_to_all(send.all(), &to, receive.all_mut(), &places);
        receive
    })
}

/// The places in the new part of the values that `source` sends.
fn places(takes: &[Take], source: usize) -> Vec<Piece> {
    takes.iter().filter(|take| take.source == Some(source)).map(|take| take.to).collect()
}
