//! Whole jobs for tests: a tiny model, its data, and the binary on one rank or several.

use crate::{emulation, on_a_real_gpu};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
 "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
 "vocab_size": 264, "max_position_embeddings": 128, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "bos_token_id": 0, "eos_token_id": 1}"#;

pub const SFT: &str = r#"
[job]
kind = "sft"
dir = "sft"
steps = 3
device = "gpu"
gemm = "exact"
check = false
[model]
actor = "model"
dtype = "bf16"
[data]
prompts = ["rows.jsonl"]
prompt_key = "prompt"
response_key = "response"
[sft]
minibatch_samples = 8
microbatch_tokens_max = 128
"#;

pub const PPO: &str = r#"
[job]
kind = "ppo"
dir = "ppo"
steps = 2
device = "gpu"
gemm = "exact"
check = false
[model]
actor = "sft/export"
dtype = "bf16"
[data]
prompts = ["rows.jsonl"]
prompt_key = "prompt"
[rollout]
prompts_per_step = 4
samples_per_prompt = 2
response_tokens_max = 8
[[reward.rule]]
kind = "length"
[ppo]
minibatch_samples = 4
microbatch_tokens_max = 128
"#;

/// The binary beside this target where both were brought to another machine, else the one that was built.
pub fn binary() -> PathBuf {
    let beside = std::env::current_exe().expect("the path of this target").with_file_name("rlhf-hpc");
    if beside.exists() { beside } else { PathBuf::from(env!("CARGO_BIN_EXE_rlhf-hpc")) }
}

pub fn rlhf_hpc(dir: &Path, args: &[&str]) {
    let mut command = Command::new(binary());
    command.current_dir(dir).args(args);
    if !on_a_real_gpu() {
        command.envs(emulation::environment());
    }
    let done = command.output().expect("the binary starts");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{args:?}: {}\n{said}", done.status);
}

/// The same under the launcher, on `ranks` ranks. Variables of `env` are set for all of them.
pub fn on_ranks(ranks: usize, dir: &Path, args: &[&str], env: &[(&str, &str)]) {
    let done = Command::new("mpirun")
        .current_dir(dir)
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
        .arg(binary())
        .args(args)
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .envs(emulation::environment())
        .envs(env.iter().copied())
        .output()
        .expect("mpirun starts");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{args:?}: {}\n{said}", done.status);
}

/// Writes rows, a tokenizer, a model of `config` as "model", and the jobs sft.toml and ppo.toml.
pub fn prepare(dir: &Path, config: &str) {
    rlhf_hpc(dir, &["corpus", "--rows", "200", "--seed", "1", "--out", "rows.jsonl"]);
    rlhf_hpc(dir, &["tokenizer", "rows.jsonl", "--vocabulary", "264", "--out", "tokenizer"]);
    for (name, text) in [("model.json", config), ("sft.toml", SFT), ("ppo.toml", PPO)] {
        std::fs::write(dir.join(name), text).expect("a file");
    }
    rlhf_hpc(dir, &["init", "--config", "model.json", "--tokenizer", "tokenizer", "--out", "model"]);
}

pub fn metrics(dir: &Path, job: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join(job).join("metrics.jsonl")).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect()
}

/// Keys of metrics.jsonl that tell other samples, or other updates, from the same ones.
pub const TELLING: [&str; 7] = [
    "reward_mean",
    "entropy",
    "policy_loss",
    "grad_norm_actor",
    "grad_norm_critic",
    "response_tokens_mean",
    "response_truncated_ratio",
];

/// Fewer lanes than samples, an end before the longest length, filters, and stop tokens that are banned at first.
pub const SAMPLING: [&str; 9] = [
    "model.actor=model",
    "rollout.batch_max=5",
    "rollout.samples_per_prompt=3",
    "rollout.response_tokens_max=20",
    "rollout.response_tokens_min=3",
    "rollout.stop=[\"a\"]",
    "rollout.stop_token_ids=[40, 41, 42, 43, 44, 45]",
    "rollout.top_p=0.97",
    "ppo.minibatch_samples=6",
];
