//! Units on their way into another layout from GPU to GPU: first over the ranks that ZeRO shards over, then over those that share
//! matrices, each axis as its GPUs are joined (through the host where they are not). Values are packed and put in place by
//! copies within the GPU. What is sent is what the others lack: over the axis of ZeRO what any rank of the receiver's tensor
//! axis needs of the part that both hold, over the tensor axis what the receiver itself needs.

use super::moves::{Piece, Take, copied, len, pack, takes, union, unpack, within};
use super::params::{ParamSpec, ParamTable};
use super::partition::Partition;
use super::reshard::{Reshard, behind};
use super::unit::UnitValues;
use super::weights::Weights;
use crate::comm::{Axes, Pending, Stream};
use crate::device::cuda::{Memory, View};
use crate::tensor::DType;
use std::ops::Range;
use std::sync::Arc;

/// What ranks of training's mesh become in the rollout's, and the ways between them.
#[derive(Debug)]
pub(super) struct Cuda {
    pub zero: Stream,
    tensor: Stream,
    /// This rank among those that ZeRO shards over.
    rank: usize,
    /// The new part of each rank: by its rank on the axis of ZeRO, and on the tensor axis.
    to: Vec<Vec<Arc<ParamTable>>>,
}

/// A unit on its way.
pub(super) enum Coming<'a> {
    /// All of this rank's old part.
    Gathered(Pending<Memory>),
    /// What this rank's tensor axis needs of its old part, without its own range of it.
    Shared(Pending<Memory>, &'a UnitValues, Arc<Partition>),
    /// What the new part needs of the other old ones; here is all of this rank's.
    Sent(Pending<Memory>, &'a UnitValues),
}

/// What a new part is put together from.
pub(super) struct Parts<'a> {
    /// What is needed of this rank's old part, where it lies in that.
    own: Own<'a>,
    /// What is needed of others, end to end.
    others: Option<Memory>,
}

enum Own<'a> {
    Here(&'a UnitValues),
    Came(Memory),
}

impl<'a> Parts<'a> {
    /// All of it is here.
    pub fn here(values: &'a UnitValues) -> Self {
        Self { own: Own::Here(values), others: None }
    }

    fn own(&self) -> View<'_> {
        match &self.own {
            Own::Here(values) => values.cuda(),
            Own::Came(memory) => memory.view(DType::Bf16),
        }
    }
}

impl Cuda {
    /// `rank` is that of this rank's new part, `part` makes the table of one. All ranks of `axes` call this.
    pub fn new(axes: &Axes, rank: usize, part: impl Fn(usize) -> Arc<ParamTable>) -> Self {
        let beside = axes.tensor.all_gather_f64(&[rank as f64]).concat();
        let all = axes.zero.all_gather_f64(&beside);
        let mut known: Vec<(usize, Arc<ParamTable>)> = Vec::new();
        let mut table = |rank: f64| {
            let rank = rank as usize;
            if let Some((_, table)) = known.iter().find(|(other, _)| *other == rank) {
                return table.clone();
            }
            known.push((rank, part(rank)));
            known[known.len() - 1].1.clone()
        };
        let to = all.into_iter().map(|ranks| ranks.into_iter().map(&mut table).collect()).collect();
        let stream = |group| Stream::new("reshard", &[group]);
        Self { zero: stream(&axes.zero), tensor: stream(&axes.tensor), rank: axes.zero.rank(), to }
    }

    /// What rank `zero` of its axis, with all of its tensor axis, needs of this rank's old part.
    fn needed(&self, reshard: &Reshard, zero: usize, unit: usize) -> Vec<Piece> {
        let of = |(rank, to): (usize, &Arc<ParamTable>)| takes(&reshard.from, rank, to, unit);
        let all = self.to[zero].iter().enumerate().flat_map(of);
        let mine = all.filter(|take| take.source == Some(reshard.rank)).map(|take| take.from);
        union(&reshard.from[reshard.rank], unit, mine.collect())
    }

