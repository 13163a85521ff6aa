//! Shards the units of a parameter table over the ranks of the ZeRO axis (arXiv:1910.02054).

use crate::comm::{Axes, Stream};
use crate::model::params::ParamTable;
use crate::model::stages::Place;
use std::ops::Range;
use std::sync::Arc;

/// Ranges of ranks are cut at multiples of this many elements from the start of their unit. The gradient norm is summed
/// in blocks of the same size, so no block is split and the norm does not depend on the number of ranks.
pub const BLOCK: usize = 4096;

/// One range per rank of every unit. The ranks that share memory of a unit pad it to the same number of whole blocks for
/// each, so that collectives have equal shares. A rank's range is its share without the padding. The flat vector has no
/// padding: checkpoints do not depend on the number of ranks.
///
/// All ranks share a unit, in rank order. On an expert axis of X ranks, those with the same rank on it share its part of
/// a unit of experts, which is one of X equal parts. On a pipeline axis a rank has nothing of the units of other stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    rank: usize,
    ranks: usize,
    units: Vec<Part>,
    own_len: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    /// The unit in the flat vector.
    flat: Range<usize>,
    /// The part of the unit that this rank shares with others, counted from the unit's start.
    held: Range<usize>,
    /// The share of each rank that shares with this one in the padded memory of `held`, counted from its start.
    shares: Vec<Range<usize>>,
    /// The range of each rank, counted from the unit's start: its share without the padding.
    cuts: Vec<Range<usize>>,
    /// The start of this rank's range among its ranges laid end to end.
    at: usize,
    place: Place,
}

impl Partition {
    /// `units` cover a flat vector in order.
    pub fn new(units: &[Range<usize>], rank: usize, ranks: usize) -> Self {
        Self::with_experts(units, &vec![false; units.len()], rank, ranks, 1)
    }

    /// The same, with an expert axis of `axis` ranks, which divides the units of experts. Neighbours differ on it.
    pub fn with_experts(units: &[Range<usize>], of_experts: &[bool], rank: usize, ranks: usize, axis: usize) -> Self {
        assert!(rank < ranks && ranks.is_multiple_of(axis), "rank {rank} of {ranks}, {axis} of them for experts");
        let mut own_len = 0;
        let mut parts = Vec::with_capacity(units.len());
        for (unit, of_experts) in units.iter().zip(of_experts) {
            let parts_of = if *of_experts { axis } else { 1 };
            let (len, sharing) = (unit.len() / parts_of, ranks / parts_of);
            assert!(unit.len().is_multiple_of(parts_of), "{} elements for {axis} ranks of experts", unit.len());
            // A rank alone has nothing to share, and pads nothing.
            let each = if sharing == 1 { len } else { len.div_ceil(BLOCK).div_ceil(sharing) * BLOCK };
            let shares: Vec<Range<usize>> = (0..sharing).map(|r| r * each..(r + 1) * each).collect();
            let cut = |rank: usize| {
                let (start, share) = (rank % parts_of * len, &shares[rank / parts_of]);
                start + share.start.min(len)..start + share.end.min(len)
            };
            let cuts: Vec<Range<usize>> = (0..ranks).map(cut).collect();
            let held = rank % parts_of * len..(rank % parts_of + 1) * len;
            let at = own_len;
            own_len += cuts[rank].len();
            parts.push(Part { flat: unit.clone(), held, at, shares, cuts, place: Place::Here });
        }
        Self { rank, ranks, units: parts, own_len }
    }

    /// A partition with everything on this rank.
    pub fn whole(units: &[Range<usize>]) -> Self {
        Self::new(units, 0, 1)
    }

    /// The same on a stage of a pipeline, with the place of each unit.
    #[must_use]
    pub fn on_stage(mut self, places: &[Place]) -> Self {
        self.own_len = 0;
        for (part, place) in self.units.iter_mut().zip(places) {
            (part.place, part.at) = (*place, self.own_len);
            self.own_len += if *place == Place::Away { 0 } else { part.cuts[self.rank].len() };
        }
        self
    }

