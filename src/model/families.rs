//! Model families as data: the defaults that their config.json leaves out.

use super::block_spec::{Norms, QkNorm, Sinks};
use super::file_form::FileForm;
use super::rope::RopeDefaults;
use crate::ops::glu::Activation;

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    Never,
    Always,
    /// Set by this key of config.json, with this default.
    Key(&'static str, bool),
}

/// The layers that attend within a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    Never,
    /// Every layer, unless `sliding_window` is null. This is the width if the key is absent.
    Everywhere(Option<usize>),
    /// Only with `use_sliding_window`: the layers from `max_window_layers` on, or those of `layer_types`. (default
    /// window, default max_window_layers)
    Switched(usize, usize),
    /// Only with `use_sliding_window`: every layer. (default window)
    AllSwitched(usize),
    /// The layers of `layer_types`, or all but every `period`th. `sliding_window_pattern` is the period, if the family
    /// has that key. (default window, default period)
    Periodic(usize, usize),
    /// Only with `use_sliding_window`: the layers without rope, or those of `layer_types`.
    WithoutRope,
}

/// A number of config.json.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// The family has no such number.
    None,
    /// A key, and the value if it is absent. null: none.
    Key(&'static str, Option<f64>),
}

/// The factor on the scores of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scores {
    /// 1 / sqrt(head dim)
    HeadDim,
    /// 1 / sqrt of `query_pre_attn_scalar`, with this default.
    Scalar(f64),
    /// `attention_multiplier`
    Multiplier,
}

/// The factor on embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Embedded {
    AsTheyAre,
    /// sqrt(width), rounded to the dtype of weights.
    SqrtWidth,
    /// `embedding_multiplier`
    Multiplied,
}

/// The defaults of the keys of latent attention: `q_lora_rank`, `qk_nope_head_dim` and `v_head_dim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    pub q_rank: usize,
    pub plain: usize,
    pub value: usize,
}

/// The mixtures of experts of a family, with the defaults of their keys. `num_experts` or `num_local_experts` is the
/// number of experts, `num_experts_per_tok` that of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    pub count: usize,
    pub top_k: usize,
    /// The default of `moe_intermediate_size`. `None`: an expert has the width `intermediate_size`.
    pub width: Option<usize>,
    /// The default of `norm_topk_prob`, which divides weights by their sum. `None`: they always are.
    pub renormalizes: Option<bool>,
    /// Whether the router and the matrices of experts have biases.
    pub has_biases: bool,
    /// Whether the activation is `Activation::ClampedSilu`, with the keys `swiglu_alpha` and `swiglu_limit`.
    pub clamps: bool,
    pub scoring: Scoring,
    /// The layers with one MLP instead.
    pub dense: DenseLayers,
    pub shared: Option<Shared>,
    pub old_names: OldNames,
}

/// The last names of routers and of the matrices of experts in transformers 4 that PEFT takes for the parameters of
/// transformers 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldNames {
    None,
    /// `gate`; `w1` (gate), `w3` (up) and `w2` (down)
    Numbered,
    /// `gate`; `gate_proj`, `up_proj` and `down_proj`
    Projections,
}

impl OldNames {
    /// Those of `part`: `router`, `gate_up` or `down`.
    pub(super) fn of(self, part: &str) -> &'static [&'static str] {
        match (self, part) {
            (Self::None, _) => &[],
            (_, "router") => &["gate"],
            (Self::Numbered, "gate_up") => &["w1", "w3"],
            (Self::Numbered, _) => &["w2"],
            (Self::Projections, "gate_up") => &["gate_proj", "up_proj"],
            (Self::Projections, _) => &["down_proj"],
        }
    }
}

/// The layers with one MLP in a family whose other layers have mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseLayers {
    Never,
    /// By `decoder_sparse_step` and `mlp_only_layers`.
    Stepped,
    /// The first `first_k_dense_replace` ones, with this default.
    First(usize),
    /// The layers with `dense` in `mlp_layer_types`, else the first one.
    Listed,
}

/// How the logits of a router become weights of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    Softmax,
    /// Sigmoids, with a correction of each expert, and groups of experts: `n_group`, `topk_group` and
    /// `routed_scaling_factor`, with these defaults.
    Sigmoid(usize, usize, f64),
}

/// The expert that all tokens of a mixture use, with the default of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// One with a gate. Its width is `shared_expert_intermediate_size`.
    Gated(usize),
    /// `n_shared_experts` times the width of an expert.
    Plain(usize),
}

/// One family. Every difference between families is a field here or in `Arch`.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// `model_type` of config.json.
    pub name: &'static str,
    /// `architectures` of config.json for a language model.
    pub causal: &'static str,
    /// `architectures` of config.json for a value or reward model.
    pub classifier: &'static str,
    /// Further keys of config.json that the family reads (`own_keys`).
    pub keys: &'static [&'static str],
    pub qkv_bias: Bias,
    pub o_bias: Bias,
    pub mlp_bias: Bias,
    pub qk_norm: QkNorm,
    /// Whether some layers have the gated delta rule instead of attention, and the others gates on their query heads.
    pub is_hybrid: bool,
    /// The latent attention, if layers have it.
    pub latent: Option<Latent>,
    pub sinks: Sinks,
    /// The mixtures of experts, if layers have one instead of the MLP.
    pub experts: Option<Mixture>,
    pub norms: Norms,
    pub files: FileForm,
    /// The beginning of the names of tensors outside the language model that its files may contain.
    pub others: Option<&'static str>,
    /// The number that is added to the weights of all norms.
    pub norm_offset: f32,
    /// The default of `rms_norm_eps`.
    pub norm_eps: f64,
    /// The key of the MLP's activation, and its default.
    pub activation: (&'static str, Activation),
    pub windows: Windows,
    pub rope: RopeDefaults,
    /// Layers without rope: those with 0 in `no_rope_layers`, or every `no_rope_layer_interval`th.
    pub has_no_rope_layers: bool,
    pub scores: Scores,
    /// The soft cap of attention's scores.
    pub score_softcap: Number,
    pub embedded: Embedded,
    /// The factor on what each branch adds.
    pub residual_scale: Number,
    /// Logits are divided by this.
    pub logit_divisor: Number,
    /// The soft cap of logits.
    pub logit_softcap: Number,
    /// The default of `head_dim`. `None`: width / heads.
    pub head_dim: Option<usize>,
    /// The default of `num_key_value_heads`. `None`: the number of heads.
    pub kv_heads: Option<usize>,
    /// The default of `max_position_embeddings`.
    pub context: usize,
    /// The default of `tie_word_embeddings`.
    pub tied: bool,
}
