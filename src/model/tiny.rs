//! The config.json of tiny models: that of a family, or another model's scaled down.

use super::arch::Arch;
use super::config_json::{FULL, LINEAR, SLIDING};
use super::families::{Bias, Family, Windows};
use super::rope::Sections;
use super::vision_spec::is_known;
use super::wrapper::{TEXT, VISION, WRAPPERS};
use crate::error::Result;
use serde_json::{Map, Value, json};

/// The vocabulary of a model without a tokenizer.
pub const VOCABULARY: usize = 512;
/// Sizes that have kernels on a GPU.
const WIDTH: usize = 64;
const MLP_WIDTH: usize = 96;
const EXPERT_WIDTH: usize = 48;
const EXPERTS: usize = 8;
const EXPERTS_PER_TOKEN: usize = 2;
const HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const LAYERS: usize = 4;
const CONTEXT: usize = 512;
const WINDOW: usize = 32;

/// The sizes of the gated delta rule.
const DELTA: [(&str, usize); 5] = [
    ("linear_num_key_heads", 2),
    ("linear_num_value_heads", 8),
    ("linear_key_head_dim", 32),
    ("linear_value_head_dim", 16),
    ("linear_conv_kernel_dim", 4),
];

/// The sizes of latent attention.
const LATENT: [(&str, usize); 5] =
    [("q_lora_rank", 32), ("kv_lora_rank", 32), ("qk_nope_head_dim", 16), ("qk_rope_head_dim", 16), ("v_head_dim", 16)];

/// Keys of config.json that do not follow from a family's entry: scales, which are not 1, and the usual scaling of its
/// rope.
const KEYS: &[(&str, &str)] = &[
    (
        "llama",
        r#"{"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128}}"#,
    ),
    (
        "ministral3",
        r#"{"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
            "llama_4_scaling_beta": 0.1}}"#,
    ),
    (
        "gpt_oss",
        r#"{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48, "swiglu_limit": 7.0,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 128}}"#,
    ),
    ("mixtral", r#"{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}"#),
    (
        "qwen3_moe",
        r#"{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": false}"#,
    ),
    (
        "glm4_moe",
        r#"{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
            "routed_scaling_factor": 1.5, "use_qk_norm": true, "num_nextn_predict_layers": 0}"#,
    ),
    (
        "deepseek_v3",
        r#"{"num_key_value_heads": 2, "head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
            "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": true,
            "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0, "rope_interleave": true}"#,
    ),
    (
        "glm4_moe_lite",
        r#"{"num_key_value_heads": 2, "head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
            "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_group": 1,
            "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.5}"#,
    ),
    (
        "qwen3_next",
        r#"{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40, "norm_topk_prob": true, "decoder_sparse_step": 1,
            "mlp_only_layers": []}"#,
    ),
    (
        "qwen3_5_moe_text",
        r#"{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40}"#,
    ),
    ("smollm3", r#"{"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4}"#),
    ("seed_oss", r#"{"residual_dropout": 0.0}"#),
    (
        "granite",
        r#"{"embedding_multiplier": 12.0, "attention_multiplier": 0.03125, "residual_multiplier": 0.22,
            "logits_scaling": 8.0}"#,
    ),
    (
        "phi3",
        r#"{"original_max_position_embeddings": 128, "rope_parameters": {"rope_type": "longrope",
            "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 128,
            "short_factor": [1.0, 1.0, 1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.4, 1.5, 1.6],
            "long_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.4, 2.8, 3.2, 3.5, 3.7, 3.9, 4.0]}}"#,
    ),
    (
        "olmo3",
        r#"{"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 128}}}"#,
    ),
    ("gemma2", r#"{"query_pre_attn_scalar": 24, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}"#),
    (
        "gemma3_text",
        r#"{"query_pre_attn_scalar": 24, "rope_parameters": {"sliding_attention": {"rope_type": "default",
            "rope_theta": 10000.0}, "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0,
            "factor": 8.0}}}"#,
    ),
];

