//! Model directories that cannot be used: each is refused by a job and by the offline verbs before any work.

use super::room::Room;
use serde_json::json;
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

#[test]
fn missing_weights_are_named() {
    let room = Room::new();
    fs::remove_file(room.path(WEIGHTS)).unwrap();
    refused(&room, &["holds no model.safetensors"], "Hugging Face model directory");
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
        let words = format!("model.{role} has a vocabulary of 300, model.actor of 272");
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
