//! The first branch of a layer: attention of either kind, or the gated delta rule.

use super::arch::Arch;
use super::attention::{Attention, AttentionSaved};
use super::block_spec;
use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::delta::{Delta, DeltaSaved};
use super::latent::{Latent, LatentSaved};
use super::layer_cache::LayerCache;
use super::params::ParamTable;
use super::weights::Gradients;
use crate::device::Device;
use crate::dtype::KvDtype;
use crate::ops::attention::{AttentionShape, KvLayer, PAGE, Packed, kv_copy_page};
use crate::ops::delta::StateLayer;
use crate::tensor::{DType, Tensor};

#[derive(Clone, Debug)]
pub(super) enum Mixer {
    Attention(Box<Attention>),
    Latent(Box<Latent>),
    Delta(Box<Delta>),
}

/// The activations that the backward needs.
#[derive(Debug)]
pub(super) enum MixerSaved {
    Attention(Box<AttentionSaved>),
    Latent(Box<LatentSaved>),
    Delta(Box<DeltaSaved>),
}

impl MixerSaved {
    /// The results in the order in which they were computed.
    pub(super) fn results(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            Self::Attention(saved) => saved.results().to_vec(),
            Self::Latent(saved) => saved.results(),
            Self::Delta(saved) => saved.results(),
        }
    }
}

impl Mixer {
    /// Declares the parameters in the layer `layer`.
    pub(super) fn declare(table: &mut ParamTable, layer: &str, arch: &Arch, spec: &block_spec::Mixer) -> Self {
        match spec {
            block_spec::Mixer::Attention(spec) => {
                let name = format!("{layer}.self_attn");
                match &spec.latent {
                    Some(latent) => Self::Latent(Box::new(Latent::declare(table, &name, arch, spec, latent))),
                    None => Self::Attention(Box::new(Attention::declare(table, &name, arch, spec))),
                }
            }
            block_spec::Mixer::Delta(spec) => {
                Self::Delta(Box::new(Delta::declare(table, &format!("{layer}.linear_attn"), arch, spec)))
            }
        }
    }

    /// An empty cache of `pages` pages for weights of `dtype`.
    pub(super) fn cache(&self, device: Device, dtype: DType, pages: usize) -> LayerCache {
        match self {
            Self::Attention(of) => LayerCache::Keys(KvLayer::new(device, dtype, pages, &of.shape)),
            Self::Latent(of) => LayerCache::Keys(KvLayer::new(device, dtype, pages, &of.shape)),
            Self::Delta(of) => LayerCache::State(StateLayer::new(device, pages, of.places().page_len())),
        }
    }

    /// Bytes of a page of the cache: keys and values of `PAGE` tokens, or a state.
    pub(super) fn page_bytes(&self, device: Device, dtype: DType) -> usize {
        let of_keys = |shape: &AttentionShape| PAGE * KvLayer::token_bytes(device, dtype, shape);
        match self {
            Self::Attention(of) => of_keys(&of.shape),
            Self::Latent(of) => of_keys(&of.shape),
            Self::Delta(of) => of.places().page_len() * size_of::<f32>(),
        }
    }

    pub(super) fn keep_keys_in(&mut self, kv: KvDtype) {
        match self {
            Self::Attention(of) => of.shape.kv = kv,
            Self::Latent(of) => of.shape.kv = kv,
            Self::Delta(_) => {}
        }
    }

    /// Copies page `from` of the cache to page `to`.
    pub(super) fn copy_page(&self, cache: &mut LayerCache, from: u32, to: u32) {
        match (self, cache) {
            (Self::Attention(of), LayerCache::Keys(keys)) => kv_copy_page(keys, from, to, &of.shape),
            (Self::Latent(of), LayerCache::Keys(keys)) => kv_copy_page(keys, from, to, &of.shape),
            (_, LayerCache::State(state)) => state.copy_page(from, to),
            (Self::Delta(_), LayerCache::Keys(_)) => unreachable!("the delta rule has a cache of states"),
        }
    }
}

impl Body for Mixer {
    type Saved = MixerSaved;

    fn forward(&self, c: Context, n: Tensor, keys: &mut LayerKeys) -> MixerSaved {
        match self {
            Self::Attention(of) => MixerSaved::Attention(Box::new(of.forward(c, n, keys))),
            Self::Latent(of) => MixerSaved::Latent(Box::new(of.forward(c, n, keys))),
            Self::Delta(of) => MixerSaved::Delta(Box::new(of.forward(c, n, keys))),
        }
    }

    fn add(&self, c: Context, saved: &MixerSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        match (self, saved) {
            (Self::Attention(of), MixerSaved::Attention(saved)) => of.add(c, saved, x, keeps),
            (Self::Latent(of), MixerSaved::Latent(saved)) => of.add(c, saved, x, keeps),
            (Self::Delta(of), MixerSaved::Delta(saved)) => of.add(c, saved, x, keeps),
            _ => unreachable!("a layer saves what its own mixer needs"),
        }
    }

    fn backward(&self, c: Context, packed: &Packed, saved: MixerSaved, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        match (self, saved) {
            (Self::Attention(of), MixerSaved::Attention(saved)) => of.backward(c, packed, *saved, dy, grads),
            (Self::Latent(of), MixerSaved::Latent(saved)) => of.backward(c, packed, *saved, dy, grads),
            (Self::Delta(of), MixerSaved::Delta(saved)) => of.backward(c, packed, *saved, dy, grads),
            _ => unreachable!("a layer saves what its own mixer needs"),
        }
    }
}
