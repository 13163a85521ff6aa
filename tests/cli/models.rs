//! Model directories that cannot be used: each is refused by a job and by the offline verbs before any work.

use super::room::Room;
use serde_json::{Value, json};
use std::fs;

/// Refused as the actor of a job, and by `generate`.
#[track_caller]
fn refused(room: &Room, words: &[&str], hint: &str) {
    room.refuses(65, &[], words).hinted(hint);
    room.write("row.jsonl", "{\"tokens\": [5, 6]}\n");
    let ended = room.run(&["generate", "--model", "model", "--input", "row.jsonl"]).refused(65, words).hinted(hint);
    assert_eq!(ended.stdout, "", "nothing is generated");
}

const WEIGHTS: &str = "model/model.safetensors";
const CONFIG: &str = "model/config.json";

/// The header of the weights as JSON, and the bytes behind it.
fn parts(file: &[u8]) -> (Value, &[u8]) {
    let (length, rest) = file.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    (serde_json::from_slice(header).unwrap(), data)
}

fn joined(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

#[test]
fn missing_weights_are_named() {
    let room = Room::new();
    fs::remove_file(room.path(WEIGHTS)).unwrap();
    refused(&room, &["holds no model.safetensors"], "Hugging Face model directory");
}

#[test]
fn pickled_weights_are_refused_with_the_command_that_converts_them() {
    let room = Room::new();
    fs::remove_file(room.path(WEIGHTS)).unwrap();
    room.write("model/pytorch_model.bin", "\x50\x4b");
    refused(&room, &["pytorch_model.bin", "pickle"], "save_pretrained");
}

#[test]
fn truncated_weights_are_refused_with_both_sizes() {
    let room = Room::new();
    let whole = room.read(WEIGHTS).len();
    room.shorten(WEIGHTS, 500);
    refused(&room, &["cut short", &whole.to_string(), &(whole - 500).to_string()], "again");
    room.write(WEIGHTS, [0; 5]);
    room.refuses(65, &[], &["model.safetensors"]);
}

#[test]
fn weights_of_the_wrong_shape_are_refused_with_both_shapes() {
    let room = Room::new();
    room.edit(CONFIG, |config| {
        config["hidden_size"] = json!(32);
        config["head_dim"] = json!(8);
    });
    refused(&room, &["model.embed_tokens.weight", "[280, 16]", "[280, 32]"], "different models");
}

#[test]
fn missing_tensors_are_named() {
    let room = Room::new();
    room.edit(CONFIG, |config| config["num_hidden_layers"] = json!(2));
    refused(&room, &["missing in the safetensors", "model.layers.1.input_layernorm.weight"], "2 layers");
}

#[test]
fn unknown_tensors_are_named() {
    let room = Room::new();
    let file = room.read(WEIGHTS);
    let (mut header, data) = parts(&file);
    header["model.layers.0.self_attn.surprise"] =
        json!({"dtype": "F32", "shape": [2], "data_offsets": [data.len(), data.len() + 8]});
    room.write(WEIGHTS, joined(&header, &[data, &[0; 8]].concat()));
    room.refuses(65, &[], &["model.layers.0.self_attn.surprise"]);
}

#[test]
fn weights_that_are_no_numbers_are_refused_with_the_tensor() {
    let room = Room::new();
    let whole = room.read(WEIGHTS);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut file = whole.clone();
        let at = file.len() - 4;
        file[at..].copy_from_slice(&bad.to_le_bytes());
        room.write(WEIGHTS, file);
        refused(&room, &["NaN or infinite"], "damaged");
    }
}

#[test]
fn a_directory_without_a_config_is_no_model() {
    let room = Room::new();
    fs::remove_file(room.path(CONFIG)).unwrap();
    refused(&room, &["config.json"], "model directory");
    room.refuses(65, &["model.actor=nosuch"], &["nosuch"]);
    room.write(CONFIG, "{\"model_type\": ");
    room.refuses(65, &[], &["config.json", "JSON"]);
}

#[test]
fn a_family_that_is_not_known_is_refused_by_name() {
    let room = Room::new();
    room.edit(CONFIG, |config| {
        config["model_type"] = json!("mamba");
        config["architectures"] = json!(["MambaForCausalLM"]);
    });
    room.refuses(65, &[], &["config.json", "amba"]);
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused() {
    let room = Room::new();
    room.edit("config.json", |config| config["vocab_size"] = json!(200));
    room.run(&["init", "--config", "config.json", "--out", "small"]).well();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        room.write(&format!("small/{file}"), room.read(&format!("model/{file}")));
    }
    let words = ["tokens, its model embeds 200"];
    room.refuses(65, &["model.actor=small"], &words).hinted("tokenizer that belongs to the model");
    let again = room.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "x"]);
    again.refused(2, &["has vocab_size 200"]).hinted("vocab_size");
    assert!(!room.path("x").exists());
}

#[test]
fn a_model_without_a_tokenizer_cannot_be_trained() {
    let room = Room::new();
    fs::remove_file(room.path("model/tokenizer.json")).unwrap();
    room.refuses(65, &[], &["has no tokenizer.json"]).hinted("save_pretrained");
    room.write("model/tokenizer.json", "{}");
    room.refuses(65, &[], &["tokenizer.json is not a tokenizer"]);
}

#[test]
fn a_critic_or_reference_with_other_tokens_is_refused() {
    let room = Room::new();
    room.edit("config.json", |config| config["vocab_size"] = json!(300));
    room.run(&["init", "--config", "config.json", "--out", "wide"]).well();
    for role in ["critic", "reference"] {
        let words = format!("model.{role} has a vocabulary of 300, model.actor of 280");
        room.refuses(65, &[&format!("model.{role}=wide")], &[&words]).hinted("same tokenizer");
    }
}

#[test]
fn the_role_of_a_bad_directory_is_named() {
    let room = Room::new();
    for role in ["actor", "critic", "reference"] {
        fs::create_dir_all(room.path("bad")).unwrap();
        room.write("bad/tokenizer.json", room.read("model/tokenizer.json"));
        room.refuses(65, &[&format!("model.{role}=bad")], &[&format!("model.{role}: "), "bad", "config.json"]);
    }
}
