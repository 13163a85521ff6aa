//! Models on one rank, and their shards on a mesh.

use crate::models;
use crate::weights::weights;
use rlhf_hpc::comm::Axes;
use rlhf_hpc::device::Device;
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::model::pack::{held_at, pack_f32, unpack};
use rlhf_hpc::model::{Arch, Gradients, Head, ParamSpec, Saved, TensorPart, Transformer, Weights};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::tensor::DType;
use serde_json::{Value, json};
use std::ops::Range;

/// A model of the family that its name begins with.
fn shape(name: &'static str, keys: &Value) -> (&'static str, Arch) {
    (name, models::arch(name.split('-').next().expect("a family"), keys))
}

/// Models that are difficult to split: a name, and the unusual keys.
pub fn shapes() -> Vec<(&'static str, Arch)> {
    vec![
        shape("llama", &json!({})),
        shape(
            "llama-tied",
            &json!({"num_key_value_heads": 1, "vocab_size": 301, "intermediate_size": 37, "tie_word_embeddings": true,
                "attention_bias": true, "mlp_bias": true}),
        ),
        shape("mistral", &json!({"num_key_value_heads": 8, "sliding_window": 7})),
        shape("mistral-grouped", &json!({"num_key_value_heads": 4, "sliding_window": 3, "intermediate_size": 130})),
        shape("qwen2", &json!({"tie_word_embeddings": true})),
        shape("qwen3", &json!({"num_key_value_heads": 1, "intermediate_size": 259, "tie_word_embeddings": false})),
        shape("qwen3-tied", &json!({"vocab_size": 515, "attention_bias": true})),
        shape(
            "qwen3-irregular",
            &json!({"num_attention_heads": 12, "num_key_value_heads": 3, "vocab_size": 101, "intermediate_size": 51,
                "tie_word_embeddings": false}),
        ),
    ]
}

/// The same of families whose norms, caps, ropes and files differ.
fn dense() -> Vec<(&'static str, Arch)> {
    vec![
        // All heads of a row are normed together.
        shape("olmo2", &json!({"num_key_value_heads": 1})),
        shape(
            "olmo3-irregular",
            &json!({"num_attention_heads": 12, "num_key_value_heads": 3, "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"]}),
        ),
        shape("gemma2", &capped()),
        // Heads that are reordered or joined in files.
        shape("glm4", &json!({"head_dim": 8, "partial_rotary_factor": 0.5})),
        shape("phi3", &long()),
        // The gated delta rule in the first layer, gates on the heads of the second.
        shape(
            "qwen3_5_text",
            &json!({"head_dim": 8, "partial_rotary_factor": 0.5, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
                "linear_key_head_dim": 6, "linear_value_head_dim": 5,
                "layer_types": ["linear_attention", "full_attention"]}),
        ),
        // Experts whose width has a panel and a part of one.
        shape("mixtral", &json!({"num_local_experts": 4, "intermediate_size": 70})),
        shape("qwen3_moe", &experts()),
        // Both.
        shape("qwen3_next", &hybrid_experts()),
        // Latent attention, whose matrices of heads are on one rank each.
        shape("deepseek_v3", &latent()),
        shape(
            "deepseek_v3",
            &json!({"q_lora_rank": null, "attention_bias": true, "num_key_value_heads": 8, "head_dim": 4,
            "kv_lora_rank": 34, "qk_nope_head_dim": 33, "qk_rope_head_dim": 4, "v_head_dim": 35, "n_routed_experts": 5,
            "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
            "first_k_dense_replace": 1}),
        ),
        // Sinks of heads, and biases of experts.
        shape("gpt_oss", &sinks()),
    ]
}

/// Keys of deepseek_v3: compressed queries, groups of experts, and a shared one.
pub fn latent() -> Value {
    json!({"num_key_value_heads": 8, "head_dim": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4,
        "v_head_dim": 7, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "first_k_dense_replace": 1})
}

/// Keys of families with the gated delta rule and experts.
pub fn hybrid_experts() -> Value {
    json!({"head_dim": 8, "partial_rotary_factor": 0.5, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 8, "linear_value_head_dim": 7, "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 36})
}

/// Keys of gemma2: caps that bend scores and logits, and a window in the first layer.
pub fn capped() -> Value {
    json!({"sliding_window": 7, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0, "tie_word_embeddings": true})
}

/// Keys of qwen3_moe: experts whose weights do not sum to 1, and a dense layer.
pub fn experts() -> Value {
    json!({"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]})
}

/// The same with eight experts in both layers.
pub fn eight_experts() -> Value {
    json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40})
}

/// Keys of gpt_oss: limits that gates and ups exceed, a window in the first layer, and eight experts.
pub fn sinks() -> Value {
    json!({"intermediate_size": 40, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7,
        "swiglu_limit": 0.4})
}

/// Keys of phi3: heads of 8 columns, of which 6 are rotated, with LongRoPE.
pub fn long() -> Value {
    json!({"hidden_size": 64, "head_dim": 8, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.1, 1.7, 0.6], "long_factor": [2.3, 4.1, 9.7]}})
}

/// The `shapes` that can be divided over `tensor` tensor ranks.
pub fn cut_shapes(tensor: usize) -> Vec<(&'static str, Arch)> {
    shapes().into_iter().filter(|(_, arch)| arch.check_tensor(tensor).is_ok()).collect()
}