    /// Whether this rank's stage has the unit.
    pub fn is_here(&self, unit: usize) -> bool {
        self.units[unit].place != Place::Away
    }

    /// Whether this rank's stage counts and saves the unit: it has it, and not as a copy.
    pub fn is_counted(&self, unit: usize) -> bool {
        self.units[unit].place == Place::Here
    }

    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The number of different parts of the unit that ranks hold: 1, or that of ranks of an expert axis.
    pub fn parts(&self, unit: usize) -> usize {
        self.ranks / self.units[unit].shares.len()
    }

    /// This rank's place among the ranks that share its part of the unit, and their number.
    pub fn sharing(&self, unit: usize) -> [usize; 2] {
        [self.rank / self.parts(unit), self.units[unit].shares.len()]
    }

    /// The number of units.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// The number of elements in this rank's ranges.
    pub fn own_len(&self) -> usize {
        self.own_len
    }

    /// The unit's range of the flat vector.
    pub fn unit(&self, unit: usize) -> Range<usize> {
        self.units[unit].flat.clone()
    }

    /// Whether ranks hold different parts of the unit: experts on an expert axis.
    pub fn is_divided(&self, unit: usize) -> bool {
        self.parts(unit) > 1
    }

    /// The part of the unit that this rank shares with others, in the flat vector.
    pub fn shared(&self, unit: usize) -> Range<usize> {
        let Part { flat, held, .. } = &self.units[unit];
        let end = if self.is_here(unit) { held.end } else { held.start };
        flat.start + held.start..flat.start + end
    }

    /// The share of each rank that shares with this one, counted from the start of `shared`, for collectives over its
    /// memory. All are equally long.
    pub fn shares(&self, unit: usize) -> &[Range<usize>] {
        &self.units[unit].shares
    }

    /// The number of elements of the memory of `shared`, padding included.
    pub fn padded_len(&self, unit: usize) -> usize {
        if !self.is_here(unit) {
            return 0;
        }
        self.units[unit].shares.last().map_or(0, |share| share.end)
    }

    /// This rank's range, counted from the start of `shared`.
    pub fn own_share(&self, unit: usize) -> Range<usize> {
        let (cut, start) = (self.own_cut(unit), self.units[unit].held.start);
        cut.start - start..cut.end - start
    }

    /// The range of each rank of the unit's stage, counted from the unit's start.
    pub fn cuts(&self, unit: usize) -> &[Range<usize>] {
        &self.units[unit].cuts
    }

    /// This rank's range, counted from the unit's start.
    pub fn own_cut(&self, unit: usize) -> Range<usize> {
        let Part { cuts, held, .. } = &self.units[unit];
        if self.is_here(unit) { cuts[self.rank].clone() } else { held.start..held.start }
    }

    /// This rank's range of the flat vector.
    pub fn own(&self, unit: usize) -> Range<usize> {
        let (part, cut) = (&self.units[unit], self.own_cut(unit));
        part.flat.start + cut.start..part.flat.start + cut.end
    }

    /// The position of `own(unit)` among this rank's ranges laid end to end.
    pub fn held(&self, unit: usize) -> Range<usize> {
        let at = self.units[unit].at;
        at..at + self.own_cut(unit).len()
    }
}

/// The ZeRO sharding of a table: the partition over the ranks of `axes.zero`, and the streams of their collectives.
#[derive(Clone, Debug)]
pub struct Shards {
    stage: usize,
    /// The partition over all ranks of the axis, at every stage.
    pub partition: Arc<Partition>,
    /// The part that this rank's optimizer updates: its ranges, or everything at stage 0.
    pub updated: Arc<Partition>,
    pub streams: Streams,
}

/// The ranks that share a unit, in the background.
#[derive(Clone, Debug)]
pub struct Streams {
    /// All ranks of the ZeRO axis.
    pub all: Arc<Stream>,
    /// The ranks that hold the same experts.
    replicas: Arc<Stream>,
}

