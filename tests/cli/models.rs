//! Model directories that cannot be used: jobs and offline verbs reject each of them before any work.

use super::command::rows;
use super::fixture::Fixture;
use serde_json::{Value, json};
use std::fs;

/// A reward model of the fixture's shape with random weights.
fn reward_model(fixture: &Fixture, name: &str, vocabulary: usize, more: &[&str]) {
    fixture.edit("config.json", |config| {
        config["architectures"] = json!(["LlamaForSequenceClassification"]);
        config["vocab_size"] = json!(vocabulary);
        // The end token of the tokenizer.
        config["eos_token_id"] = json!(1);
    });
    fixture.run(&[&["init", "--config", "config.json", "--out", name], more].concat()).well();
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model_embeds_is_rejected() {
    let fixture = Fixture::new();
    fixture.edit("config.json", |config| config["vocab_size"] = json!(200));
    fixture.run(&["init", "--config", "config.json", "--out", "small"]).well();
    fixture.copy("tokenizer", "small");
    let words = ["tokens, but its model embeds only 200"];
    fixture.refuses(65, &["model.actor=small"], &words).hinted("the model's own tokenizer");
    let again = fixture.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "x"]);
    again.refused(2, &["has vocab_size 200"]).hinted("vocab_size");
    assert!(!fixture.path("x").exists());
}

#[test]
fn a_model_without_a_tokenizer_cannot_be_trained() {
    let fixture = Fixture::new();
    fs::remove_file(fixture.path("model/tokenizer.json")).unwrap();
    fixture.refuses(65, &[], &["has no tokenizer.json"]).hinted("save_pretrained");
    fixture.write("model/tiktoken.model", "IQ== 0\n");
    fixture.refuses(65, &[], &["its tokens are in tiktoken.model"]).hinted("TikTokenConverter");
    fixture.write("model/tokenizer.json", "{}");
    fixture.refuses(65, &[], &["tokenizer.json is not a tokenizer"]);
}

#[test]
fn a_critic_or_reference_with_other_tokens_is_rejected() {
    let fixture = Fixture::new();
    fixture.edit("config.json", |config| config["vocab_size"] = json!(300));
    fixture.run(&["init", "--config", "config.json", "--out", "wide"]).well();
    for role in ["critic", "reference"] {
        let words = "has a vocabulary of 300 tokens, but model.actor has 272";
        fixture
            .refuses(65, &[&format!("model.{role}=wide")], &[&format!("model.{role} ("), words])
            .hinted("same tokenizer");
    }
}

/// Gives two tokens each other's id.
fn swap_tokens(fixture: &Fixture, file: &str) {
    fixture.edit(file, |tokenizer| {
        let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let names: Vec<String> = vocabulary.keys().skip(20).take(2).cloned().collect();
        let [first, second] = [0, 1].map(|i| vocabulary[&names[i]].clone());
        (vocabulary[&names[0]], vocabulary[&names[1]]) = (second, first);
    });
}

#[test]
fn a_teacher_with_other_tokens_or_a_shorter_context_is_rejected() {
    let fixture = Fixture::new();
    let distill = |dir: &str, words: &[&str]| {
        let teachers = format!("model.teachers=[\"model\",\"{dir}\"]");
        fixture.refuses(65, &["job.kind=distill", "distill.on_policy=true", &teachers], words)
    };
    fixture.copy("model", "other");
    swap_tokens(&fixture, "other/tokenizer.json");
    distill("other", &["model.teachers: ", "other differs from the tokenizer of model.actor, "])
        .hinted("the same tokenizer");
    fixture.edit("config.json", |config| config["max_position_embeddings"] = json!(16));
    fixture.run(&["init", "--config", "config.json", "--out", "short"]).well();
    distill("short", &["model.teachers has a context of 16"]);
    fixture.edit("config.json", |config| config["vocab_size"] = json!(300));
    fixture.run(&["init", "--config", "config.json", "--out", "wide"]).well();
    let words = ["model.teachers (", "wide) has a vocabulary of 300 tokens, but model.actor has 272"];
    distill("wide", &words).hinted("same tokenizer");
    let plan = ["plan", "job.toml", "job.kind=distill", "model.teachers=[\"wide\"]"];
    fixture.run(&plan).refused(65, &words).hinted("same tokenizer");
}

