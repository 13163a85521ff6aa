//! One layer as data: the mixer of tokens, the feed-forward, and the places of their norms.

use super::part::{Cut, TensorPart};
use crate::dtype::KvDtype;
use crate::ops::attention::AttentionShape;
use crate::ops::delta::DeltaShape;
use crate::ops::glu::Activation;

/// One layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockSpec {
    pub mixer: Mixer,
    pub feed: Feed,
    pub norms: Norms,
    /// The factor on what a branch adds to the residual stream.
    pub residual_scale: f32,
}

/// The first branch of a layer: tokens see each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mixer {
    Attention(AttentionSpec),
    Delta(DeltaSpec),
}

/// The second branch of a layer: each token alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Feed {
    /// The gated MLP.
    Dense(DenseSpec),
    /// A mixture of gated MLPs.
    Experts(ExpertsSpec),
}

/// The norms of a layer by name. A branch is x += after(f(before(x))), where either norm may be absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Norms {
    /// Before and after attention.
    pub attention: [Option<&'static str>; 2],
    /// Before and after the MLP.
    pub mlp: [Option<&'static str>; 2],
}

impl Norms {
    /// Before each branch.
    pub const PRE: Self =
        Self { attention: [Some("input_layernorm"), None], mlp: [Some("post_attention_layernorm"), None] };
    /// After each branch.
    pub const POST: Self =
        Self { attention: [None, Some("post_attention_layernorm")], mlp: [None, Some("post_feedforward_layernorm")] };
    /// On both sides of each branch.
    pub const SANDWICH: Self = Self {
        attention: [Some("input_layernorm"), Some("post_attention_layernorm")],
        mlp: [Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm")],
    };
    /// The same with the names of GLM-4, whose `post_attention_layernorm` is before the MLP.
    pub const SANDWICH_GLM: Self = Self {
        attention: [Some("input_layernorm"), Some("post_self_attn_layernorm")],
        mlp: [Some("post_attention_layernorm"), Some("post_mlp_layernorm")],
    };
}

/// The kind of all norms of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    pub eps: f32,
    /// The number that is added to the weight: 1 in families whose weights start at 0, else 0.
    pub offset: f32,
}

/// The norm of queries and keys before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    None,
    /// Each head alone.
    PerHead,
    /// All heads of a row together, with a weight for each column.
    Whole,
}

/// Further logits without a value in the softmax of attention (`ops::sinks`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sinks {
    None,
    /// One for each query head.
    PerHead,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The number of keys that a query sees, itself included. `None`: all earlier keys.
    pub window: Option<usize>,
    /// The index of the rotary embedding in `Arch::ropes`.
    pub rope: usize,
    /// The factor on scores, usually 1 / sqrt(head_dim).
    pub scale: f32,
    /// Scaled scores s become c tanh(s / c), with this c.
    pub softcap: Option<f32>,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub qk_norm: QkNorm,
    /// Whether each query head has a gate: its result times sigmoid(gate).
    pub has_gate: bool,
    pub sinks: Sinks,
    /// The parts of heads, if keys and values are one compressed vector of each token. Then `kv_heads` is 1, and `head_dim`
    /// the width of that vector.
    pub latent: Option<LatentSpec>,
    /// The dtype to which keys and values are rounded (`Arch::with_keys_in`).
    pub kv: KvDtype,
}

/// Latent attention (arXiv:2412.19437, section 2.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSpec {
    /// The width of compressed queries. `None`: they are not compressed.
    pub q_rank: Option<usize>,
    /// The width of compressed keys and values.
    pub kv_rank: usize,
    /// Columns of a head of queries and keys that are not rotated, and rotated ones.
    pub plain: usize,
    pub rotated: usize,
    /// Columns of a head of values.
    pub value: usize,
    /// Whether the files turn column 2i with 2i + 1.
    pub is_interleaved: bool,
}

impl LatentSpec {
    /// Columns of a head of queries.
    pub fn query(&self) -> usize {
        self.plain + self.rotated
    }
}

/// The gated delta rule. Value head h reads key head h / (value_heads / key_heads).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpec {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// The number of inputs of each convolution.
    pub taps: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DenseSpec {
    pub width: usize,
    pub activation: Activation,
    pub bias: bool,
    /// Whether gate and up are one tensor in the files.
    pub is_joined: bool,
}

/// A mixture of experts: each token goes to the `top_k` experts that the router prefers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// The number of experts.
    pub count: usize,
    /// The number of experts for each token.
    pub top_k: usize,
    /// The inner width of an expert.
    pub width: usize,
    pub activation: Activation,
    /// Whether the weights of a token's experts are divided by their sum.
    pub renormalizes: bool,
    /// Whether the router and the matrices of experts have biases.
    pub has_biases: bool,
    pub scoring: Scoring,
    /// The expert of all tokens.
    pub shared: Option<SharedSpec>,
}

impl ExpertsSpec {
    /// The number of parameters of an expert of a model of `width`.
    pub fn parameters(&self, width: usize) -> usize {
        let biases = if self.has_biases { 2 * self.width + width } else { 0 };
        3 * width * self.width + biases
    }
}

/// How the logits of a router become weights of experts (`ops::experts::Rule`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    Softmax,
    Sigmoid { groups: usize, top_groups: usize, scale: f32 },
}

/// The gated MLP that every token of a mixture goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedSpec {
    pub name: SharedName,
    pub width: usize,
}

