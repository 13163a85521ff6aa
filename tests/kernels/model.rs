//! The whole model on the GPU compared with the CPU: the same code and the same weights.

use crate::models::{self, relative_gap};
use crate::{device, numbers};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::device::Device;
use rlhf_hpc::model::params::ParamSpec;
use rlhf_hpc::model::{
    Arch, Gradients, Head, Keys, Mixer, ParamTable, Saved, Shards, TensorPart, Transformer, Weights, init,
    packed_positions,
};
use rlhf_hpc::tensor::DType;
use std::sync::Arc;

const SEED: u64 = 11;
pub const VOCABULARY: usize = 77;

/// Two layers with heads of 64, the smallest with all kernels.
fn arch(family: &str, kv_heads: usize) -> Arch {
    arch_with(family, kv_heads, &serde_json::json!({}))
}

fn arch_with(family: &str, kv_heads: usize, keys: &serde_json::Value) -> Arch {
    let mut more = serde_json::json!({
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": kv_heads,
        "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "initializer_range": 0.1,
    });
    more.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
    models::arch(family, &more)
}

/// A mixture of 8 experts, of which each token has `chosen`.
pub fn qwen3_moe(chosen: usize) -> Arch {
    let keys = serde_json::json!({
        "num_experts": 8, "num_experts_per_tok": chosen, "moe_intermediate_size": 40, "norm_topk_prob": true,
    });
    arch_with("qwen3_moe", 1, &keys)
}

pub fn llama() -> Arch {
    arch("llama", 1)
}

/// Biases, qk-norm, tied embeddings and a window come from other families.
pub fn qwen3() -> Arch {
    let mut arch = arch("qwen3", 2);
    let Mixer::Attention(attention) = &mut arch.blocks[1].mixer else { panic!("attention") };
    attention.window = Some(7);
    arch
}

/// Soft caps that most scores and logits reach, one layer with a window, and norms on both sides.
pub fn gemma2() -> Arch {
    let keys = serde_json::json!({
        "sliding_window": 7, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.5,
    });
    arch_with("gemma2", 1, &keys)
}

/// Queries that grow every 16 tokens.
pub fn ministral3() -> Arch {
    let keys = serde_json::json!({"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5,
    }});
    arch_with("ministral3", 1, &keys)
}

/// Heads of which each has a gate, and a mixture with an expert for all tokens that each token weighs.
pub fn gated(chosen: usize) -> Arch {
    qwen3_next("full_attention", chosen)
}

/// A layer with the gated delta rule and one with attention, and a mixture as in `gated`.
pub fn hybrid(chosen: usize) -> Arch {
    qwen3_next("linear_attention", chosen)
}

/// Two layers, the second one with attention.
fn qwen3_next(first: &str, chosen: usize) -> Arch {
    let keys = serde_json::json!({
        "layer_types": [first, "full_attention"], "num_experts": 8, "num_experts_per_tok": chosen,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48, "norm_topk_prob": true,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    });
    arch_with("qwen3_next", 1, &keys)
}

/// A model on the GPU, and the same values on the CPU in f32.
fn both(arch: &Arch) -> [(Transformer, Weights); 2] {
    let head = Head::LanguageModel;
    let on_gpu = init::init_on(Device::Cuda, arch, head, DType::Bf16, SEED, TensorPart::whole());
    let table = Arc::new(ParamTable::new(arch, head));
    let rounded = init::init(arch, head, DType::Bf16, SEED);
    let mut on_cpu = Weights::scratch(table.clone(), DType::F32, &Shards::new(&table, &Axes::one(), 0));
    on_cpu.store_master(0..table.len(), &rounded.to_master(0..table.len()));
    [on_gpu, on_cpu].map(|weights| (Transformer::for_axes(arch, &weights.table, &Axes::one()), weights))
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 31 + 7) % VOCABULARY as u32).collect()
}