/// The config.json of a tiny language model of `family`, without special tokens.
///
/// # Panics
/// If an entry of `KEYS` is not a JSON object.
pub fn of_family(family: &Family, vocabulary: usize) -> Map<String, Value> {
    let (activation, kind) = family.activation;
    let layers = layers(family);
    let config = json!({
        "architectures": [family.causal], "model_type": family.name, "vocab_size": vocabulary, "hidden_size": WIDTH,
        "intermediate_size": MLP_WIDTH, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, activation: kind.name(), "max_position_embeddings": CONTEXT,
        "rms_norm_eps": family.norm_eps, "initializer_range": 0.02, "tie_word_embeddings": family.tied,
        "attention_dropout": 0.0, "bos_token_id": null, "eos_token_id": null, "pad_token_id": null, "dtype": "float32",
        "rope_parameters": ropes(family)
    });
    let Value::Object(mut config) = config else { unreachable!("it is an object") };
    for bias in [family.qkv_bias, family.o_bias, family.mlp_bias] {
        if let Bias::Key(key, default) = bias {
            config.insert(key.into(), default.into());
        }
    }
    let slides: Option<Box<dyn Fn(usize) -> bool>> = match family.windows {
        Windows::Never | Windows::AllSwitched(_) => None,
        Windows::Everywhere(default) => {
            config.insert("sliding_window".into(), default.map(|_| WINDOW).into());
            None
        }
        Windows::Switched(..) => {
            config.insert("max_window_layers".into(), (layers / 2).into());
            Some(Box::new(|layer| layer >= layers / 2))
        }
        Windows::Periodic(_, period) => Some(Box::new(move |layer| !(layer + 1).is_multiple_of(period))),
        Windows::WithoutRope => Some(Box::new(|layer| layer + 1 == layers)),
    };
    if let Some(slides) = slides {
        let types = (0..layers).map(|layer| if slides(layer) { SLIDING } else { FULL });
        config.insert("layer_types".into(), types.collect());
        config.insert("sliding_window".into(), WINDOW.into());
        if !matches!(family.windows, Windows::Periodic(..)) {
            config.insert("use_sliding_window".into(), true.into());
        }
    }
    if family.is_hybrid {
        for (key, size) in DELTA {
            config.insert(key.into(), size.into());
        }
        let types = (0..layers).map(|layer| if layer + 1 == layers { FULL } else { LINEAR });
        config.insert("layer_types".into(), types.collect());
    }
    let own = KEYS.iter().find(|(name, _)| *name == family.name).map_or("{}", |(_, keys)| keys);
    config.extend(serde_json::from_str::<Map<String, Value>>(own).expect("KEYS has JSON objects"));
    config
}

/// The layers of a tiny model, which has all kinds of them.
fn layers(family: &Family) -> usize {
    if let Windows::Periodic(_, period) = family.windows { LAYERS.max(period) } else { LAYERS }
}

/// The rotary embeddings of a family without a scaling.
fn ropes(family: &Family) -> Value {
    let rope = |theta: f64| {
        let mut rope = json!({"rope_type": "default", "rope_theta": theta});
        if let Some(partial) = family.rope.partial {
            rope["partial_rotary_factor"] = partial.into();
        }
        rope
    };
    let theta = family.rope.theta;
    if let Some(sections) = family.rope.sections.filter(|_| family.is_inside()) {
        return divided(rope(theta), sections);
    }
    match family.rope.by_layer {
        Some(sliding) => json!({FULL: rope(theta), SLIDING: rope(sliding.unwrap_or(theta))}),
        None => rope(theta),
    }
}

/// The config.json of a tiny model that has the kinds of layers, scales and rope of `arch`, without special tokens.
pub fn scaled(arch: &Arch, vocabulary: usize) -> Map<String, Value> {
    scaled_over(arch, vocabulary, 1)
}

