//! The second branch of a layer, of any kind (`Feed`).

use super::arch::Arch;
use super::block_spec::Feed;
use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::experts::{Experts, ExpertsSaved};
use super::mlp::{Mlp, MlpSaved};
use super::params::ParamTable;
use super::plain_mlp::{PlainMlp, PlainSaved};
use super::weights::Gradients;
use crate::ops::attention::Packed;
use crate::tensor::Tensor;

#[derive(Clone, Debug)]
pub(super) enum FeedForward {
    Mlp(Box<Mlp>),
    Experts(Box<Experts>),
    Plain(Box<PlainMlp>),
}

/// The activations that the backward needs.
#[derive(Debug)]
pub(super) enum FeedForwardSaved {
    Mlp(Box<MlpSaved>),
    Experts(Box<ExpertsSaved>),
    Plain(Box<PlainSaved>),
}

impl FeedForwardSaved {
    /// The results with a row for each token, in the order in which they were computed.
    pub(super) fn results(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            Self::Mlp(saved) => saved.results(),
            Self::Experts(saved) => saved.results(),
            Self::Plain(saved) => saved.results(),
        }
    }
}

impl FeedForward {
    /// Declares the parameters of layer `layer`.
    pub(super) fn declare(table: &mut ParamTable, layer: usize, arch: &Arch, spec: &Feed) -> Self {
        match spec {
            Feed::Dense(mlp) => {
                Self::Mlp(Box::new(Mlp::declare(table, &format!("model.layers.{layer}.mlp"), arch.width, mlp)))
            }
            Feed::Experts(experts) => Self::Experts(Box::new(Experts::declare(table, layer, arch, experts))),
        }
    }
}

impl Body for FeedForward {
    type Saved = FeedForwardSaved;

    fn forward(&self, c: Context, n: Tensor, keys: &mut LayerKeys) -> FeedForwardSaved {
        match self {
            Self::Mlp(mlp) => FeedForwardSaved::Mlp(Box::new(mlp.forward(c, n, keys))),
            Self::Experts(experts) => FeedForwardSaved::Experts(Box::new(experts.forward(c, n, keys))),
            Self::Plain(mlp) => FeedForwardSaved::Plain(Box::new(mlp.forward(c, n, keys))),
        }
    }

    fn add(&self, c: Context, saved: &FeedForwardSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        match (self, saved) {
            (Self::Mlp(mlp), FeedForwardSaved::Mlp(saved)) => mlp.add(c, saved, x, keeps),
            (Self::Experts(experts), FeedForwardSaved::Experts(saved)) => experts.add(c, saved, x, keeps),
            (Self::Plain(mlp), FeedForwardSaved::Plain(saved)) => mlp.add(c, saved, x, keeps),
            _ => unreachable!("{self:?} has other activations"),
        }
    }

    fn run(&self, c: Context, n: Tensor, keys: &mut LayerKeys, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        match self {
            Self::Mlp(mlp) => mlp.run(c, n, keys, x, keeps),
            Self::Experts(experts) => experts.run(c, n, keys, x, keeps),
            Self::Plain(mlp) => mlp.run(c, n, keys, x, keeps),
        }
    }

    fn backward(
        &self,
        c: Context,
        packed: &Packed,
        saved: FeedForwardSaved,
        dy: &Tensor,
        grads: &mut Gradients,
    ) -> Tensor {
        match (self, saved) {
            (Self::Mlp(mlp), FeedForwardSaved::Mlp(saved)) => mlp.backward(c, packed, *saved, dy, grads),
            (Self::Experts(experts), FeedForwardSaved::Experts(saved)) => {
                experts.backward(c, packed, *saved, dy, grads)
            }
            (Self::Plain(mlp), FeedForwardSaved::Plain(saved)) => mlp.backward(c, packed, *saved, dy, grads),
            _ => unreachable!("{self:?} has other activations"),
        }
    }
}
