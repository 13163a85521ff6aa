//! Values that ranks send to each other when a run starts: each rank knows what all others send, so that it knows every result
//! to the bit.
//!
//! They are whole numbers below 256 times powers of two, exact in bf16. They differ between ranks, places and calls: what comes
//! from another rank, from another place or from the call before is seen. Their scales are so far apart that f32 rounds their
//! sums, and at about every tenth place the order of a sum of four ranks shows; where any order will do, all scales are one and
//! sums are exact.

use crate::config::optim::GradientOrder;
use crate::dtype::DType;
use std::ops::Range;

/// What stands in a buffer before a call: no value of a pattern.
pub(super) const STALE: f32 = 2_097_152.0;
/// Values repeat after a prime, so that no chunk of a power of two can stand for another.
const PERIOD: usize = 4093;
/// From call to call the values move on by as many places.
const PLACES_A_CALL: usize = 611;
const SCALES: [f32; 4] = [1.0 / 4096.0, 1.0 / 64.0, 64.0, 4096.0];

/// The values of all ranks of a group.
pub(super) struct Pattern {
    /// By rank, one period.
    of_ranks: Vec<Vec<f32>>,
}

/// Where a value of a result comes from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Source {
    /// Place `at` of what `rank` sent.
    Rank { rank: usize, at: usize },
    /// The sum over ranks in rank order, of the same place.
    InOrder,
    /// The same as the binary tree over ranks.
    Tree,
}

impl Source {
    pub fn of(order: GradientOrder) -> Self {
        match order {
            // Whole numbers: every order gives the same.
            GradientOrder::Fast => Self::InOrder,
            GradientOrder::Fixed => Self::Tree,
        }
    }
}

impl Pattern {
    /// Of `ranks` ranks; `is_whole`: of one scale.
    pub fn new(ranks: usize, is_whole: bool) -> Self {
        let value = |rank: usize, j: usize| {
            let mixed = (j as u32).wrapping_mul(0x9E37_79B1) ^ (rank as u32 + 1).wrapping_mul(0x85EB_CA6B);
            let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(0xC2B2_AE35);
            let size = ((mixed >> 20) % 251 + 1) as f32;
            let scale = if is_whole { 1.0 } else { SCALES[(mixed >> 8) as usize % SCALES.len()] };
            if mixed & 1 == 0 { size * scale } else { -size * scale }
        };
        Self { of_ranks: (0..ranks).map(|rank| (0..PERIOD).map(|j| value(rank, j)).collect()).collect() }
    }

    /// What `rank` sends in `call` from its places `range`.
    pub fn run(&self, rank: usize, call: usize, range: Range<usize>) -> Vec<f32> {
        run(&self.of_ranks[rank], call, range)
    }

    /// What comes of `source` at places `range` of a result; sums are rounded once where it is bf16.
    pub fn wanted(&self, source: &Source, dtype: DType, call: usize, range: Range<usize>) -> Vec<f32> {
        let rounded = |x: f32| if dtype == DType::Bf16 { half::bf16::from_f32(x).to_f32() } else { x };
        let summed = |sum: &dyn Fn(usize) -> f32| {
            let period: Vec<f32> = (0..PERIOD).map(|j| rounded(sum(j))).collect();
            run(&period, call, range.clone())
        };
        match source {
            Source::Rank { rank, at } => self.run(*rank, call, *at..*at + range.len()),
            Source::InOrder => summed(&|j| self.of_ranks.iter().map(|values| values[j]).fold(-0.0, |a, b| a + b)),
            Source::Tree => summed(&|j| self.tree(0..self.of_ranks.len(), j)),
        }
    }

    fn tree(&self, ranks: Range<usize>, j: usize) -> f32 {
        if ranks.len() == 1 {
            return self.of_ranks[ranks.start][j];
        }
        let middle = ranks.start + ranks.len() / 2;
        self.tree(ranks.start..middle, j) + self.tree(middle..ranks.end, j)
    }

    /// The ranks whose values in `call` from place `at` on are `got`.
    pub fn senders(&self, got: &[f32], call: usize, at: usize) -> Vec<usize> {
        let sent = |rank: &usize| self.run(*rank, call, at..at + got.len()) == got;
        (0..self.of_ranks.len()).filter(sent).collect()
    }
}

fn run(period: &[f32], call: usize, range: Range<usize>) -> Vec<f32> {
    let mut values = Vec::with_capacity(range.len());
    let mut place = (call * PLACES_A_CALL + range.start) % period.len();
    while values.len() < range.len() {
        let part = (period.len() - place).min(range.len() - values.len());
        values.extend_from_slice(&period[place..place + part]);
        place = 0;
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_exact_in_bf16_and_differ_between_ranks_places_and_calls() {
        let pattern = Pattern::new(3, false);
        let values = pattern.run(1, 5, 0..9000);
        assert!(values.iter().all(|x| half::bf16::from_f32(*x).to_f32() == *x && *x != STALE && *x != 0.0));
        for other in [pattern.run(2, 5, 0..9000), pattern.run(1, 6, 0..9000), pattern.run(1, 5, 4096..13096)] {
            let same = other.iter().zip(&values).filter(|(a, b)| a == b).count();
            assert!(same < 100, "{same} of 9000 values are the same");
        }
        assert_eq!(pattern.senders(&values[40..48], 5, 40), [1]);
        assert_eq!(pattern.senders(&values[40..48], 6, 40), [0usize; 0]);
    }

    #[test]
    fn the_order_of_a_sum_shows_unless_values_are_whole() {
        for (is_whole, least, most) in [(false, 300, PERIOD), (true, 0, 0)] {
            let pattern = Pattern::new(4, is_whole);
            let [a, b] =
                [Source::InOrder, Source::Tree].map(|source| pattern.wanted(&source, DType::F32, 3, 0..PERIOD));
            let other = a.iter().zip(&b).filter(|(a, b)| a != b).count();
            assert!((least..=most).contains(&other), "{other} sums differ, whole: {is_whole}");
        }
    }

    #[test]
    fn what_is_wanted_at_a_place_does_not_depend_on_where_a_range_begins() {
        let pattern = Pattern::new(2, false);
        for source in [Source::InOrder, Source::Tree, Source::Rank { rank: 1, at: 0 }] {
            let all = pattern.wanted(&source, DType::Bf16, 7, 0..10_000);
            let later = match source {
                Source::Rank { rank, .. } => Source::Rank { rank, at: 5000 },
                other => other,
            };
            assert_eq!(pattern.wanted(&later, DType::Bf16, 7, 5000..6000), all[5000..6000]);
        }
    }
}
