//! One layer as data: the mixer of tokens, the feed-forward, and the places of their norms.

use super::part::{Cut, TensorPart};
use crate::ops::attention::AttentionShape;
use crate::ops::glu::Activation;

/// One layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSpec {
    pub mixer: Mixer,
    pub feed: Feed,
    pub norms: Norms,
}

/// The first branch of a layer: tokens see each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    Attention(AttentionSpec),
}

/// The second branch of a layer: each token alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// The gated MLP.
    Dense(DenseSpec),
}

/// The places of a branch's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// x += f(norm(x))
    Pre,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSpec {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The number of keys that a query sees, itself included. `None`: all earlier keys.
    pub window: Option<usize>,
    pub qkv_bias: bool,
    pub o_bias: bool,
    /// Queries and keys are normed per head.
    pub qk_norm: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseSpec {
    pub width: usize,
    pub activation: Activation,
    pub bias: bool,
}

impl AttentionSpec {
    /// The cut of all query heads.
    pub fn queries(&self) -> Cut {
        Cut::Heads { queries: self.heads, group: 1, head_dim: self.head_dim }
    }

    /// The cut of all key (or value) heads.
    pub fn keys(&self) -> Cut {
        Cut::Heads { queries: self.heads, group: self.heads / self.kv_heads, head_dim: self.head_dim }
    }

    /// Columns of all query heads.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of all key (or value) heads.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The heads that a rank of the tensor axis computes.
    pub fn shape(&self, part: TensorPart) -> AttentionShape {
        AttentionShape {
            heads: self.queries().heads(part).len(),
            kv_heads: self.keys().heads(part).len(),
            head_dim: self.head_dim,
            window: self.window,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
        }
    }
}

impl DenseSpec {
    /// The cut of the inner width.
    pub fn cut(&self) -> Cut {
        Cut::Even(self.width)
    }
}

impl BlockSpec {
    pub fn attention(&self) -> &AttentionSpec {
        let Mixer::Attention(attention) = &self.mixer;
        attention
    }

    pub fn mlp(&self) -> &DenseSpec {
        let Feed::Dense(mlp) = &self.feed;
        mlp
    }
}