    /// The same of all ranks; none where each needs all of it, so that it is gathered in place.
    fn all_needed(&self, reshard: &Reshard, unit: usize) -> Option<Vec<Vec<Piece>>> {
        let all: Vec<Vec<Piece>> = (0..self.to.len()).map(|zero| self.needed(reshard, zero, unit)).collect();
        let table = &reshard.from[reshard.rank];
        let begins = &table.units()[unit];
        let specs = table.specs().iter().filter(|spec| begins.contains(&spec.offset));
        let whole: usize = specs.map(ParamSpec::elements).sum();
        all.iter().any(|needed| len(needed) < whole).then_some(all)
    }

    /// Elements of a unit that come from other ranks.
    pub fn received(&self, reshard: &Reshard, from: &Weights, unit: usize) -> usize {
        let others = |take: &Take| take.source.is_some_and(|source| source != reshard.rank);
        let sent = reshard.takes(unit).iter().filter(|take| others(take)).map(|take| take.to.len()).sum::<usize>();
        let Some(partition) = from.partition() else { return sent };
        let own = partition.own_cut(unit);
        let table = &reshard.from[reshard.rank];
        let shared = match self.all_needed(reshard, unit) {
            Some(needed) => len(&needed[self.rank]) - len(&within(&needed[self.rank], &own)),
            None => table.units()[unit].len() - own.len(),
        };
        sent + shared
    }

    /// Starts to bring here what is needed of a unit.
    pub fn start<'a>(&self, reshard: &Reshard, from: &'a Weights, unit: usize) -> Coming<'a> {
        let own = from.local(unit);
        let Some(partition) = from.partition().cloned() else {
            return Coming::Sent(self.send(reshard, unit, own.cuda()), own);
        };
        if let Some(needed) = self.all_needed(reshard, unit) {
            return Coming::Shared(self.share(&needed, own, &partition, unit), own, partition);
        }
        let mut all = Memory::scratch(reshard.from[reshard.rank].units()[unit].len() * DType::Bf16.bytes());
        all.view_mut(DType::Bf16).part(partition.own_cut(unit)).copy_from(own.cuda());
        let cuts = behind(0, &partition, unit);
        Coming::Gathered(self.zero.submit(move |groups| {
            groups[0].gather_weights(&mut all, &cuts);
            all
        }))
    }

    /// Over the axis of ZeRO: what each rank needs of the others' ranges.
    fn share(&self, needed: &[Vec<Piece>], own: &UnitValues, partition: &Partition, unit: usize) -> Pending<Memory> {
        let cuts = partition.cuts(unit);
        let mine = &cuts[self.rank];
        let from_here = |pieces: &[Piece]| -> Vec<Piece> {
            within(pieces, mine).into_iter().map(|piece| Piece { at: piece.at - mine.start, ..piece }).collect()
        };
        let nothing = |rank: usize| rank == self.rank;
        let sends = needed.iter().enumerate().map(|(r, all)| if nothing(r) { vec![] } else { from_here(all) });
        let lens =
            cuts.iter().enumerate().map(|(r, cut)| if nothing(r) { 0 } else { len(&within(&needed[self.rank], cut)) });
        exchange(&self.zero, own.cuda(), &sends.collect::<Vec<_>>(), &lens.collect::<Vec<_>>())
    }

    /// Over the tensor axis: what each rank's new part needs of the others' old ones. `own` is this rank's.
    fn send(&self, reshard: &Reshard, unit: usize, own: View) -> Pending<Memory> {
        let beside = self.to[self.rank].iter().enumerate();
        let sends: Vec<Vec<Piece>> = beside
            .map(|(rank, to)| {
                let all = if rank == reshard.rank { Vec::new() } else { takes(&reshard.from, rank, to, unit) };
                all.iter().filter(|take| take.source == Some(reshard.rank)).map(|take| take.from).collect()
            })
            .collect();
        let all = reshard.takes(unit);
        let lens = (0..sends.len()).map(|rank| if rank == reshard.rank { 0 } else { len(&places(&all, rank)) });
        exchange(&self.tensor, own, &sends, &lens.collect::<Vec<_>>())
    }
}

