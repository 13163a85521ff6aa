//! Architectures and jobs for the tests.

use rlhf_hpc::config::mesh::RoleName::{Actor, Critic, Reference, Reward};
use rlhf_hpc::config::{self, Config};
use rlhf_hpc::model::{Arch, Head, ParamTable, TensorPart};
use rlhf_hpc::plan::Device;
use rlhf_hpc::train::Archs;
use serde_json::{Value, json};
use std::path::Path;

/// The shape of Llama-2-7B.
pub fn llama2_7b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2,
    })
}

/// Some millions of parameters.
pub fn small() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 256,
        "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 512, "tie_word_embeddings": false, "torch_dtype": "float32",
    })
}

/// The same with eight experts in each layer.
pub fn mixture() -> Value {
    let mut config = small();
    let keys = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 704, "norm_topk_prob": true, "head_dim": 32,
    });
    config.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
    config
}

pub fn arch(config: &Value) -> Arch {
    Arch::from_config(config.as_object().expect("an object")).expect("a model")
}

/// The same model in every role; a reward model where `reward`.
pub fn archs(config: &Value, reward: bool) -> Archs {
    let roles = [(Actor, Head::LanguageModel), (Reference, Head::LanguageModel), (Critic, Head::Value)];
    let all = roles.into_iter().chain(reward.then_some((Reward, Head::Value)));
    Archs(all.map(|(role, head)| (role, head, arch(config))).collect())
}

/// The reference workload.
pub const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/jobs/llama2-7b.toml");

/// One layout, which is not compared with others.
pub const NAMED: [&str; 3] = ["mesh.tensor=1", "rollout.tensor=1", "mesh.zero=3"];

/// Its keys, without its reward model, and `more`.
pub fn job(more: &[&str]) -> Config {
    let more: Vec<String> = ["reward.models=[]", "reward.rule=length", "gradient.recompute=block"]
        .iter()
        .chain(more)
        .map(ToString::to_string)
        .collect();
    config::load(Path::new(REFERENCE), &more).expect("a job")
}

/// The length of a rank's flat vector if ranks share `arch`, padding included.
pub fn table(arch: &Arch, head: Head, tensor: usize) -> ParamTable {
    ParamTable::on(rlhf_hpc::device::Device::Cpu, arch, head, TensorPart { rank: 0, size: tensor })
}

pub fn a800() -> Device {
    Device::gpu("a800-80g", 25.0).expect("it is in the table")
}
