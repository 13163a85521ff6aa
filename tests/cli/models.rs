//! Model directories that cannot be used: each is refused by a job and by the offline verbs before any work.

use super::fixture::Fixture;
use serde_json::json;
use std::fs;

#[test]
fn a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused() {
    let fixture = Fixture::new();
    fixture.edit("config.json", |config| config["vocab_size"] = json!(200));
    fixture.run(&["init", "--config", "config.json", "--out", "small"]).well();
    fixture.copy("tokenizer", "small");
    let words = ["tokens, its model embeds 200"];
    fixture.refuses(65, &["model.actor=small"], &words).hinted("tokenizer that belongs to the model");
    let again = fixture.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "x"]);
    again.refused(2, &["has vocab_size 200"]).hinted("vocab_size");
    assert!(!fixture.path("x").exists());
}

#[test]
fn a_model_without_a_tokenizer_cannot_be_trained() {
    let fixture = Fixture::new();
    fs::remove_file(fixture.path("model/tokenizer.json")).unwrap();
    fixture.refuses(65, &[], &["has no tokenizer.json"]).hinted("save_pretrained");
    fixture.write("model/tokenizer.json", "{}");
    fixture.refuses(65, &[], &["tokenizer.json is not a tokenizer"]);
}

#[test]
fn a_critic_or_reference_with_other_tokens_is_refused() {
    let fixture = Fixture::new();
    fixture.edit("config.json", |config| config["vocab_size"] = json!(300));
    fixture.run(&["init", "--config", "config.json", "--out", "wide"]).well();
    for role in ["critic", "reference"] {
        let words = format!("model.{role} has a vocabulary of 300, model.actor of 272");
        fixture.refuses(65, &[&format!("model.{role}=wide")], &[&words]).hinted("same tokenizer");
    }
}

#[test]
fn a_teacher_with_other_tokens_or_a_shorter_context_is_refused() {
    let fixture = Fixture::new();
    let distill = |dir: &str, words: &[&str]| {
        let teachers = format!("model.teachers=[\"model\",\"{dir}\"]");
        fixture.refuses(65, &["job.kind=distill", "distill.on_policy=true", &teachers], words)
    };
    fixture.copy("model", "other");
    fixture.edit("other/tokenizer.json", |tokenizer| {
        let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let names: Vec<String> = vocabulary.keys().skip(20).take(2).cloned().collect();
        let [first, second] = [0, 1].map(|i| vocabulary[&names[i]].clone());
        (vocabulary[&names[0]], vocabulary[&names[1]]) = (second, first);
    });
    distill("other", &["model.teachers: ", "other has other tokens than model.actor, "]).hinted("the same tokenizer");
    fixture.edit("config.json", |config| config["max_position_embeddings"] = json!(16));
    fixture.run(&["init", "--config", "config.json", "--out", "short"]).well();
    distill("short", &["model.teachers has a context of 16"]);
    fixture.edit("config.json", |config| config["vocab_size"] = json!(300));
    fixture.run(&["init", "--config", "config.json", "--out", "wide"]).well();
    let words = ["model.teachers has a vocabulary of 300, model.actor of 272", "wide)"];
    distill("wide", &words).hinted("same tokenizer");
}

#[test]
fn the_role_of_a_bad_directory_is_named() {
    let fixture = Fixture::new();
    fixture.copy("tokenizer", "bad");
    for role in ["actor", "critic", "reference"] {
        fixture.refuses(65, &[&format!("model.{role}=bad")], &[&format!("model.{role}: "), "bad", "config.json"]);
    }
}

#[test]
fn what_is_no_model_is_named_for_what_it_is() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1"]).well();
    fixture.write("prompts.jsonl", "{\"prompt\": \"1+1=\"}\n");
    for (dir, what, hint) in [
        ("run", "run is the directory of a run", "its model is "),
        ("run/checkpoints/step-1", "step-1 is a checkpoint", "rlhf-hpc export "),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B does not exist", "hf download ORG/NAME"),
        ("job.toml", "job.toml is no directory", "Hugging Face model directory"),
    ] {
        fixture.job(&[&format!("model.actor={dir}"), "job.dir=other"]).refused(65, &[what]).hinted(hint);
        fixture.run(&["generate", "--model", dir, "--input", "prompts.jsonl"]).refused(65, &[what]).hinted(hint);
    }
}

#[test]
fn a_job_that_is_done_says_so() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1"]).well();
    let again = fixture.job(&["job.steps=1"]).well();
    assert!(again.stderr.contains("already done (1 of 1 steps); raise job.steps to go on"), "{}", again.stderr);
}
