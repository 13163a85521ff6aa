//! Models that cannot be loaded, and the errors.

use crate::parity::golden::{Model, directory};
use rlhf_hpc::device::Device;
use rlhf_hpc::error::{Error, Kind};
use rlhf_hpc::model::{Head, Keys, load};
use rlhf_hpc::tensor::DType;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// A copy of a golden model that a test may damage.
pub fn copy(name: &str) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(directory(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// The error of loading `dir`, which must be of bad data.
fn refusal(dir: &Path, head: Head) -> Error {
    let error = load::load(Device::Cpu, dir, head, DType::F32, 0).map(|_| ()).expect_err("loading must fail");
    assert_eq!(error.kind, Kind::Data, "{error}");
    assert_eq!(error.exit_code(), 65);
    error
}

/// Asserts that loading `dir` fails with a message that contains all of `parts`.
fn refuses(dir: &Path, parts: &[&str]) {
    let error = refusal(dir, Head::LanguageModel);
    for part in parts {
        assert!(error.to_string().contains(part), "no \"{part}\" in: {error}");
    }
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Rewrites model.safetensors with another header (given the old one) and other data.
pub fn edit_safetensors(path: &Path, edit: impl FnOnce(&mut Value, &mut Vec<u8>)) {
    let bytes = fs::read(path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let mut data = bytes[8 + header_len..].to_vec();
    edit(&mut header, &mut data);
    let header = header.to_string().into_bytes();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(data);
    fs::write(path, bytes).unwrap();
}

fn rename(header: &mut Value, from: &str, to: &str) {
    let tensor = header.as_object_mut().unwrap().remove(from).unwrap();
    header[to] = tensor;
}

#[test]
fn a_directory_without_config_or_weights_is_rejected() {
    let empty = tempfile::tempdir().unwrap();
    refuses(empty.path(), &["has no config.json", "hint: "]);
    refuses(&empty.path().join("nowhere"), &["nowhere does not exist", "in the Hugging Face cache"]);
    fs::copy(directory("llama2").join("config.json"), empty.path().join("config.json")).unwrap();
    refuses(empty.path(), &["has no model.safetensors", "hint: "]);
}

type Damage = fn(&Path);

fn header(dir: &Path, edit: impl FnOnce(&mut Value, &mut Vec<u8>)) {
    edit_safetensors(&dir.join("model.safetensors"), edit);
}

fn config(dir: &Path, key: &str, value: Value) {
    edit_json(&dir.join("config.json"), |config| config[key] = value);
}

#[test]
fn a_directory_with_an_invalid_file_is_rejected_with_the_cause() {
    let cases: [(Damage, &[&str]); 9] = [
        (
            |dir| {
                let mut bytes = fs::read(dir.join("model.safetensors")).unwrap();
                bytes[..8].copy_from_slice(&(17u64 << 20).to_le_bytes());
                fs::write(dir.join("model.safetensors"), bytes).unwrap();
            },
            &["header must be at most 16777216 bytes", "17825792"],
        ),
        (
            |dir| {
                header(dir, |header, _| {
                    let first = header["model.norm.weight"]["data_offsets"].clone();
                    header["model.layers.0.input_layernorm.weight"]["data_offsets"] = first;
                });
            },
            &["not a valid safetensors file", "offset"],
        ),
        (
            |dir| header(dir, |header, _| rename(header, "model.norm.weight", "model.final_norm.weight")),
            &["missing from the safetensors files: model.norm.weight", "LlamaForCausalLM"],
        ),
        (
            |dir| {
                header(dir, |header, data| {
                    header["model.extra.weight"] =
                        json!({"dtype": "F32", "shape": [2], "data_offsets": [data.len(), data.len() + 8]});
                    data.extend([0; 8]);
                });
            },
            &["unknown in the safetensors files: model.extra.weight"],
        ),
        (|dir| config(dir, "num_hidden_layers", json!(3)), &["model.layers.2.input_layernorm.weight", "and 5 more"]),
        (|dir| config(dir, "num_hidden_layers", json!(1)), &["unknown in the safetensors files: model.layers.1."]),
        (
            |dir| config(dir, "vocab_size", json!(132)),
            &["model.embed_tokens.weight has shape [131, 48], but config.json needs [132, 48]"],
        ),
        (
            |dir| header(dir, |header, _| header["model.norm.weight"]["dtype"] = json!("I32")),
            &["model.norm.weight must be F32, BF16 or F16 (got I32)", "hint: "],
        ),
        (
            |dir| fs::write(dir.join("config.json"), "{\"architectures\": [").unwrap(),
            &["config.json is not a JSON object"],
        ),
    ];
    for (damage, parts) in cases {
        let dir = copy("llama2");
        damage(dir.path());
        refuses(dir.path(), parts);
    }
    for name in ["pytorch_model.bin", "consolidated.00.pth", "model.pt"] {
        let dir = copy("llama2");
        fs::rename(dir.path().join("model.safetensors"), dir.path().join(name)).unwrap();
        refuses(dir.path(), &[name, "pickle", "save_pretrained"]);
    }
}

#[test]
fn a_truncated_file_is_rejected_and_its_needed_and_present_bytes_are_named() {
    let dir = copy("llama2");
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for keep in [bytes.len() - 1, bytes.len() / 2, 1000, 8, 3, 0] {
        fs::write(&path, &bytes[..keep]).unwrap();
        refuses(dir.path(), &["model.safetensors: the file is truncated", &format!("has {keep}"), "hint: "]);
    }
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    refuses(dir.path(), &[&format!("needs {} bytes", bytes.len())]);
    let mut longer = bytes.clone();
    longer.extend([0; 4]);
    fs::write(&path, longer).unwrap();
    refuses(dir.path(), &["has 4 bytes that belong to no tensor"]);
}

#[test]
fn nan_and_infinite_weights_are_rejected_in_either_working_dtype() {
    for (name, bad) in [("model.norm.weight", f32::NAN), ("lm_head.weight", f32::INFINITY)] {
        let dir = copy("llama2");
        edit_safetensors(&dir.path().join("model.safetensors"), |header, data| {
            // The last element: an odd corner of the last panel.
            let end = header[name]["data_offsets"][1].as_u64().unwrap() as usize;
            data[end - 4..end].copy_from_slice(&bad.to_le_bytes());
        });
        refuses(dir.path(), &[&format!("tensor {name} contains NaN or infinite values")]);
        assert!(load::load(Device::Cpu, dir.path(), Head::LanguageModel, DType::Bf16, 0).is_err());
    }
}

#[test]
fn an_index_that_is_wrong_or_leaves_the_directory_is_rejected() {
    for bad in
        ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", "a\\b.safetensors", "model.bin"]
    {
        let dir = copy("llama3");
        let index = dir.path().join("model.safetensors.index.json");
        edit_json(&index, |i| i["weight_map"]["model.norm.weight"] = json!(bad));
        refuses(dir.path(), &["weight_map[\"model.norm.weight\"]", "plain name"]);
    }
    let dir = copy("llama3");
    let index = dir.path().join("model.safetensors.index.json");
    edit_json(&index, |i| i["weight_map"]["model.norm.weight"] = json!("model-00001-of-00004.safetensors"));
    refuses(dir.path(), &["maps model.norm.weight to model-00001-of-00004.safetensors, but"]);
    edit_json(&index, |i| i["weight_map"] = json!([]));
    refuses(dir.path(), &["weight_map must be an object"]);

    let dir = copy("llama3");
    fs::remove_file(dir.path().join("model-00002-of-00004.safetensors")).unwrap();
    refuses(dir.path(), &["model-00002-of-00004.safetensors: no such file", "hint: "]);
}

#[test]
fn an_unsupported_config_is_rejected_and_its_key_is_named() {
    let cases: [(&str, Value, &str); 19] = [
        ("architectures", json!(["GPT2LMHeadModel"]), "Qwen3ForCausalLM"),
        ("architectures", json!(["GPT2LMHeadModel"]), "architecture \"GPT2LMHeadModel\" is not supported"),
        ("model_type", json!("mistral"), "does not match"),
        ("hidden_act", json!("gelu"), "hidden_act must be \"silu\" or \"gelu_pytorch_tanh\" (got \"gelu\")"),
        ("quantization_config", json!({"bits": 4}), "quantization_config.load_in_4bit must be true"),
        ("hidden_size", json!("48"), "hidden_size must be a positive integer"),
        ("hidden_size", json!(0), "hidden_size must be a positive integer"),
        ("hidden_size", json!(1 << 30), "hidden_size must be at most 1048576 (got 1073741824)"),
        ("vocab_size", json!(1 << 30), "vocab_size must be at most 16777216 (got 1073741824)"),
        ("hidden_size", json!(49), "hidden_size (49) must be a multiple of num_attention_heads"),
        ("num_key_value_heads", json!(3), "must be a multiple of num_key_value_heads (3)"),
        ("head_dim", json!(13), "head_dim (13) must be even"),
        ("head_dim", json!(1 << 30), "num_attention_heads (4) times head_dim (1073741824) must be at most 1048576"),
        ("num_attention_heads", json!(48 << 20), "must be a multiple of num_attention_heads"),
        ("intermediate_size", json!(1 << 30), "intermediate_size must be at most 1048576 (got 1073741824)"),
        ("num_hidden_layers", json!(2_000_000_000), "num_hidden_layers must be at most 10000 (got 2000000000)"),
        ("intermediate_size", Value::Null, "intermediate_size is missing"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor"),
        ("rope_scaling", json!({"rope_type": "longrope"}), "rope type \"longrope\" is not supported"),
    ];
    for (key, value, message) in cases {
        let dir = copy("llama2");
        config(dir.path(), key, value);
        refuses(dir.path(), &[message]);
    }
}

#[test]
fn keys_of_routers_and_of_latent_attention_that_fit_no_model_are_named() {
    for (key, value, message) in [
        ("n_routed_experts", json!(1 << 30), "n_routed_experts must be at most 16384 (got 1073741824)"),
        ("num_experts_per_tok", json!(9), "num_experts_per_tok must be at most 8, the number of experts (got 9)"),
        ("n_group", json!(3), "n_group must divide the 8 experts into groups of at least 2 (got 3)"),
        ("n_group", json!(8), "n_group must divide the 8 experts into groups of at least 2 (got 8)"),
        ("topk_group", json!(1), "topk_group must be 1 to 4 groups with at least 3 experts together (got 1)"),
        ("topk_group", json!(5), "topk_group must be 1 to 4 groups"),
        ("scoring_func", json!("softmax"), "scoring_func must be \"sigmoid\" (got \"softmax\")"),
        ("topk_method", json!("greedy"), "topk_method must be \"noaux_tc\" (got \"greedy\")"),
        ("moe_layer_freq", json!(2), "moe_layer_freq must be 1 (got 2)"),
        ("num_key_value_heads", json!(2), "num_key_value_heads must be num_attention_heads (4) in this family (got 2)"),
        ("head_dim", json!(8), "head_dim must be qk_rope_head_dim, 6 (got 8)"),
        ("kv_lora_rank", json!(13), "kv_lora_rank must be even (got 13)"),
    ] {
        let dir = copy("deepseek_v3");
        config(dir.path(), key, value);
        refuses(dir.path(), &[message]);
    }
    for (key, value, message) in [
        ("num_hidden_layers", json!(1), "full_attention_interval must be at most num_hidden_layers, 1"),
        ("linear_num_value_heads", json!(3 << 28), "linear_num_value_heads (805306368) times linear_value_head_dim"),
        ("num_experts", json!(1 << 30), "num_experts must be at most 16384 (got 1073741824)"),
    ] {
        let dir = copy("qwen3_next");
        edit_json(&dir.path().join("config.json"), |c| drop(c.as_object_mut().unwrap().remove("layer_types")));
        config(dir.path(), key, value);
        refuses(dir.path(), &[message]);
    }
    let dir = copy("deepseek_v3");
    let name = "model.layers.1.mlp.gate.e_score_correction_bias";
    edit_safetensors(&dir.path().join("model.safetensors"), |header, _| rename(header, name, "other"));
    refuses(dir.path(), &[&format!("tensor {name} is missing"), "hint: "]);
}

#[test]
fn a_reward_model_is_not_a_language_model_and_must_have_its_head() {
    refuses(&directory("reward"), &["is a value or reward model", "hint: "]);
    let dir = copy("reward");
    let path = dir.path().join("model.safetensors");
    edit_safetensors(&path, |h, _| rename(h, "score.weight", "value_head.weight"));
    assert!(refusal(dir.path(), Head::Value).message.contains("score.weight"));
    // The prefix that older OpenRLHF reward models name.
    edit_json(&dir.path().join("config.json"), |c| c["value_head_prefix"] = json!("value_head"));
    let (arch, weights) = load::load(Device::Cpu, dir.path(), Head::Value, DType::F32, 0).unwrap();
    let (_, original) = load::load(Device::Cpu, &directory("reward"), Head::Value, DType::F32, 0).unwrap();
    assert_eq!(arch.value_head, "value_head");
    let head = |w: &rlhf_hpc::model::Weights, name: &str| super::exported::vector(w, name);
    assert_eq!(head(&weights, "value_head.weight"), head(&original, "score.weight"));
}

/// A forward of one golden model over one token at a position.
fn forward_of(token: u32, position: u32) {
    let m = Model::load("llama3", Head::LanguageModel, DType::F32);
    let keys = Keys::Packed([0, 1].as_slice().into());
    drop(m.transformer.forward(&m.weights, &[token], &[position], keys, None));
}

#[test]
#[should_panic(expected = "is outside the vocabulary of ")]
fn a_token_outside_the_vocabulary_is_rejected() {
    forward_of(u32::MAX, 0);
}

#[test]
#[should_panic(expected = "is outside the context of ")]
fn a_position_outside_the_context_is_rejected() {
    forward_of(0, u32::MAX);
}

/// The output of `logprobs` for some tokens by the model in `dir`, and its messages.
fn logprobs(dir: &Path) -> (String, String) {
    fs::write(dir.join("rows.jsonl"), r#"{"tokens": [5, 9, 17, 3, 80, 44, 2, 61]}"#).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlhf-hpc"));
    let done = command.args(["logprobs", "--device", "cpu", "--input", "rows.jsonl", "--model", "."]).current_dir(dir);
    let done = done.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(done.status.success(), "{}", text(&done.stderr));
    (text(&done.stdout), text(&done.stderr))
}

#[test]
fn a_stored_head_that_differs_from_the_embedding_is_used_although_config_json_ties_them() {
    let tied = copy("qwen2");
    let (plain, _) = logprobs(tied.path());
    for is_changed in [false, true] {
        let dir = copy("qwen2");
        header(dir.path(), |header, data| {
            let mut head = header["model.embed_tokens.weight"].clone();
            let [from, to] = [0, 1].map(|i| head["data_offsets"][i].as_u64().unwrap() as usize);
            let mut values = data[from..to].to_vec();
            if is_changed {
                values[3] ^= 0x80; // The sign of the first value.
            }
            head["data_offsets"] = json!([data.len(), data.len() + values.len()]);
            header["lm_head.weight"] = head;
            data.extend(values);
        });
        let (stored, messages) = logprobs(dir.path());
        assert_eq!(messages.contains("tie_word_embeddings = true, but"), is_changed, "{messages}");
        assert_eq!(stored != plain, is_changed, "{stored}");
        config(dir.path(), "tie_word_embeddings", json!(false));
        let (untied, messages) = logprobs(dir.path());
        assert_eq!(untied, stored);
        assert!(!messages.contains("tie_word_embeddings"), "{messages}");
    }
}
