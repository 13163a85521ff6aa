//! Tiny models, for every test program.

use rlhf_hpc::model::Arch;
use serde_json::{Value, json};

/// A model of a family, with the keys of `more` in its config.json. Eight query heads share two of keys and values, so that every size
/// of the tensor axis up to 8 is legal and copies heads from 4 on; neither the vocabulary nor the MLP divides evenly. Initial values
/// are so large that distributions are not flat.
pub fn arch(family: &str, more: &Value) -> Arch {
    let class = match family {
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        _ => "LlamaForCausalLM",
    };
    let mut config = json!({
        "model_type": family, "architectures": [class], "hidden_size": 48, "intermediate_size": 100,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6,
        "vocab_size": 97, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": family == "qwen3", "initializer_range": 0.15, "eos_token_id": 2,
    });
    let keys = config.as_object_mut().expect("an object");
    keys.extend(more.as_object().expect("an object").clone());
    Arch::from_config(keys).expect("a model that is known")
}
