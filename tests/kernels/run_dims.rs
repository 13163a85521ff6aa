//! Whole jobs of models with the smallest and the largest head dim that GPUs have kernels for.

use crate::jobs::{CONFIG, metrics, prepare, rlhf_hpc};
use serde_json::Value;

fn number(step: &Value, key: &str) -> f64 {
    step[key].as_f64().unwrap_or_else(|| panic!("{key} is no number: {step}"))
}

/// SFT and PPO of a model with this head dim, with the losses of the same SFT on the CPU, and draws whose log-probabilities
/// training finds again to the bit.
fn jobs_hold(head_dim: usize, heads: usize, kv_heads: usize) {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    let config = CONFIG
        .replace("\"head_dim\": 64", &format!("\"head_dim\": {head_dim}"))
        .replace("\"num_attention_heads\": 2", &format!("\"num_attention_heads\": {heads}"))
        .replace("\"num_key_value_heads\": 1", &format!("\"num_key_value_heads\": {kv_heads}"));
    prepare(at, &config);
    rlhf_hpc(at, &["run", "sft.toml"]);
    rlhf_hpc(at, &["run", "sft.toml", "job.device=cpu", "job.dir=cpu"]);
    let (on_gpu, on_cpu) = (metrics(at, "sft"), metrics(at, "cpu"));
    assert_eq!((on_gpu.len(), on_cpu.len()), (3, 3));
    for (a, b) in on_gpu.iter().zip(&on_cpu) {
        // The first loss is of the same weights; later ones show the gradients.
        for key in ["loss", "grad_norm"] {
            let (a, b) = (number(a, key), number(b, key));
            assert!((a - b).abs() < 0.02 * b, "head dim {head_dim}: {key} {a} on the GPU, {b} on the CPU");
        }
    }
    rlhf_hpc(at, &["run", "ppo.toml"]);
    let steps = metrics(at, "ppo");
    assert_eq!(steps.len(), 2);
    for step in &steps {
        assert_eq!(number(step, "logprob_gap_max"), 0.0, "{step}");
        assert!(number(step, "grad_norm_actor") > 0.0 && number(step, "grad_norm_critic") > 0.0, "{step}");
    }
}

#[test]
fn sft_and_ppo_of_heads_of_32_are_those_of_the_cpu() {
    jobs_hold(32, 4, 2);
}

#[test]
fn sft_and_ppo_of_heads_of_256_are_those_of_the_cpu() {
    jobs_hold(256, 2, 1);
}
