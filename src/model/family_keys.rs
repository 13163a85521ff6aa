//! The keys of config.json that not every family reads.

use super::families::{Family, Mixture, Scoring, Shared};

/// The key of Gemma's encoders, whose tokens see later ones.
pub(super) const BIDIRECTIONAL: &str = "use_bidirectional_attention";

/// The number of layers after the last one, which predict further tokens.
pub(super) const FURTHER_LAYERS: &str = "num_nextn_predict_layers";

/// Keys of families with the gated delta rule.
const DELTA_KEYS: &[&str] = &[
    "attn_output_gate",
    "full_attention_interval",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_ssm_dtype",
    "mrope_interleaved",
    "mrope_section",
    // Layers that predict further tokens, whose tensors an export keeps.
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
];

/// Keys of families whose positions count the rows and columns of pictures.
pub(super) const MROPE_KEYS: &[&str] = &["mrope_interleaved", "mrope_section"];

/// Keys of families with mixtures of experts.
pub(super) const MIXTURE_KEYS: &[&str] = &[
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

/// Keys of families with the mixtures of experts of DeepSeek-V3.
const SIGMOID_KEYS: &[&str] = &[
    "first_k_dense_replace",
    "mlp_layer_types",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    FURTHER_LAYERS,
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
];

/// Keys of families with latent attention.
const LATENT_KEYS: &[&str] = &[
    "kv_lora_rank",
    "q_lora_rank",
    // The sum of the two below.
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rope_interleave",
    "v_head_dim",
];

impl Family {
    /// The keys of config.json that not every family reads.
    pub(super) fn own_keys(&self) -> Vec<&'static str> {
        let has_gate = matches!(self.experts, Some(Mixture { shared: Some(Shared::Gated(_)), .. }));
        let of_parts = [
            (self.is_hybrid, DELTA_KEYS),
            (self.latent.is_some(), LATENT_KEYS),
            (self.has_sigmoids(), SIGMOID_KEYS),
            (has_gate, &["shared_expert_intermediate_size"]),
        ];
        let of_parts = of_parts.into_iter().filter(|(has_part, _)| *has_part).flat_map(|(_, keys)| keys);
        self.keys.iter().chain(of_parts).copied().collect()
    }

    /// Whether language models of the family are always inside a model that reads images.
    pub fn is_inside(&self) -> bool {
        self.causal.ends_with("ForConditionalGeneration")
    }

    /// Whether routers have sigmoids. Such a family may have layers that predict further tokens.
    pub(super) fn has_sigmoids(&self) -> bool {
        self.experts.is_some_and(|mixture| mixture.scoring != Scoring::Softmax)
    }
}
