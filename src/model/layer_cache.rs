//! What layers keep of a sequence for its later tokens: a cache for each layer, and groups of layers with the same need.

use super::arch::Arch;
use super::block_spec::Mixer;
use crate::ops::attention::KvLayer;
use crate::ops::delta::StateLayer;

/// The cache of one layer: pages of keys and values, or of states.
#[derive(Debug)]
pub enum LayerCache {
    Keys(KvLayer),
    State(StateLayer),
}

impl LayerCache {
    pub fn keys(&self) -> Option<&KvLayer> {
        if let Self::Keys(keys) = self { Some(keys) } else { None }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Self::Keys(keys) => keys.bytes(),
            Self::State(state) => state.bytes(),
        }
    }
}

/// The part of a sequence that a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The keys of all tokens.
    All,
    /// The keys that a query sees, itself included: at most this many.
    Window(usize),
    /// One state, after the last token.
    State,
}

/// Layers that keep the same part of a sequence, so they share block tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    pub kept: Kept,
    /// Layer numbers, ascending.
    pub layers: Vec<usize>,
}

impl CacheGroup {
    /// The groups of an architecture. A window as long as the context hides nothing.
    pub(super) fn of_arch(arch: &Arch) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for (layer, block) in arch.blocks.iter().enumerate() {
            let kept = match &block.mixer {
                Mixer::Delta(_) => Kept::State,
                Mixer::Attention(attention) => match attention.window {
                    Some(window) if window < arch.context => Kept::Window(window),
                    _ => Kept::All,
                },
            };
            match groups.iter_mut().find(|group| group.kept == kept) {
                Some(group) => group.layers.push(layer),
                None => groups.push(Self { kept, layers: vec![layer] }),
            }
        }
        groups
    }
}