/// Starts to send each rank its pieces of `from`, and to receive as many values of each: they come end to end. Ranks that get the
/// same get it from one place.
fn exchange(stream: &Stream, from: View, sends: &[Vec<Piece>], lens: &[usize]) -> Pending<Memory> {
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
    let mut send = Memory::scratch(end * DType::Bf16.bytes());
    for (pieces, range) in packed {
        pack(pieces, from, &mut send.view_mut(DType::Bf16).part(range));
    }
    let mut received = 0;
    let begins = lens.iter().map(|len| {
        received += len;
        received - len..received
    });
    let places: Vec<Range<usize>> = begins.collect();
    let mut receive = Memory::scratch(received * DType::Bf16.bytes());
    stream.submit(move |groups| {
        groups[0].weights_to_all(&send, &to, &mut receive, &places);
        receive
    })
}

/// Where the new part has what `source` sends.
fn places(takes: &[Take], source: usize) -> Vec<Piece> {
    takes.iter().filter(|take| take.source == Some(source)).map(|take| take.to).collect()
}

impl<'a> Coming<'a> {
    pub fn arrive(self, reshard: &Reshard, unit: usize) -> Parts<'a> {
        let cuda = reshard.cuda();
        let came = match self {
            Self::Sent(pending, own) => return Parts { own: Own::Here(own), others: Some(pending.wait()) },
            Self::Gathered(pending) => pending.wait(),
            Self::Shared(pending, own, partition) => {
                let shared = pending.wait();
                let table = &reshard.from[reshard.rank];
                let begins = table.units()[unit].start;
                let mut part = Memory::scratch(table.units()[unit].len() * DType::Bf16.bytes());
                let mut place = part.view_mut(DType::Bf16);
                let mine = own.range();
                place.reborrow().part(mine.start - begins..mine.end - begins).copy_from(own.cuda());
                let needed = cuda.needed(reshard, cuda.rank, unit);
                let mut start = 0;
                for (_, cut) in partition.cuts(unit).iter().enumerate().filter(|(rank, _)| *rank != cuda.rank) {
                    let pieces = within(&needed, cut);
                    let values = shared.view(DType::Bf16).part(start..start + len(&pieces));
                    unpack(&pieces, values, &mut place);
                    start += len(&pieces);
                }
                part
            }
        };
        let others = (reshard.from.len() > 1).then(|| cuda.send(reshard, unit, came.view(DType::Bf16)).wait());
        Parts { own: Own::Came(came), others }
    }
}

impl Reshard {
    fn cuda(&self) -> &Cuda {
        self.cuda.as_ref().expect("the model is on a GPU")
    }

    /// What this rank's new part of a unit takes.
    fn takes(&self, unit: usize) -> Vec<Take> {
        takes(&self.from, self.rank, &self.to, unit)
    }

    /// The new part of a unit, on the GPU.
    pub(super) fn put_together(&self, unit: usize, parts: &Parts) -> UnitValues {
        let mut out = UnitValues::scratch(&self.to, unit, DType::Bf16);
        let range = out.range();
        let mut place = out.cuda_at_mut(&range);
        for spec in self.to.specs().iter().filter(|spec| range.contains(&spec.offset)) {
            let at = spec.offset - range.start;
            place.reborrow().part(at + spec.elements()..at + spec.len).clear();
        }
        let all = self.takes(unit);
        all.iter().filter(|take| take.source == Some(self.rank)).for_each(|take| {
            copied(&take.from, parts.own(), &take.to, &mut place);
        });
        let mut start = 0;
        for source in (0..self.from.len()).filter(|source| *source != self.rank) {
            let pieces = places(&all, source);
            if let Some(others) = &parts.others {
                unpack(&pieces, others.view(DType::Bf16).part(start..start + len(&pieces)), &mut place);
            }
            start += len(&pieces);
        }
        // What is there twice comes behind what it is a copy of.
        for Take { from, to, .. } in all.iter().filter(|take| take.source.is_none()) {
            let (before, mut behind) = place.split_at(to.at);
            copied(from, before.as_view(), &Piece { at: 0, ..*to }, &mut behind);
        }
        out
    }
}