impl Streams {
    /// The stream of the ranks that share a unit.
    pub fn of(&self, partition: &Partition, unit: usize) -> &Arc<Stream> {
        if partition.is_divided(unit) { &self.replicas } else { &self.all }
    }
}

impl Shards {
    /// `stage` 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also weights. On one rank every stage is
    /// stage 0.
    ///
    /// # Panics
    /// At stage 0 on several ranks of an expert axis.
    pub fn new(table: &ParamTable, axes: &Axes, stage: usize) -> Self {
        assert!(stage <= 3, "ZeRO has stages 0 to 3, not {stage}");
        let stage = if axes.zero.size() == 1 { 0 } else { stage };
        let (of_experts, experts) = (table.units_of_experts(), axes.expert.size());
        assert!(stage > 0 || experts == 1, "stage 0 has no ranges, and an expert axis needs some");
        let [rank, ranks] = [axes.zero.rank(), axes.zero.size()];
        let places = table.places(axes.pipeline.rank(), axes.pipeline.size(), axes.chunks);
        let partition = Partition::with_experts(table.units(), of_experts, rank, ranks, experts).on_stage(&places);
        let partition = Arc::new(partition);
        let whole = || Arc::new(Partition::whole(table.units()).on_stage(&places));
        let updated = if stage == 0 { whole() } else { partition.clone() };
        let streams = Streams { all: axes.zero_stream.clone(), replicas: axes.replicas_stream.clone() };
        Self { stage, partition, updated, streams }
    }

    /// Whether this rank holds only a part of the unit's weights.
    pub fn is_part(&self, unit: usize) -> bool {
        self.weights() || self.partition.is_divided(unit)
    }

    /// The ZeRO stage; 0 on one rank.
    pub fn stage(&self) -> usize {
        self.stage
    }

    /// Whether each rank updates only its ranges.
    pub fn optimizer(&self) -> bool {
        self.stage >= 1
    }

    /// Whether each rank sums only the gradients of its ranges.
    pub fn gradients(&self) -> bool {
        self.stage >= 2
    }

    /// Whether each rank holds only the weights of its ranges.
    pub fn weights(&self) -> bool {
        self.stage == 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(lens: &[usize]) -> Vec<Range<usize>> {
        let mut end = 0;
        let next = |len: &usize| {
            end += len;
            end - len..end
        };
        lens.iter().map(next).collect()
    }

    #[test]
    fn ranges_cover_every_unit_once_in_whole_blocks_and_shards_have_equal_sizes() {
        let units = units(&[64, BLOCK - 64, BLOCK, BLOCK + 64, 10 * BLOCK + 128, 0, 7 * BLOCK]);
        for ranks in 1..6 {
            let all: Vec<Partition> = (0..ranks).map(|r| Partition::new(&units, r, ranks)).collect();
            let mut held = vec![0; ranks];
            for (u, unit) in units.iter().enumerate() {
                let mut end = 0;
                for (r, cut) in all[0].cuts(u).iter().enumerate() {
                    assert_eq!(cut.start, end);
                    assert!(cut.start.is_multiple_of(BLOCK) || cut.start == unit.len());
                    assert_eq!((all[r].own_cut(u), all[r].cuts(u)), (cut.clone(), all[0].cuts(u)));
                    assert_eq!(all[r].own(u), unit.start + cut.start..unit.start + cut.end);
                    assert_eq!(all[r].held(u), held[r]..held[r] + cut.len());
                    held[r] += cut.len();
                    end = cut.end;
                }
                assert_eq!(end, unit.len());
                let (shares, padded) = (all[0].shares(u), all[0].padded_len(u));
                let each = padded / ranks;
                assert!((0..ranks).all(|r| shares[r] == (r * each..(r + 1) * each)), "{ranks}: {shares:?}");
                assert!(unit.len() <= padded && padded < unit.len() + ranks * BLOCK, "{ranks}: unit {u}");
                assert!(ranks == 1 || each.is_multiple_of(BLOCK), "{ranks}: unit {u}");
            }
            assert_eq!(all.iter().map(Partition::own_len).collect::<Vec<_>>(), held);
        }
    }
}
