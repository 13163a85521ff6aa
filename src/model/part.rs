//! The part of each parameter that a rank of the tensor axis holds, derived from the architecture alone.
//!
//! With T ranks, rank r holds heads/T query heads, their key/value heads, an even share of the MLP's width and of the
//! vocabulary. A matrix is split by rows if its outputs are sharded, and by columns if its inputs are
//! (arXiv:1909.08053, section 3).

use super::arch::Arch;
use crate::comm::Group;
use crate::error::{Error, Result};
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

    /// The part of the rank, among `size`, with the largest share of a model's matrices.
    pub fn fullest(arch: &Arch, size: usize) -> Self {
        let share = |part: &Self| part.range(arch.mlp_width).len() * arch.layers + part.range(arch.vocabulary).len();
        (0..size).map(|rank| Self { rank, size }).max_by_key(share).unwrap_or_else(Self::whole)
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

    /// This rank's query heads.
    pub fn heads(self, arch: &Arch) -> Range<usize> {
        let local = arch.heads / self.size;
        self.rank * local..(self.rank + 1) * local
    }

    /// The global index of each local key/value head. With hl local query heads and G query heads per key/value head,
    /// g = gcd(hl, G) query heads share a local one: local head i is head (r hl + i g) / G. So every head has exactly
    /// G / g copies over all ranks. One rank may hold two of them.
    pub fn kv_heads(self, arch: &Arch) -> Vec<usize> {
        let (heads, group) = (self.heads(arch), arch.heads / arch.kv_heads);
        let shared = gcd(heads.len(), group);
        (0..heads.len() / shared).map(|i| (heads.start + i * shared) / group).collect()
    }

    /// The number of copies of each key/value head.
    pub fn kv_copies(self, arch: &Arch) -> usize {
        let group = arch.heads / arch.kv_heads;
        group / gcd(arch.heads / self.size, group)
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Arch {
    /// The sizes of the tensor axis that this architecture allows, ascending.
    pub fn tensor_sizes(&self) -> Vec<usize> {
        let most = self.heads.min(self.vocabulary).min(self.mlp_width);
        (1..=most).filter(|&size| self.heads.is_multiple_of(size)).collect()
    }

    /// Rejects a size of the tensor axis that this architecture does not allow.
    ///
    /// # Errors
    /// `Usage`, naming the allowed sizes.
    pub fn check_tensor(&self, size: usize) -> Result<()> {
        self.check_tensor_where(size, |_| true)
    }

    /// The same. The hint names only the allowed sizes that are also `possible`.
    ///
    /// # Errors
    /// The errors of `check_tensor`.
    pub fn check_tensor_where(&self, size: usize, possible: impl Fn(usize) -> bool) -> Result<()> {
        let mut works = self.tensor_sizes();
        if works.contains(&size) {
            return Ok(());
        }
        works.retain(|&size| possible(size));
        let Self { heads, vocabulary, mlp_width, .. } = self;
        let message = if size == 0 || !heads.is_multiple_of(size) {
            format!("tensor = {size} does not divide the model's {heads} attention heads")
        } else {
            format!("tensor = {size} is larger than the model's vocabulary ({vocabulary}) or MLP width ({mlp_width})")
        };
        let any_of = if works.len() == 1 { "" } else { "one of " };
        let works: Vec<String> = works.iter().map(usize::to_string).collect();
        Err(Error::usage(message).hint(format!("set tensor to {any_of}{}", works.join(", "))))
    }
}

/// The meaning of a matrix's rows or columns. The elements of a vector count as rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dim {
    Heads,
    KvHeads,
    Mlp,
    Vocabulary,
    /// The hidden state, or another dim that is never sharded, with this size.
    Whole(usize),
}

impl Dim {
    /// The size in the whole model, and the ranges that a rank holds, in its order.
    pub(super) fn held(self, arch: &Arch, part: TensorPart) -> (usize, Vec<Range<usize>>) {
        let e = arch.head_dim;
        let (whole, held) = match self {
            Self::Heads => (arch.q_width(), part.heads(arch).start * e..part.heads(arch).end * e),
            Self::Mlp => (arch.mlp_width, part.range(arch.mlp_width)),
            Self::Vocabulary => (arch.vocabulary, part.range(arch.vocabulary)),
            Self::Whole(n) => (n, 0..n),
            Self::KvHeads => {
                let mut held: Vec<Range<usize>> = Vec::new();
                for head in part.kv_heads(arch) {
                    match held.last_mut() {
                        Some(last) if last.end == head * e => last.end += e,
                        _ => held.push(head * e..(head + 1) * e),
                    }
                }
                return (arch.kv_width(), held);
            }
        };
        (whole, vec![held])
    }

    /// The number of copies of each element over all ranks.
    pub(super) fn copies(self, arch: &Arch, part: TensorPart) -> usize {
        match self {
            Self::Whole(_) => part.size,
            Self::KvHeads => part.kv_copies(arch),
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arch(heads: usize, kv_heads: usize) -> Arch {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 8 * heads, "intermediate_size": 100, "num_hidden_layers": 1,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 50
        });
        Arch::from_config(config.as_object().expect("an object")).expect("a known family")
    }

    #[test]
    fn every_query_head_has_its_key_head_and_all_copies_are_equally_many() {
        for (heads, kv_heads) in [(12, 3), (8, 1), (8, 2), (8, 8), (32, 8), (28, 4), (6, 3), (12, 12)] {
            let arch = arch(heads, kv_heads);
            for size in (1..=heads).filter(|&size| arch.check_tensor(size).is_ok()) {
                let mut held = vec![0; kv_heads];
                for rank in 0..size {
                    let part = TensorPart { rank, size };
                    let (local, kv) = (part.heads(&arch), part.kv_heads(&arch));
                    for &head in &kv {
                        held[head] += 1;
                    }
                    let sharing = local.len() / kv.len();
                    for (i, head) in local.enumerate() {
                        assert_eq!(
                            kv[i / sharing],
                            head / (heads / kv_heads),
                            "{heads}/{kv_heads}, rank {rank} of {size}"
                        );
                    }
                }
                let copies = TensorPart { rank: 0, size }.kv_copies(&arch);
                assert_eq!(held, vec![copies; kv_heads], "{heads}/{kv_heads} over {size}");
            }
        }
    }

    #[test]
    fn shares_cover_everything_between_panels_where_there_are_enough() {
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

    #[test]
    fn a_size_that_cannot_work_is_refused_with_those_that_can() {
        let arch = arch(12, 3);
        let error = arch.check_tensor(8).expect_err("8 does not divide 12");
        assert!(error.message.contains("12 attention heads"), "{error}");
        assert_eq!(error.hint.as_deref(), Some("set tensor to one of 1, 2, 3, 4, 6, 12"));
        assert!(arch.check_tensor(0).is_err() && arch.check_tensor(6).is_ok());
        let narrow = Arch { vocabulary: 5, ..arch };
        let error = narrow.check_tensor(6).expect_err("5 tokens over 6 ranks");
        assert!(error.message.contains("vocabulary (5)"), "{error}");
        assert_eq!(error.hint.as_deref(), Some("set tensor to one of 1, 2, 3, 4"));
    }
}