#[test]
fn a_reward_model_with_another_tokenizer_reads_the_texts_and_scores_as_the_verb_does() {
    let fixture = Fixture::new();
    fixture
        .run(&["tokenizer", "rows.jsonl", "--vocabulary", "280", "--field", "demonstration", "--out", "other"])
        .well();
    reward_model(&fixture, "rm", 300, &["--tokenizer", "other"]);
    // Some token ids stop a response: its end is a token for the reward model, too.
    let stops = format!("rollout.stop_token_ids={:?}", (30..80).collect::<Vec<_>>());
    let sets = ["reward.rule=[]", "reward.models=rm", "model.critic=model", "rollout.samples_per_prompt=4", &stops];
    fixture.job(&[&sets[..], &["job.steps=1"]].concat()).well();
    let mut samples = rows(&fixture.run(&["samples", "run", "--json"]).well().stdout);
    let finished = |how: &str| samples.iter().filter(|sample| sample["finish"] == how).count();
    assert!(samples.len() == 16 && finished("stop") > 0 && finished("length") > 0, "{samples:?}");
    // Records show a NUL as its control picture.
    samples.retain(|sample| !sample["response"].as_str().expect("a text").contains('␀'));
    let row = |sample: &Value| {
        let end = if sample["finish"] == "stop" { "<|end|>" } else { "" };
        json!({"prompt": sample["prompt"], "response": format!("{}{end}", sample["response"].as_str().expect("a text"))})
    };
    fixture.jsonl("scored.jsonl", &samples.iter().map(row).collect::<Vec<_>>());
    let scored = rows(&fixture.run(&["reward", "--model", "rm", "--input", "scored.jsonl"]).well().stdout);
    for (sample, scored) in samples.iter().zip(scored) {
        assert_eq!(sample["score"], scored["reward"], "{scored}");
    }
}

#[test]
fn a_reward_model_that_cannot_score_is_rejected_with_its_key_and_directory() {
    let fixture = Fixture::new();
    reward_model(&fixture, "wide", 300, &[]);
    reward_model(&fixture, "rm", 272, &["--tokenizer", "tokenizer"]);
    fixture.copy("rm", "other");
    swap_tokens(&fixture, "other/tokenizer.json");
    let of_critic = "without model.critic, the critic starts from the first of reward.models";
    for (models, critic, words, hint) in [
        (
            "wide",
            "model",
            "reward.models: DIR has a vocabulary of 300 tokens and no tokenizer",
            "the model's own tokenizer",
        ),
        ("wide", "", "model.critic (DIR) has a vocabulary of 300 tokens, but model.actor has 272", of_critic),
        ("other", "", "model.critic: the tokenizer of DIR differs from the tokenizer of model.actor", of_critic),
        ("model", "model", "reward.models: DIR must hold a reward model (got a language model)", "reward_model"),
        (
            "{dir=\"rm\",normalize=true}",
            "",
            "reward.models: DIR/config.json must have a mean and a positive std",
            "normalize = false",
        ),
    ] {
        let (name, critic) = (models.split('"').nth(1).unwrap_or(models), format!("model.critic={critic}"));
        let words = words.replace("DIR", &fixture.path(name).display().to_string());
        fixture.refuses(65, &["reward.rule=[]", &format!("reward.models={models}"), &critic], &[&words]).hinted(hint);
    }
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
fn the_error_for_a_path_that_is_not_a_model_describes_the_path() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1"]).well();
    fixture.write("prompts.jsonl", "{\"prompt\": \"1+1=\"}\n");
    for (dir, what, hint) in [
        ("run", "run is a run directory", "use its model, "),
        ("run/checkpoints/step-1", "step-1 is a checkpoint", "rlhf-hpc export "),
        (
            "meta-llama/Llama-3.2-1B",
            "meta-llama/Llama-3.2-1B does not exist",
            "rlhf-hpc download meta-llama/Llama-3.2-1B",
        ),
        ("job.toml", "job.toml is not a directory", "Hugging Face model directory"),
    ] {
        fixture.job(&[&format!("model.actor={dir}"), "job.dir=other"]).refused(65, &[what]).hinted(hint);
        fixture.run(&["generate", "--model", dir, "--input", "prompts.jsonl"]).refused(65, &[what]).hinted(hint);
    }
}
