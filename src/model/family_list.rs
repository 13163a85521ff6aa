//! The list of model families.

use super::block_spec::{Norms, QkNorm, Sinks};
use super::delta_files::DeltaForm;
use super::expert_files::ExpertForm;
use super::families::{
    Bias, DenseLayers, Embedded, Family, Latent, Mixture, Number, OldNames, Scores, Scoring, Shared, Windows,
};
use super::family_keys::{BIDIRECTIONAL, MIXTURE_KEYS, MROPE_KEYS};
use super::file_form::FileForm;
use super::rope::{RopeDefaults, Sections};
use crate::ops::glu::Activation;

/// The most common value of each field.
const MIXTURE: Mixture = Mixture {
    count: 8,
    top_k: 2,
    width: None,
    renormalizes: None,
    has_biases: false,
    clamps: false,
    scoring: Scoring::Softmax,
    dense: DenseLayers::Never,
    shared: None,
    old_names: OldNames::Projections,
};

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
    latent: None,
    sinks: Sinks::None,
    experts: None,
    norms: Norms::PRE,
    files: FileForm::PLAIN,
    others: None,
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

const SIGMOIDS: Mixture = Mixture {
    count: 256,
    top_k: 8,
    width: Some(2048),
    renormalizes: Some(true),
    scoring: Scoring::Sigmoid(8, 4, 2.5),
    dense: DenseLayers::First(3),
    shared: Some(Shared::Plain(1)),
    ..MIXTURE
};

