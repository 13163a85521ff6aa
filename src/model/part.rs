//! The part of each parameter that a rank of the tensor axis holds.
//!
//! With T ranks, rank r holds heads/T query heads, their key/value heads, an even share of the MLP's width and of the
//! vocabulary. A matrix is split by rows if its outputs are sharded, and by columns if its inputs are
//! (arXiv:1909.08053, section 3).

use crate::comm::Group;
use crate::tensor::PANEL;
use std::ops::Range;

/// The index of a tensor rank, and the number of tensor ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPart {
    pub rank: usize,
    pub size: usize,
}

impl TensorPart {
    /// The whole model on one rank.
    pub fn whole() -> Self {
        Self { rank: 0, size: 1 }
    }

    /// The part of a rank of the tensor axis.
    pub fn from_group(tensor: &Group) -> Self {
        Self { rank: tensor.rank(), size: tensor.size() }
    }

    /// This rank's share of 0..n. It is cut between panels if every rank gets at least two of them, else evenly.
    pub fn range(self, n: usize) -> Range<usize> {
        let unit = if n.div_ceil(PANEL) >= 2 * self.size { PANEL } else { 1 };
        let at = |rank: usize| (rank * n.div_ceil(unit) / self.size * unit).min(n);
        at(self.rank)..at(self.rank + 1)
    }

    /// The length of the longest `range` of any rank.
    pub fn widest(self, n: usize) -> usize {
        (0..self.size).map(|rank| Self { rank, ..self }.range(n).len()).max().unwrap_or(n)
    }
}

/// The division of a dim of a tensor among the ranks of the tensor axis, with its sizes. A vector has one dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Heads of `head_dim` elements, one for every `group` of the `queries` query heads. Each rank has equally many
    /// query heads, and the heads that they use.
    Heads { queries: usize, group: usize, head_dim: usize },
    /// All `size` elements of one of `heads` query heads, which are on the rank that has the head.
    OfHead { heads: usize, head: usize, size: usize },
    /// Even shares (`TensorPart::range`).
    Even(usize),
    /// Even shares of the vocabulary.
    Vocabulary(usize),
    /// Not divided: every rank holds all of it.
    Whole(usize),
}

impl Cut {
    /// The size in the whole model.
    pub fn size(self) -> usize {
        match self {
            Self::Heads { queries, group, head_dim } => queries / group * head_dim,
            Self::OfHead { size: n, .. } | Self::Even(n) | Self::Vocabulary(n) | Self::Whole(n) => n,
        }
    }

    /// The global index of each local head. With hl local query heads and G query heads per head, g = gcd(hl, G) query
    /// heads share a local one: local head i is head (r hl + i g) / G. So every head has exactly G / g copies over all
    /// ranks. One rank may hold two of them. Other cuts have no heads.
    pub fn heads(self, part: TensorPart) -> Vec<usize> {
        let Self::Heads { queries, group, .. } = self else { return Vec::new() };
        let local = queries / part.size;
        let shared = gcd(local, group);
        (0..local / shared).map(|i| (part.rank * local + i * shared) / group).collect()
    }

    /// The ranges that a rank holds, in its order.
    pub fn held(self, part: TensorPart) -> Vec<Range<usize>> {
        match self {
            Self::Even(n) | Self::Vocabulary(n) => vec![part.range(n)],
            Self::Whole(n) => vec![TensorPart::whole().range(n)],
            Self::OfHead { heads, head, size } => {
                let is_own = head / (heads / part.size) == part.rank;
                is_own.then(|| TensorPart::whole().range(size)).into_iter().collect()
            }
            Self::Heads { head_dim: e, .. } => {
                let mut held: Vec<Range<usize>> = Vec::new();
                for head in self.heads(part) {
                    match held.last_mut() {
                        Some(last) if last.end == head * e => last.end += e,
                        _ => held.push(head * e..(head + 1) * e),
                    }
                }
                held
            }
        }
    }

    /// The number of elements that a rank holds.
    pub fn len(self, part: TensorPart) -> usize {
        self.held(part).iter().map(Range::len).sum()
    }

    /// The number of copies of each element over all `size` ranks.
    pub fn copies(self, size: usize) -> usize {
        match self {
            Self::Heads { queries, group, .. } => group / gcd(queries / size, group),
            Self::OfHead { .. } | Self::Even(_) | Self::Vocabulary(_) => 1,
            Self::Whole(_) => size,
        }
    }
}

pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_query_head_has_its_key_head_and_all_key_heads_have_equally_many_copies() {
        for (heads, kv_heads) in [(12, 3), (8, 1), (8, 2), (8, 8), (32, 8), (28, 4), (6, 3), (12, 12)] {
            let cut = |group| Cut::Heads { queries: heads, group, head_dim: 8 };
            let (queries, keys) = (cut(1), cut(heads / kv_heads));
            for size in (1..=heads).filter(|&size| heads.is_multiple_of(size)) {
                let mut held = vec![0; kv_heads];
                for rank in 0..size {
                    let part = TensorPart { rank, size };
                    let (local, kv) = (queries.heads(part), keys.heads(part));
                    for &head in &kv {
                        held[head] += 1;
                    }
                    let sharing = local.len() / kv.len();
                    for (i, head) in local.into_iter().enumerate() {
                        assert_eq!(
                            kv[i / sharing],
                            head / (heads / kv_heads),
                            "{heads}/{kv_heads}, rank {rank} of {size}"
                        );
                    }
                }
                let copies = keys.copies(size);
                assert_eq!(held, vec![copies; kv_heads], "{heads}/{kv_heads} over {size}");
            }
        }
    }

    #[test]
    fn shards_cover_everything_and_begin_at_panels_if_there_are_enough() {
        for n in [1, 7, 32, 50, 64, 100, 257, 1000, 32_000, 151_936] {
            for size in [1, 2, 3, 4, 8] {
                let mut end = 0;
                for rank in 0..size {
                    let part = TensorPart { rank, size };
                    let range = part.range(n);
                    assert_eq!(range.start, end);
                    assert!(n < 64 * size || range.start.is_multiple_of(PANEL), "{n} over {size}");
                    assert!(range.len() <= part.widest(n) && (n < size || !range.is_empty()));
                    end = range.end;
                }
                assert_eq!(end, n);
            }
        }
    }
}
