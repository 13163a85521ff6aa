//! Model families as data: the defaults that their config.json leaves out.

use super::block_spec::{Norms, QkNorm};
use super::expert_files::ExpertForm;
use super::file_form::FileForm;
use super::rope::RopeDefaults;
use super::unsupported::refused;
use super::wrapper::WRAPPERS;
use crate::error::{Error, Result};
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

/// The mixtures of experts of a family, with the defaults of their keys. `num_experts` or `num_local_experts` is the
/// number of experts, `num_experts_per_tok` that of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    pub count: usize,
    pub top_k: usize,
    /// The default of `moe_intermediate_size`. `None`: an expert has the width `intermediate_size`.
    pub width: Option<usize>,
    /// The default of `norm_topk_prob`, which divides weights by their sum. `None`: they always are.
    pub renormalizes: Option<bool>,
    /// Whether `decoder_sparse_step` and `mlp_only_layers` choose layers with one MLP.
    pub has_dense_layers: bool,
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
    /// Further keys of config.json that the family reads.
    pub keys: &'static [&'static str],
    pub qkv_bias: Bias,
    pub o_bias: Bias,
    pub mlp_bias: Bias,
    pub qk_norm: QkNorm,
    /// Whether some layers have the gated delta rule instead of attention, and the others gates on their query heads.
    pub is_hybrid: bool,
    /// The mixtures of experts, if layers have one instead of the MLP.
    pub experts: Option<Mixture>,
    pub norms: Norms,
    pub files: FileForm,
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

/// The key of Gemma's encoders, whose tokens see later ones.
pub(super) const BIDIRECTIONAL: &str = "use_bidirectional_attention";

/// Keys of families with mixtures of experts.
const MIXTURE_KEYS: &[&str] = &[
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "output_router_logits",
    "router_aux_loss_coef",
];

/// The most common value of each field.
const LLAMA: Family = Family {
    name: "llama",
    causal: "LlamaForCausalLM",
    classifier: "LlamaForSequenceClassification",
    keys: &[],
    qkv_bias: Bias::Key("attention_bias", false),
    o_bias: Bias::Key("attention_bias", false),
    mlp_bias: Bias::Key("mlp_bias", false),
    qk_norm: QkNorm::None,
    is_hybrid: false,
    experts: None,
    norms: Norms::PRE,
    files: FileForm::PLAIN,
    norm_offset: 0.0,
    norm_eps: 1e-6,
    activation: ("hidden_act", Activation::Silu),
    windows: Windows::Never,
    rope: RopeDefaults::PLAIN,
    has_no_rope_layers: false,
    scores: Scores::HeadDim,
    score_softcap: Number::None,
    embedded: Embedded::AsTheyAre,
    residual_scale: Number::None,
    logit_divisor: Number::None,
    logit_softcap: Number::None,
    head_dim: None,
    kv_heads: None,
    context: 2048,
    tied: false,
};

const MISTRAL: Family = Family {
    name: "mistral",
    causal: "MistralForCausalLM",
    classifier: "MistralForSequenceClassification",
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    windows: Windows::Everywhere(Some(4096)),
    kv_heads: Some(8),
    context: 131_072,
    ..LLAMA
};

const GEMMA2: Family = Family {
    name: "gemma2",
    causal: "Gemma2ForCausalLM",
    classifier: "Gemma2ForSequenceClassification",
    keys: &[
        "hidden_activation",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        BIDIRECTIONAL,
    ],
    mlp_bias: Bias::Never,
    norms: Norms::SANDWICH,
    norm_offset: 1.0,
    activation: ("hidden_activation", Activation::GeluTanh),
    windows: Windows::Periodic(4096, 2),
    scores: Scores::Scalar(256.0),
    score_softcap: Number::Key("attn_logit_softcapping", Some(50.0)),
    embedded: Embedded::SqrtWidth,
    logit_softcap: Number::Key("final_logit_softcapping", Some(30.0)),
    head_dim: Some(256),
    kv_heads: Some(4),
    context: 8192,
    tied: true,
    ..LLAMA
};

const OLMO2: Family = Family {
    name: "olmo2",
    causal: "Olmo2ForCausalLM",
    classifier: "Olmo2ForSequenceClassification",
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::Whole,
    norms: Norms::POST,
    norm_eps: 1e-5,
    ..LLAMA
};

