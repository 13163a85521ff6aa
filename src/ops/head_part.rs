//! The part of a vocabulary-parallel head that a rank holds, and the statistics of its logits.

pub use crate::device::cpu::softmax::RowStats;

use super::matmul::forward_rows;
use crate::device::cpu::{matmul as products, softcap, softmax};
use crate::device::cuda::Memory;
use crate::experience::SamplingMask;
use crate::tensor::Weight;
use std::ops::Range;

/// Replaces the statistics and target logits of a part by those of whole rows.
pub type Combine<'a> = dyn Fn(&mut [RowStats], &mut [f32]) + 'a;

/// The same on a GPU. Gathers the statistics of all parts' rows (`device::cuda::linear_logprob::stats`), one part after
/// another, and returns them with the number of parts.
pub type Gather<'a> = dyn Fn(&Memory) -> (Memory, usize) + 'a;

/// The token that each row of h predicts.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    pub tokens: &'a [u32],
    /// The sampling mask of each token, or empty for the whole vocabulary.
    pub masks: &'a [SamplingMask],
}

impl<'a, T: AsRef<[u32]> + ?Sized> From<&'a T> for Targets<'a> {
    fn from(tokens: &'a T) -> Self {
        Self { tokens: tokens.as_ref(), masks: &[] }
    }
}

impl<'a> Targets<'a> {
    pub(super) fn part(self, range: Range<usize>) -> Self {
        let masks = if self.masks.is_empty() { &[] } else { &self.masks[range.clone()] };
        Self { tokens: &self.tokens[range], masks }
    }

    /// The tokens for a GPU, which has no kernel for masks.
    pub(super) fn unmasked(self) -> &'a [u32] {
        assert!(self.masks.iter().all(SamplingMask::is_whole), "a GPU does not support sampling masks");
        self.tokens
    }
}

/// The part of a vocabulary-parallel head that W is.
#[derive(Clone, Copy)]
pub struct HeadPart<'a> {
    /// The token of W's first row.
    pub first: usize,
    /// The rows of the largest part: all parts use the same chunks of tokens.
    pub rows_max: usize,
    /// Replaces the statistics of this part by those of the whole rows, and the targets' logits (0 if the target is
    /// in another part) by their sums over the parts.
    /// `None` if W is the whole head.
    pub combine: Option<&'a Combine<'a>>,
    /// The equivalent on a GPU.
    pub gather: Option<&'a Gather<'a>>,
    /// The soft cap of the logits (`softcap`).
    pub softcap: Option<f32>,
}

impl HeadPart<'_> {
    /// All of W.
    pub fn whole(w: &Weight) -> Self {
        Self { first: 0, rows_max: w.n, combine: None, gather: None, softcap: None }
    }

    /// The indices of the targets among W's rows; out of range if the target is in another part.
    pub(super) fn places(&self, targets: &[u32]) -> Vec<usize> {
        targets.iter().map(|&target| (target as usize).checked_sub(self.first).unwrap_or(usize::MAX)).collect()
    }

    /// Combines this part's statistics into those of whole rows. Sums over rows are combined in the same way, with
    /// `max` 0.
    pub(super) fn combined(&self, mut stats: Vec<RowStats>) -> Vec<RowStats> {
        if let Some(combine) = self.combine {
            let mut targets = vec![0.0; stats.len()];
            combine(&mut stats, &mut targets);
        }
        stats
    }

    /// Fills and masks the logits (rows, v) = x W^T of a chunk. Returns the indices of its targets, and the statistics
    /// and target logits of whole rows.
    pub(super) fn stats(
        &self,
        x: &[f32],
        head: products::Panels,
        inverse_temperature: f32,
        Targets { tokens, masks }: Targets,
        logits: &mut [f32],
    ) -> (Vec<usize>, Vec<RowStats>, Vec<f32>) {
        let (v, places) = (head.n, self.places(tokens));
        let output = products::Output { w: head, bias: None, y: &mut *logits };
        forward_rows(x, tokens.len(), [output], products::Addend::Nothing);
        if let Some(cap) = self.softcap {
            softcap::forward(cap, logits);
        }
        if !masks.is_empty() {
            softmax::mask_rows(logits, v, self.first, masks);
        }
        let mut stats = softmax::stats_of_rows(logits, v, inverse_temperature);
        let target = |(i, &place): (usize, &usize)| if place < v { logits[i * v + place] } else { 0.0 };
        let mut found: Vec<f32> = places.iter().enumerate().map(target).collect();
        if let Some(combine) = self.combine {
            combine(&mut stats, &mut found);
        }
        (places, stats, found)
    }
}

/// The value that is computed for a row besides the target's log-probability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extra {
    Nothing,
    Entropy,
    /// 1 if no token is likelier than the target, else 0.
    Top,
}

/// A loss that is local to a token. It always runs on the host. For tokens `range`, given (logprobs, entropy), it
/// writes (d loss / d logprob, d loss / d entropy), which are 0 before the call.
pub type TokenLoss<'a> = dyn FnMut(Range<usize>, &[f32], &[f32], &mut [f32], &mut [f32]) + 'a;