/// The values of a gradient, row by row.
pub fn rows(spec: &ParamSpec, flat: &[f32]) -> Vec<f32> {
    let (n, k) = spec.dims();
    let flat = &flat[spec.range()];
    (0..n).flat_map(|row| (0..k).map(move |column| flat[spec.layout.index(k, row, column)])).collect()
}

#[test]
fn hidden_states_log_probabilities_and_gradients_equal_the_cpus_up_to_bf16() {
    let (_gpu, _one) = device();
    follow_the_cpu(&[0, 5, 5, 23, 40]);
}

/// Compares all results of training on rows that end at `ends` with the CPU.
pub fn follow_the_cpu(ends: &[usize]) {
    // With all experts, roundings cannot change their choice.
    for arch in [llama(), qwen3(), qwen3_moe(8), gemma2(), ministral3(), gated(8), hybrid(8)] {
        let models = both(&arch);
        let (t, positions) = (ends[ends.len() - 1], packed_positions(ends));
        let (tokens, picked): (_, Vec<u32>) = (tokens(t), (0..t as u32 - 1).filter(|i| i % 3 != 1).collect());
        let targets: Vec<u32> = picked.iter().map(|&row| tokens[row as usize + 1]).collect();
        let weights = numbers(3, picked.len());
        let run = |(model, w): &(Transformer, Weights)| {
            let mut saved = Saved::new(false);
            let keys = || Keys::Packed(ends.into());
            let hidden = model.forward(w, &tokens, &positions, keys(), Some(&mut saved));
            let scored = model.logprobs(w, &hidden, &picked, &targets, 0.8, true);
            let mut grads = Gradients::new(w.table.clone());
            let mut loss = |r: std::ops::Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], dh: &mut [f32]| {
                dl.copy_from_slice(&weights[r]);
                dh.fill(0.01);
            };
            let (dhidden, logprobs, _) =
                model.logprobs_backward(w, &hidden, &picked, &targets, 0.8, &mut loss, &mut grads);
            model.backward(w, saved, ends, dhidden, &mut grads);
            assert_eq!(scored.0, logprobs, "scoring and training see the same log-probabilities");
            (hidden.to_host(), scored, grads.to_vec())
        };
        let [on_gpu, on_cpu] = models.each_ref().map(run);
        let of_hidden = relative_gap(&on_gpu.0, &on_cpu.0);
        assert!(of_hidden < 2e-2, "hidden {of_hidden}");
        let gap = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(gap(&on_gpu.1.0, &on_cpu.1.0) < 0.06, "log-probabilities {}", gap(&on_gpu.1.0, &on_cpu.1.0));
        assert!(gap(&on_gpu.1.1, &on_cpu.1.1) < 0.06, "entropies {}", gap(&on_gpu.1.1, &on_cpu.1.1));
        let [of_gpu, of_cpu] = models.each_ref().map(|(_, weights)| weights.table.specs());
        for (gpu, cpu) in of_gpu.iter().zip(of_cpu) {
            let gap = relative_gap(&rows(gpu, &on_gpu.2), &rows(cpu, &on_cpu.2));
            assert!(gap < 4e-2, "{}: {gap}", gpu.name);
        }
    }
}

/// The gradients of a model on the GPU, given that of its hidden states over rows that end at `ends`.
pub fn gradients(arch: &Arch, ends: &[usize], recompute: bool) -> Vec<f32> {
    let w = init::init_on(Device::Cuda, arch, Head::LanguageModel, DType::Bf16, SEED, TensorPart::whole());
    let model = Transformer::for_axes(arch, &w.table, &Axes::one());
    let (t, positions) = (ends[ends.len() - 1], packed_positions(ends));
    let mut saved = Saved::new(recompute);
    let hidden = model.forward(&w, &tokens(t), &positions, Keys::Packed(ends.into()), Some(&mut saved));
    let mut grads = Gradients::new(w.table.clone());
    model.backward(&w, saved, ends, hidden, &mut grads);
    grads.to_vec()
}