/// The supported families. Defaults are those of the configuration classes of transformers 4 and 5.
static FAMILIES: [Family; 17] = [
    LLAMA,
    MISTRAL,
    Family {
        name: "qwen2",
        causal: "Qwen2ForCausalLM",
        classifier: "Qwen2ForSequenceClassification",
        qkv_bias: Bias::Always,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        windows: Windows::Switched(4096, 28),
        kv_heads: Some(32),
        context: 32_768,
        ..LLAMA
    },
    Family {
        name: "qwen3",
        causal: "Qwen3ForCausalLM",
        classifier: "Qwen3ForSequenceClassification",
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::PerHead,
        windows: Windows::Switched(4096, 28),
        head_dim: Some(128),
        kv_heads: Some(32),
        context: 32_768,
        ..LLAMA
    },
    Family {
        name: "qwen3_5_text",
        causal: "Qwen3_5ForCausalLM",
        classifier: "Qwen3_5TextForSequenceClassification",
        keys: &[
            "attn_output_gate",
            "full_attention_interval",
            "layer_types",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_value_head_dim",
            "mamba_ssm_dtype",
            // The positions of images. Those of text are equal.
            "mrope_interleaved",
            "mrope_section",
            // Layers that predict further tokens, whose tensors an export keeps.
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
        ],
        o_bias: Bias::Key("attention_bias", false),
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::PerHead,
        is_hybrid: true,
        norm_offset: 1.0,
        rope: RopeDefaults { partial: Some(0.25), ..RopeDefaults::PLAIN },
        head_dim: Some(256),
        kv_heads: Some(4),
        context: 32_768,
        ..LLAMA
    },
    Family {
        name: "mixtral",
        causal: "MixtralForCausalLM",
        classifier: "MixtralForSequenceClassification",
        keys: MIXTURE_KEYS,
        experts: Some(Mixture { count: 8, top_k: 2, width: None, renormalizes: None, has_dense_layers: false }),
        files: FileForm { experts: ExpertForm::EachNumbered, ..FileForm::PLAIN },
        norm_eps: 1e-5,
        windows: Windows::Everywhere(None),
        rope: RopeDefaults { theta: 1_000_000.0, ..RopeDefaults::PLAIN },
        ..MISTRAL
    },
    Family {
        name: "qwen3_moe",
        causal: "Qwen3MoeForCausalLM",
        classifier: "Qwen3MoeForSequenceClassification",
        keys: MIXTURE_KEYS,
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::PerHead,
        experts: Some(Mixture {
            count: 128,
            top_k: 8,
            width: Some(768),
            renormalizes: Some(false),
            has_dense_layers: true,
        }),
        windows: Windows::AllSwitched(4096),
        kv_heads: Some(4),
        context: 32_768,
        ..LLAMA
    },
    Family {
        name: "ministral3",
        causal: "Ministral3ForCausalLM",
        classifier: "Ministral3ForSequenceClassification",
        norm_eps: 1e-5,
        windows: Windows::Everywhere(None),
        rope: RopeDefaults { scales_queries: true, ..RopeDefaults::PLAIN },
        head_dim: Some(128),
        context: 262_144,
        ..MISTRAL
    },
    Family {
        name: "smollm3",
        causal: "SmolLM3ForCausalLM",
        classifier: "SmolLM3ForSequenceClassification",
        keys: &["no_rope_layers", "no_rope_layer_interval"],
        windows: Windows::WithoutRope,
        rope: RopeDefaults { theta: 2_000_000.0, ..RopeDefaults::PLAIN },
        has_no_rope_layers: true,
        kv_heads: Some(4),
        context: 32_768,
        tied: true,
        ..LLAMA
    },
    Family {
        name: "seed_oss",
        causal: "SeedOssForCausalLM",
        classifier: "SeedOssForSequenceClassification",
        keys: &["attention_out_bias"],
        qkv_bias: Bias::Key("attention_bias", true),
        o_bias: Bias::Key("attention_out_bias", false),
        head_dim: Some(128),
        kv_heads: Some(8),
        context: 524_288,
        ..LLAMA
    },
    Family {
        name: "granite",
        causal: "GraniteForCausalLM",
        classifier: "GraniteForSequenceClassification",
        keys: &["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"],
        scores: Scores::Multiplier,
        embedded: Embedded::Multiplied,
        residual_scale: Number::Key("residual_multiplier", None),
        logit_divisor: Number::Key("logits_scaling", None),
        ..LLAMA
    },
    Family {
        name: "phi3",
        causal: "Phi3ForCausalLM",
        classifier: "Phi3ForSequenceClassification",
        qkv_bias: Bias::Never,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        files: FileForm { joins_qkv: true, joins_gate_up: true, ..FileForm::PLAIN },
        norm_eps: 1e-5,
        windows: Windows::Everywhere(None),
        rope: RopeDefaults { partial: Some(1.0), longrope: Some(4096.0), ..RopeDefaults::PLAIN },
        context: 4096,
        ..LLAMA
    },
    Family {
        name: "glm4",
        causal: "Glm4ForCausalLM",
        classifier: "Glm4ForSequenceClassification",
        qkv_bias: Bias::Key("attention_bias", true),
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        norms: Norms::SANDWICH_GLM,
        files: FileForm { joins_gate_up: true, is_interleaved: true, ..FileForm::PLAIN },
        norm_eps: 1.5625e-7,
        rope: RopeDefaults { partial: Some(0.5), ..RopeDefaults::PLAIN },
        head_dim: Some(128),
        kv_heads: Some(2),
        context: 131_072,
        ..LLAMA
    },
    OLMO2,
    Family {
        name: "olmo3",
        causal: "Olmo3ForCausalLM",
        classifier: "Olmo3ForSequenceClassification",
        windows: Windows::Periodic(4096, 4),
        rope: RopeDefaults { theta: 500_000.0, by_layer: Some(None), ..RopeDefaults::PLAIN },
        ..OLMO2
    },
    GEMMA2,
    Family {
        name: "gemma3_text",
        causal: "Gemma3ForCausalLM",
        classifier: "Gemma3TextForSequenceClassification",
        keys: &[
            "hidden_activation",
            "query_pre_attn_scalar",
            "final_logit_softcapping",
            "rope_local_base_freq",
            "sliding_window_pattern",
            BIDIRECTIONAL,
        ],
        qk_norm: QkNorm::PerHead,
        windows: Windows::Periodic(4096, 6),
        rope: RopeDefaults { theta: 1_000_000.0, by_layer: Some(Some(10_000.0)), ..RopeDefaults::PLAIN },
        score_softcap: Number::None,
        logit_softcap: Number::Key("final_logit_softcapping", None),
        context: 131_072,
        ..GEMMA2
    },
];

