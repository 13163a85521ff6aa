//! What a forward reads besides tokens, and what it keeps for its backward.

use super::block::{BlockSaved, Keep};
use super::context::LayerKeys;
use super::eyes::Seen;
use super::layer_cache::LayerCache;
use crate::config::job::Recompute;
use crate::ops::attention::{Packed, Paged};
use crate::tensor::Tensor;

/// The source of keys and values.
pub enum Keys<'a> {
    /// Whole sequences, one after another.
    Packed(Packed<'a>),
    /// New rows after the cached tokens of their sequences, with one cache per layer. The sequences have block tables
    /// for each cache group.
    Paged(&'a mut [LayerCache], &'a [Paged<'a>]),
}

impl Keys<'_> {
    pub(super) fn of_layer(&mut self, layer: usize, group: usize) -> LayerKeys<'_> {
        match self {
            Self::Packed(packed) => LayerKeys::Packed(packed),
            Self::Paged(cache, paged) => match &mut cache[layer] {
                LayerCache::Keys(keys) => LayerKeys::Paged(keys, &paged[group]),
                LayerCache::State(state) => LayerKeys::State(state, &paged[group]),
            },
        }
    }
}

/// The results of a forward that its backward needs.
#[derive(Debug)]
pub struct Saved {
    pub(super) keep: Keep,
    /// The chunk of the stage's layers.
    pub(super) chunk: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    pub(super) seen: Option<Seen>,
    pub(super) blocks: Vec<BlockSaved>,
    /// On the last stage, the output of the last block (t, d) and its 1 / rms (t, 1).
    pub(super) last: Option<(Tensor, Tensor)>,
}

impl Saved {
    /// Keeps the inputs from which the backward recomputes what `recompute` names, and everything else. `Auto` keeps
    /// all.
    pub fn new(recompute: impl Into<Recompute>) -> Self {
        let keep = match recompute.into() {
            Recompute::Auto | Recompute::None => Keep::Everything,
            Recompute::Attention => Keep::AllButAttention,
            Recompute::Block => Keep::Input,
        };
        Self { keep, chunk: 0, tokens: Vec::new(), positions: Vec::new(), seen: None, blocks: Vec::new(), last: None }
    }

    /// The kept results of the layers from `first` on, with names, in the order in which they were computed, and the
    /// last layer's output on the last stage.
    pub(super) fn results(&self, first: usize) -> (Vec<(String, &Tensor)>, Option<&Tensor>) {
        let layers = self.blocks.iter().enumerate().flat_map(|(i, kept)| kept.results(first + i));
        (layers.collect(), self.last.as_ref().map(|(last, _)| last))
    }
}

/// The positions of packed rows: each sequence counts from 0.
pub fn packed_positions(cu_seqlens: &[usize]) -> Vec<u32> {
    cu_seqlens.windows(2).flat_map(|w| 0..(w[1] - w[0]) as u32).collect()
}