const DEEPSEEK_V3: Family = Family {
    name: "deepseek_v3",
    causal: "DeepseekV3ForCausalLM",
    classifier: "DeepseekV3ForSequenceClassification",
    mlp_bias: Bias::Never,
    latent: Some(Latent { q_rank: 1536, plain: 128, value: 128 }),
    experts: Some(SIGMOIDS),
    context: 4096,
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

const QWEN3_5: Family = Family {
    name: "qwen3_5_text",
    causal: "Qwen3_5ForCausalLM",
    classifier: "Qwen3_5TextForSequenceClassification",
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::PerHead,
    is_hybrid: true,
    others: Some("mtp."),
    norm_offset: 1.0,
    rope: RopeDefaults {
        partial: Some(0.25),
        sections: Some(Sections { sizes: [11, 11, 10], is_interleaved: true }),
        ..RopeDefaults::PLAIN
    },
    head_dim: Some(256),
    kv_heads: Some(4),
    context: 32_768,
    ..LLAMA
};

const QWEN2: Family = Family {
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
};

const QWEN3: Family = Family {
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
};

/// The supported families. Defaults are those of the configuration classes of transformers 4 and 5.
pub(super) static FAMILIES: &[Family] = &[
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    Family {
        name: "qwen2_5_vl_text",
        causal: "Qwen2_5_VLForConditionalGeneration",
        classifier: "Qwen2_5_VLForSequenceClassification",
        keys: MROPE_KEYS,
        norm_eps: 1e-5,
        windows: Windows::Switched(4096, 80),
        rope: RopeDefaults {
            theta: 1_000_000.0,
            sections: Some(Sections { sizes: [16, 24, 24], is_interleaved: false }),
            ..RopeDefaults::PLAIN
        },
        kv_heads: Some(8),
        ..QWEN2
    },
    Family {
        name: "qwen3_vl_text",
        causal: "Qwen3VLForConditionalGeneration",
        classifier: "Qwen3VLForSequenceClassification",
        keys: MROPE_KEYS,
        windows: Windows::Never,
        rope: RopeDefaults {
            theta: 500_000.0,
            sections: Some(Sections { sizes: [24, 20, 20], is_interleaved: true }),
            ..RopeDefaults::PLAIN
        },
        context: 128_000,
        ..QWEN3
    },
    QWEN3_5,
    Family {
        name: "qwen3_5_moe_text",
        causal: "Qwen3_5MoeForCausalLM",
        classifier: "Qwen3_5MoeTextForSequenceClassification",
        keys: &[
            "moe_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "output_router_logits",
            "router_aux_loss_coef",
        ],
        experts: Some(Mixture {
            count: 256,
            top_k: 8,
            width: Some(512),
            shared: Some(Shared::Gated(512)),
            old_names: OldNames::None,
            ..MIXTURE
        }),
        kv_heads: Some(2),
        ..QWEN3_5
    },
    Family {
        name: "qwen3_next",
        causal: "Qwen3NextForCausalLM",
        classifier: "Qwen3NextForSequenceClassification",
        keys: MIXTURE_KEYS,
        experts: Some(Mixture {
            count: 512,
            top_k: 10,
            width: Some(512),
            renormalizes: Some(true),
            dense: DenseLayers::Stepped,
            shared: Some(Shared::Gated(512)),
            ..MIXTURE
        }),
        files: FileForm { delta: DeltaForm::ByHead, ..FileForm::PLAIN },
        rope: RopeDefaults { sections: None, ..QWEN3_5.rope },
        kv_heads: Some(2),
        ..QWEN3_5
    },
    Family {
        name: "mixtral",
        causal: "MixtralForCausalLM",
        classifier: "MixtralForSequenceClassification",
        keys: MIXTURE_KEYS,
        experts: Some(Mixture { old_names: OldNames::Numbered, ..MIXTURE }),
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
            dense: DenseLayers::Stepped,
            ..MIXTURE
        }),
        windows: Windows::AllSwitched(4096),
        kv_heads: Some(4),
        context: 32_768,
        ..LLAMA
    },
    Family {
        name: "gpt_oss",
        causal: "GptOssForCausalLM",
        classifier: "GptOssForSequenceClassification",
        keys: &[
            "num_experts",
            "num_experts_per_tok",
            "experts_per_token",
            "num_local_experts",
            "output_router_logits",
            "router_aux_loss_coef",
            "swiglu_alpha",
            "swiglu_limit",
            // The rope has this number, too.
            "initial_context_length",
        ],
        qkv_bias: Bias::Key("attention_bias", true),
        o_bias: Bias::Key("attention_bias", true),
        mlp_bias: Bias::Never,
        sinks: Sinks::PerHead,
        experts: Some(Mixture {
            count: 128,
            top_k: 4,
            has_biases: true,
            clamps: true,
            old_names: OldNames::None,
            ..MIXTURE
        }),
        files: FileForm { experts: ExpertForm::Columns, ..FileForm::PLAIN },
        norm_eps: 1e-5,
        windows: Windows::Periodic(128, 2),
        rope: RopeDefaults { theta: 150_000.0, yarn: Some((32.0, 4096.0)), ..RopeDefaults::PLAIN },
        head_dim: Some(64),
        kv_heads: Some(8),
        context: 131_072,
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
    Family {
        name: "glm4_moe",
        causal: "Glm4MoeForCausalLM",
        classifier: "Glm4MoeForSequenceClassification",
        keys: &["use_qk_norm"],
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::PerHead,
        experts: Some(Mixture {
            count: 128,
            width: Some(1408),
            scoring: Scoring::Sigmoid(1, 1, 1.0),
            dense: DenseLayers::First(1),
            ..SIGMOIDS
        }),
        norm_eps: 1e-5,
        rope: RopeDefaults { partial: Some(0.5), ..RopeDefaults::PLAIN },
        kv_heads: Some(8),
        context: 131_072,
        ..LLAMA
    },
    DEEPSEEK_V3,
    Family {
        name: "glm4_moe_lite",
        causal: "Glm4MoeLiteForCausalLM",
        classifier: "Glm4MoeLiteForSequenceClassification",
        latent: Some(Latent { q_rank: 768, plain: 192, value: 256 }),
        experts: Some(Mixture {
            count: 64,
            top_k: 4,
            width: Some(1536),
            scoring: Scoring::Sigmoid(1, 1, 1.8),
            dense: DenseLayers::Listed,
            ..SIGMOIDS
        }),
        norm_eps: 1e-5,
        context: 202_752,
        ..DEEPSEEK_V3
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