/// Class names that OpenRLHF writes for reward models and critics of any family.
const VALUE_CLASSES: [&str; 2] = ["RewardModel", "CriticModel"];

impl Family {
    /// The names of all families.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FAMILIES.iter().map(|f| f.name)
    }

    /// The family with this `model_type`.
    fn named(name: &str) -> Result<&'static Self> {
        FAMILIES.iter().find(|f| f.name == name).ok_or_else(|| {
            let known: Vec<&str> = Self::names().collect();
            refused("model_type", name, "").hint(format!("use one of {}", known.join(", ")))
        })
    }

    /// The family with this `model_type`, or that of the language model inside a model with this `model_type`.
    ///
    /// # Errors
    /// `Data` if there is none, with all names.
    pub fn named_or_inside(name: &str) -> Result<&'static Self> {
        let inside = WRAPPERS.iter().find(|wrapper| wrapper.name == name).map(|wrapper| wrapper.family);
        Self::named(inside.unwrap_or(name)).map_err(|error| {
            let known: Vec<&str> = Self::names().chain(WRAPPERS.iter().map(|wrapper| wrapper.name)).collect();
            error.hint(format!("use one of {}, or a model directory", known.join(", ")))
        })
    }

    /// Returns the family, and whether the model has a value head instead of a language-model head. They follow from
    /// `model_type` and `architectures[0]`, of which one may be absent.
    ///
    /// # Errors
    /// `Data` if they are unknown, if they disagree, or if both are absent.
    pub fn identify(model_type: Option<&str>, architecture: Option<&str>) -> Result<(&'static Self, bool)> {
        let Some(class) = architecture else {
            let name = model_type.ok_or_else(|| Error::data("neither model_type nor architectures is set"))?;
            return Ok((Self::named(name)?, false));
        };
        if let (Some(name), true) = (model_type, VALUE_CLASSES.contains(&class)) {
            return Ok((Self::named(name)?, true));
        }
        let found = FAMILIES.iter().find(|f| f.causal == class || f.classifier == class).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().flat_map(|f| [f.causal, f.classifier]).collect();
            refused("architecture", class, "").hint(format!("use one of {}", known.join(", ")))
        })?;
        match model_type {
            Some(name) if name != found.name => {
                Err(Error::data(format!("model_type \"{name}\" does not match architecture \"{class}\""))
                    .hint(format!("set model_type to \"{}\" for \"{class}\"", found.name)))
            }
            _ => Ok((found, found.classifier == class)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_models_are_recognised_by_their_class() {
        assert!(!Family::identify(Some("llama"), Some("LlamaForCausalLM")).unwrap().1);
        assert!(Family::identify(Some("llama"), Some("LlamaForSequenceClassification")).unwrap().1);
        assert!(Family::identify(Some("qwen2"), Some("RewardModel")).unwrap().1);
    }
}