/// The same with the `dense` ones.
pub fn all_cut_shapes(tensor: usize) -> Vec<(&'static str, Arch)> {
    let dense = dense().into_iter().filter(|(_, arch)| arch.check_tensor(tensor).is_ok());
    cut_shapes(tensor).into_iter().chain(dense).collect()
}

/// This rank's part of a language model.
pub struct Side {
    pub transformer: Transformer,
    pub weights: Weights,
    axes: Axes,
}

/// The results of the passes: those for the rows of this rank, and the flat gradient.
pub struct Passed {
    pub hidden: Vec<f32>,
    pub logprobs: Vec<f32>,
    pub entropies: Vec<f32>,
    pub grads: Vec<f32>,
}

impl Side {
    pub fn new(arch: &Arch, dtype: DType, axes: &Axes) -> Self {
        let weights = weights(Device::Cpu, arch, Head::LanguageModel, dtype, 7, TensorPart::from_group(&axes.tensor));
        Self { transformer: Transformer::for_axes(arch, &weights.table, axes), weights, axes: axes.clone() }
    }

    pub fn part(&self, row: &PackedRow) -> PackedRow {
        row.part(self.axes.sequence.rank(), self.axes.sequence.size())
    }

    pub fn forward(&self, part: &PackedRow, saved: Option<&mut Saved>) -> Vec<f32> {
        let Self { transformer, weights, .. } = self;
        transformer.forward(weights, &part.tokens, &part.positions, part.keys(), saved).data().to_vec()
    }

    pub fn pass(&self, row: &PackedRow, recompute: bool) -> Passed {
        let Self { transformer, weights, .. } = self;
        let part = self.part(row);
        let mut saved = Saved::new(recompute);
        let hidden = transformer.forward(weights, &part.tokens, &part.positions, part.keys(), Some(&mut saved));
        let mut grads = Gradients::new(weights.table.clone());
        let mut loss = |range: Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], de: &mut [f32]| {
            for ((dl, de), &place) in dl.iter_mut().zip(de).zip(&part.row_indices[range]) {
                (*dl, *de) = (0.2 + (place * 37 % 11) as f32 * 0.1, 0.05 * (place as f32).sin());
            }
        };
        let (rows, targets) = (&part.rows, &part.targets);
        let (dhidden, logprobs, entropies) =
            transformer.logprobs_backward(weights, &hidden, rows, targets, 0.7, &mut loss, &mut grads);
        let scored = transformer.logprobs(weights, &hidden, rows, targets, 0.7, true);
        assert_eq!((&scored.0, &scored.1), (&logprobs, &entropies), "scoring and training");
        let hidden = hidden.data().to_vec();
        transformer.backward(weights, saved, &part.cu_seqlens, dhidden, &mut grads);
        Passed { hidden, logprobs, entropies, grads: grads.to_vec() }
    }
}

/// Sequences of random tokens. Some tokens have no target.
pub fn row(arch: &Arch, lengths: &[usize]) -> PackedRow {
    let rng = Rng::new(11, Purpose::Synthetic);
    let mut row = PackedRow::new();
    for (i, &length) in lengths.iter().enumerate() {
        let token = |at| 3 + rng.below(arch.vocabulary as u64 - 3, [i as u32, at as u32, 0, 0]) as u32;
        let tokens: Vec<u32> = (0..length).map(token).collect();
        row.push_where(&tokens, |at| at % 7 != 3);
    }
    row
}

/// The flat f32 values.
pub fn floats(weights: &Weights) -> Vec<f32> {
    weights.to_master(0..weights.table.len()).to_vec()
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Asserts ||got - want|| <= tolerance ||want||, and returns the relative distance.
#[track_caller]
pub fn assert_near(what: &str, got: &[f32], want: &[f32], tolerance: f64) -> f64 {
    let gap = models::relative_gap(got, want);
    assert!(gap <= tolerance, "{what}: {gap:e} apart");
    gap
}

/// The values of a part, from those of the whole parameter.
pub fn shard(whole: &ParamSpec, from: &[f32], part: &ParamSpec) -> Vec<f32> {
    let (rows, mut out) = (unpack(whole, from), vec![0.0; part.len]);
    pack_f32(part, &|at, to| to.copy_from_slice(&rows[at..at + to.len()]), 0..part.len, &mut out);
    out
}

/// The values of the whole parameter, from those of its parts; of copies, which are equal to the bit where `equal`, the
/// last.
pub fn gather(parts: &[(&ParamSpec, &[f32])], whole: &ParamSpec, equal: bool) -> Vec<f32> {
    let value = |i: usize| {
        let held = parts.iter().rev().filter_map(|(spec, values)| Some(values[held_at(spec, i)?.0 - spec.offset]));
        let copies: Vec<f32> = held.collect();
        let are_equal = copies.iter().all(|copy| copy.to_bits() == copies[0].to_bits());
        assert!(are_equal || !equal, "{}: copies of element {i} are {copies:?}", whole.name);
        copies[0]
    };
    let rows: Vec<f32> = (0..whole.elements()).map(value).collect();
    let mut out = vec![0.0; whole.len];
    pack_f32(whole, &|at, to| to.copy_from_slice(&rows[at..at + to.len()]), 0..whole.len, &mut out);
    out
}