/// The same with at least one head for each of `tensor` ranks that share its matrices.
pub fn scaled_over(arch: &Arch, vocabulary: usize, tensor: usize) -> Map<String, Value> {
    let layers = arch.blocks.len().min(layers(arch.family));
    let mut config = arch.source.clone();
    let attention = arch.attention();
    let (head_dim, heads) = (HEAD_DIM.min(attention.head_dim), HEADS.max(tensor).min(attention.heads));
    let (context, is_latent) = (arch.positions.min(CONTEXT), attention.latent.is_some());
    for (key, size) in [
        ("vocab_size", vocabulary),
        ("hidden_size", heads * head_dim),
        ("num_hidden_layers", layers),
        ("num_attention_heads", heads),
        ("num_key_value_heads", if attention.kv_heads == attention.heads || is_latent { heads } else { 1 }),
        ("head_dim", head_dim),
        ("max_position_embeddings", context),
    ] {
        config.insert(key.into(), size.into());
    }
    let sizes = if arch.family.is_hybrid { &DELTA[..] } else { &[] };
    let sizes = sizes.iter().chain(if arch.family.latent.is_some() { &LATENT[..] } else { &[] });
    for (key, most) in sizes {
        let own = match config.get(*key) {
            Some(Value::Null) => continue,
            own => own.and_then(Value::as_u64).map_or(*most, |size| (*most).min(size as usize)),
        };
        config.insert((*key).into(), own.into());
    }
    if let Some(rotated) = config.get("qk_rope_head_dim").cloned() {
        config.insert("head_dim".into(), rotated);
        config.shift_remove("qk_head_dim");
    }
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        config.insert(key.into(), Value::Null);
    }
    config.shift_remove("torch_dtype");
    config.insert("dtype".into(), "float32".into());
    let pairs = arch.ropes[0].rotated(head_dim) / 2;
    let shares = Shares { layers: (layers, arch.blocks.len()), context: (context, arch.positions), pairs };
    shares.scale(&mut config);
    config
}

/// The shares (new, old) of sizes that are scaled, and the new number of rotated pairs of columns in a head.
struct Shares {
    layers: (usize, usize),
    context: (usize, usize),
    pairs: usize,
}

impl Shares {
    /// Scales the keys that depend on the sizes of a model, in config.json or an object of it.
    fn scale(&self, config: &mut Map<String, Value>) {
        let share = |value: &Value, (new, old): (usize, usize), least: usize| {
            value.as_u64().map_or_else(|| value.clone(), |n| (n as usize * new / old).max(least).into())
        };
        let limited = |value: &Value, most: usize| value.as_u64().map(|n| n.min(most as u64)).into();
        for (key, value) in config {
            match (key.as_str(), &mut *value) {
                ("original_max_position_embeddings" | "initial_context_length" | "sliding_window", _) => {
                    *value = share(value, self.context, 2);
                }
                ("max_window_layers" | "first_k_dense_replace", _) => *value = share(value, self.layers, 0),
                ("intermediate_size", _) => *value = limited(value, MLP_WIDTH),
                ("moe_intermediate_size" | "shared_expert_intermediate_size", _) => {
                    *value = limited(value, EXPERT_WIDTH);
                }
                // Two experts in a group.
                ("n_group" | "topk_group", _) => *value = limited(value, EXPERTS / 2),
                ("n_routed_experts" | "num_experts" | "num_local_experts", _) => *value = limited(value, EXPERTS),
                ("num_experts_per_tok" | "experts_per_token", _) => *value = limited(value, EXPERTS_PER_TOKEN),
                ("mlp_only_layers", Value::Array(list)) => {
                    list.retain(|layer| layer.as_u64().is_some_and(|layer| layer < self.layers.0 as u64));
                }
                ("layer_types" | "mlp_layer_types" | "no_rope_layers", Value::Array(list)) => {
                    list.truncate(self.layers.0);
                }
                ("short_factor" | "long_factor", Value::Array(list)) => list.truncate(self.pairs),
                ("mrope_section", Value::Array(list)) => *list = sections(list, self.pairs),
                (_, Value::Object(object)) => self.scale(object),
                _ => {}
            }
        }
    }
}