/// The name of the shared expert in the files, and whether a token weighs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedName {
    /// `shared_expert`, times sigmoid(`shared_expert_gate` n)
    Gated,
    /// `shared_experts`: several of the width of an expert are one matrix.
    Plain,
}

impl AttentionSpec {
    /// That of a vision tower.
    pub(super) fn of_tower(width: usize, heads: usize) -> Self {
        let head_dim = width / heads;
        Self {
            heads,
            kv_heads: heads,
            head_dim,
            window: None,
            rope: 0,
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: None,
            qkv_bias: true,
            o_bias: true,
            qk_norm: QkNorm::None,
            has_gate: false,
            sinks: Sinks::None,
            latent: None,
            kv: KvDtype::Model,
        }
    }

    /// The cut of all query heads.
    pub fn queries(&self) -> Cut {
        Cut::Heads { queries: self.heads, group: 1, head_dim: self.head_dim }
    }

    /// The cut of one number for each query head.
    pub fn per_head(&self) -> Cut {
        Cut::Heads { queries: self.heads, group: 1, head_dim: 1 }
    }

    /// The cut of all query heads, each with its gate.
    pub fn gated_queries(&self) -> Cut {
        Cut::Heads { queries: self.heads, group: 1, head_dim: 2 * self.head_dim }
    }

    /// The elements of all matrices, for a hidden state of `width`.
    pub fn elements(&self, width: usize) -> usize {
        let Some(latent) = &self.latent else {
            let queries = if self.has_gate { self.gated_queries() } else { self.queries() };
            return width * (self.q_width() + queries.size() + 2 * self.kv_width());
        };
        let LatentSpec { kv_rank, plain, rotated, value, .. } = *latent;
        let queries = self.heads * latent.query();
        let of_queries = latent.q_rank.map_or(width * queries, |rank| rank * (width + queries));
        of_queries + width * (kv_rank + rotated) + self.heads * (kv_rank * (plain + value) + value * width)
    }

    /// The cut of all key (or value) heads.
    pub fn keys(&self) -> Cut {
        Cut::Heads { queries: self.heads, group: self.heads / self.kv_heads, head_dim: self.head_dim }
    }

    /// Columns of all query heads.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// The values of a token in the cache.
    pub fn cached_values(&self) -> usize {
        if self.latent.is_some() { self.kv_width() } else { 2 * self.kv_width() }
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
            scale: self.scale,
            softcap: self.softcap,
            values_are_keys: self.latent.is_some(),
            kv: self.kv,
        }
    }
}

impl DeltaSpec {
    /// The cut of the columns of all key (or query) heads.
    pub fn keys(&self) -> Cut {
        Cut::Heads { queries: self.key_heads, group: 1, head_dim: self.key_dim }
    }

    /// The cut of the columns of all value heads.
    pub fn values(&self) -> Cut {
        Cut::Heads { queries: self.value_heads, group: 1, head_dim: self.value_dim }
    }

    /// The cut of one number for each value head.
    pub fn heads(&self) -> Cut {
        Cut::Heads { queries: self.value_heads, group: 1, head_dim: 1 }
    }

    /// The heads that a rank of the tensor axis computes.
    pub fn shape(&self, part: TensorPart) -> DeltaShape {
        DeltaShape {
            key_heads: self.keys().heads(part).len(),
            value_heads: self.heads().heads(part).len(),
            key_dim: self.key_dim,
            value_dim: self.value_dim,
        }
    }
}

impl Feed {
    /// The inner width, of each expert in a mixture.
    pub fn width(&self) -> usize {
        match self {
            Self::Dense(mlp) => mlp.width,
            Self::Experts(experts) => experts.width,
        }
    }

    /// The cut of the inner width.
    pub fn cut(&self) -> Cut {
        Cut::Even(self.width())
    }

    pub fn activation(&self) -> Activation {
        match self {
            Self::Dense(mlp) => mlp.activation,
            Self::Experts(experts) => experts.activation,
        }
    }

    /// The inner width of the expert that all tokens use; 0 without one.
    pub fn shared_width(&self) -> usize {
        self.experts().and_then(|experts| experts.shared).map_or(0, |shared| shared.width)
    }

    /// The mixture, if it is one.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        match self {
            Self::Dense(_) => None,
            Self::Experts(experts) => Some(experts),
        }
    }

    /// The same with an inner width of at most `width`. A mixture keeps at most `count` experts, and each token has all of
    /// them.
    #[must_use]
    pub fn narrowed(self, width: usize, count: usize) -> Self {
        match self {
            Self::Dense(mlp) => Self::Dense(DenseSpec { width: mlp.width.min(width), ..mlp }),
            Self::Experts(experts) => {
                let shared = experts.shared.map(|shared| SharedSpec { width: shared.width.min(width), ..shared });
                let (width, count) = (experts.width.min(width), experts.count.min(count));
                Self::Experts(ExpertsSpec { width, count, top_k: count, shared, ..experts })
            }
        }
    }
}

impl BlockSpec {
    pub fn attention(&self) -> Option<&AttentionSpec> {
        if let Mixer::Attention(attention) = &self.mixer { Some(attention) } else { None }
    }

    pub fn delta(&self) -> Option<&DeltaSpec> {
        if let Mixer::Delta(delta) = &self.mixer { Some(delta) } else { None }
    }
}