/// A rotary embedding with `sections` for time, rows and columns.
fn divided(mut rope: Value, Sections { sizes, is_interleaved }: Sections) -> Value {
    let partial = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    let pairs = (HEAD_DIM as f64 * partial) as usize / 2;
    rope["mrope_section"] = sections(&sizes.map(Value::from), pairs).into();
    rope["mrope_interleaved"] = is_interleaved.into();
    rope
}

/// Sections of `pairs` frequencies in all, with the shares of `old` ones.
fn sections(old: &[Value], pairs: usize) -> Vec<Value> {
    let sizes: Vec<usize> = old.iter().map(|size| size.as_u64().unwrap_or(0) as usize).collect();
    let sum = sizes.iter().sum::<usize>().max(1);
    let mut scaled: Vec<usize> = sizes.iter().map(|size| size * pairs / sum).collect();
    let left = pairs - scaled.iter().sum::<usize>();
    if let Some(last) = scaled.last_mut() {
        *last += left;
    }
    scaled.into_iter().map(Value::from).collect()
}

/// The config.json of a tiny model that reads images, around that of its language model of `family`; that alone, if no
/// tower around it is known. `token` returns the id of a token by its name. The image of a side of 64 pixels is 16 tokens.
///
/// # Errors
/// The error of `token`.
pub fn seeing(
    family: &Family,
    mut text: Map<String, Value>,
    mut token: impl FnMut(&str) -> Result<u32>,
) -> Result<Map<String, Value>> {
    let Some(kind) = WRAPPERS.iter().find(|kind| kind.family == family.name && is_known(kind.name)) else {
        return Ok(text);
    };
    let rope = text.get("rope_parameters").filter(|rope| rope.get("mrope_section").is_none());
    if let (Some(rope), Some(sections)) = (rope, family.rope.sections) {
        let rope = divided(rope.clone(), sections);
        text.insert("rope_parameters".into(), rope);
    }
    let width = text.get("hidden_size").cloned().unwrap_or_default();
    let mut tower = json!({
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": width,
        "initializer_range": 0.02, "model_type": format!("{}_vision", kind.name)
    });
    let own = match kind.name {
        "qwen2_5_vl" => json!({"hidden_act": "silu", "window_size": 32, "fullatt_block_indexes": [1]}),
        _ => json!({"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 64,
                    "deepstack_visual_indexes": if kind.name == "qwen3_vl" { vec![0] } else { Vec::new() }}),
    };
    let (Value::Object(tower), Value::Object(own)) = (&mut tower, own) else { unreachable!("they are objects") };
    tower.extend(own);
    let mut config = json!({"architectures": [kind.class], "model_type": kind.name, VISION: tower});
    for (key, name) in [
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ] {
        config[key] = token(name)?.into();
    }
    config["tie_word_embeddings"] = text.get("tie_word_embeddings").cloned().unwrap_or_default();
    config["dtype"] = text.get("dtype").cloned().unwrap_or_default();
    config[TEXT] = Value::Object(text);
    let Value::Object(config) = config else { unreachable!("it is an object") };
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_a_tiny_model_with_all_kinds_of_its_layers() {
        for name in Family::names() {
            let family = Family::named_or_inside(name).unwrap();
            let arch = Arch::from_config(&of_family(family, 300)).unwrap_or_else(|e| panic!("{name}: {e}"));
            let windows: Vec<bool> = arch.attentions().map(|layer| layer.window.is_some()).collect();
            let has_both = windows.contains(&true) && windows.contains(&false);
            let is_mixed = !matches!(family.windows, Windows::Never | Windows::Everywhere(_) | Windows::AllSwitched(_));
            assert_eq!((arch.family.name, has_both), (name, is_mixed), "{windows:?}");
            assert_eq!(arch.rotations().unwrap().len(), arch.ropes.len(), "{name}");
            // A model that is tiny keeps its kinds of layers.
            let again = Arch::from_config(&scaled(&arch, 300)).unwrap();
            assert!(again.computes_as(&arch), "{name}: {again:?}\n{arch:?}");
        }
        let known = |name: &str| Family::names().any(|family| family == name);
        assert!(KEYS.iter().all(|(name, _)| known(name)));
    }
}
