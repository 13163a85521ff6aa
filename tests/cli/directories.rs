//! Model directories as users have them: their small files, directories without a model, and existing results.

use super::command::rows;
use super::fixture::Fixture;
use serde_json::{Value, json};
use std::fs;

/// The beginning of every file that git-lfs has not fetched.
const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";

#[test]
fn an_existing_result_is_replaced_only_with_force() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1", "eval.every_steps=0"]).well();
    let lines: [&[&str]; 4] = [
        &["init", "--config", "config.json", "--tokenizer", "tokenizer", "--seed", "9", "--out", "model"],
        &[
            "tokenizer",
            "rows.jsonl",
            "--field",
            "question",
            "--field",
            "prompt",
            "--vocabulary",
            "262",
            "--out",
            "model",
        ],
        &["export", "run", "--out", "model"],
        &["shard", "rows.jsonl", "--tokenizer", "tokenizer", "--out", "questions"],
    ];
    let before = fixture.files("model");
    let shard = fixture.read("questions.bin");
    for line in lines {
        fixture.run(line).refused(2, &["exists already"]).hinted("--force");
    }
    assert!(fixture.files("model") == before && fixture.read("questions.bin") == shard);
    fixture.write("model/added_tokens.json", r#"{"<|new|>": 272}"#);
    for line in lines {
        fixture.run(&[line, &["--force"]].concat()).well();
    }
    assert!(fixture.files("model") != before && fixture.read("questions.bin") != shard);
    // Tokens of the replaced tokenizer are gone with it.
    fixture.write("model/added_tokens.json", r#"{"<|new|>": 272}"#);
    fixture.run(&[lines[1], &["--force"]].concat()).well();
    assert!(!fixture.path("model/added_tokens.json").exists());
}

#[test]
fn new_weights_have_the_type_that_config_json_names() {
    let fixture = Fixture::new();
    let sizes = [("float32", "dtype"), ("bfloat16", "dtype"), ("bfloat16", "torch_dtype")].map(|(name, key)| {
        fixture.edit("config.json", |config| {
            config.as_object_mut().unwrap().retain(|key, _| !key.ends_with("dtype"));
            config[key] = json!(name);
        });
        fixture.run(&["init", "--config", "config.json", "--out", "new", "--force"]).well();
        let config: Value = serde_json::from_slice(&fixture.read("new/config.json")).unwrap();
        assert_eq!(config[key], name);
        fixture.read("new/model.safetensors").len()
    });
    assert!(sizes[0] > sizes[1] * 19 / 10 && sizes[1] == sizes[2], "{sizes:?}");
    fixture.edit("config.json", |config| config["torch_dtype"] = json!("float16"));
    let refused = fixture.run(&["init", "--config", "config.json", "--out", "half"]);
    refused.refused(2, &["torch_dtype must be float32 or bfloat16"]).hinted("torch_dtype");
}

#[test]
fn a_directory_that_is_not_a_model_is_named_with_the_command_that_helps() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1", "eval.every_steps=0"]).well();
    fixture.copy("model", "pointer");
    fixture.write("pointer/model.safetensors", POINTER);
    fixture.copy("model", "tokens");
    fixture.write("tokens/tokenizer.json", POINTER);
    let config = r#"{"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}"#;
    fixture.write("adapter/adapter_config.json", config);
    fixture.write("adapter/adapter_model.safetensors", "x");
    fixture.write("gguf/model-Q4.gguf", "GGUF");
    fixture.copy("model", "other");
    fixture.edit("other/config.json", |config| {
        config["model_type"] = json!("gemma3");
        config.as_object_mut().unwrap().remove("architectures");
    });
    for (dir, words, hint) in [
        ("pointer", "model.safetensors: this is a pointer of git-lfs", "git lfs pull"),
        ("tokens", "tokenizer.json: this is a pointer of git-lfs", "git lfs pull"),
        ("adapter", "adapter is an adapter (LoRA) for org/base", "--model org/base --adapter adapter"),
        ("gguf", "model-Q4.gguf is a GGUF file", "gguf_file='model-Q4.gguf'"),
        ("gguf/model-Q4.gguf", "model-Q4.gguf is a GGUF file", "gguf_file='model-Q4.gguf'"),
        ("run", "run is a run directory", "run/export"),
        ("run/checkpoints/step-1", "step-1 is a checkpoint", "rlhf-hpc export "),
        ("org/name", "org/name does not exist", "rlhf-hpc download org/name"),
        ("other", "model_type \"gemma3\" is not supported", "llama"),
    ] {
        fixture.run(&["generate", "--model", dir, "--prompt", "1+1="]).refused(65, &[words]).hinted(hint);
        fixture.run(&["logprobs", "--model", dir, "--input", "rows.jsonl"]).refused(65, &[words]).hinted(hint);
        let actor = format!("model.actor={dir}");
        if dir == "adapter" {
            let job = fixture.run(&["run", "job.toml", "job.dir=again", &actor]);
            job.refused(2, &["model.actor must be a model"]).hinted("model.adapter = ");
            continue;
        }
        fixture.run(&["run", "job.toml", "job.dir=again", &actor]).refused(65, &[words]).hinted(hint);
    }
    for dir in ["run", "org/name", "gguf"] {
        let shard = fixture.run(&["shard", "rows.jsonl", "--tokenizer", dir, "--out", "x"]);
        shard.refused(65, &[dir]);
    }
    fixture.write("rows.jsonl", POINTER);
    let shard = fixture.run(&["shard", "rows.jsonl", "--tokenizer", "tokenizer", "--out", "x"]);
    shard.refused(65, &["rows.jsonl: this is a pointer of git-lfs"]).hinted("git lfs pull");
}

/// Replaces the ends of the fixture's tokenizer: its own is `<|end|>` with id 1, and `listed` are those of the model.
fn ends(fixture: &Fixture, dir: &str, listed: &Value) {
    fixture.write(&format!("{dir}/generation_config.json"), json!({"eos_token_id": listed}).to_string());
}

#[test]
fn demonstrations_end_with_the_tokenizers_end_token_and_the_export_lists_all_end_tokens() {
    let fixture = Fixture::new();
    ends(&fixture, "model", &json!([4, 9999, 3]));
    fixture.jsonl("pairs.jsonl", &[json!({"prompt": "1+1=", "response": "2"})]);
    let shard =
        ["shard", "pairs.jsonl", "--tokenizer", "model", "--out", "x", "--response-key", "response", "--show", "1"];
    let shown = fixture.run(&shard).well();
    assert!(shown.stdout.contains("⟦2<|end|>⟧"), "{}", shown.stdout);
    let no_end = "eos_token_id names [9999], but the vocabulary has 272 tokens: no response can end with them";
    fixture.job(&["job.steps=1", "eval.every_steps=0"]).assert(0, &[no_end]);
    for dir in ["run/export", "again"] {
        if dir == "again" {
            fixture.run(&["export", "run", "--out", "again"]).well();
        }
        let generation: Value =
            serde_json::from_slice(&fixture.read(&format!("{dir}/generation_config.json"))).unwrap();
        assert_eq!(generation["eos_token_id"], json!([4, 3, 1]), "{dir}");
    }
}

#[test]
fn a_template_that_ends_turns_with_no_end_token_is_named_and_its_line_break_is_not_learned() {
    let fixture = Fixture::new();
    let template = "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|assistant|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|user|>assistant\n{% endif %}";
    fixture.write("model/chat_template.jinja", template);
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")];
    fixture.jsonl("chat.jsonl", &[json!({"messages": messages})]);
    let shard = |out: &str| {
        let line =
            ["shard", "chat.jsonl", "--tokenizer", "model", "--chat-template", "--demonstrations", "--show", "1"];
        fixture.run(&[&line[..], &["--out", out]].concat()).well()
    };
    let warning = "the chat template ends a turn with \"<|assistant|>\", which is no end token of the model";
    let shown = shard("x");
    shown.assert(0, &[warning, "add 4 to eos_token_id in generation_config.json"]);
    assert!(shown.stdout.contains("⟦b<|assistant|>⟧"), "{}", shown.stdout);
    assert!(shown.stdout.contains("⟦d<|assistant|>⟧"), "{}", shown.stdout);
    let job = ["job.kind=sft", "data.prompts=[\"chat.jsonl\"]", "data.chat_template=true", "data.eval_split=\"\""];
    let more = ["data.label_key=\"\"", "data.prompt_split=\"\"", "eval.every_steps=0", "sft.minibatch_samples=1"];
    fixture.job(&[&job[..], &more[..], &["--dry-run"]].concat()).assert(0, &[warning]);
    ends(&fixture, "model", &json!([1, 4]));
    let shown = shard("y");
    assert!(!shown.stderr.contains("ends a turn"), "{}", shown.stderr);
    assert!(shown.stdout.contains("⟦d<|assistant|>⟧"), "{}", shown.stdout);
    fixture.write("model/chat_template.jinja", "{% for m in messages %}[{{ m.content }}]{% endfor %}");
    shard("z").assert(0, &["ends a turn without an end token"]);
}

#[test]
fn a_larger_padded_vocabulary_of_the_same_tokenizer_is_truncated_and_a_smaller_one_is_named() {
    let fixture = Fixture::new();
    let wide = |name: &str, size: usize| {
        fixture.edit("config.json", |config| config["vocab_size"] = json!(size));
        fixture.run(&["init", "--config", "config.json", "--tokenizer", "model", "--out", name, "--seed", "3"]).well();
    };
    wide("same", 272);
    wide("wide", 300);
    let distill = |actor: &str, teacher: &str| {
        let (actor, teacher) = (format!("model.actor={actor}"), format!("model.teachers=[\"{teacher}\"]"));
        let line =
            ["job.kind=distill", "job.steps=1", "data.label_key=\"\"", "distill.minibatch_samples=2", &actor, &teacher];
        fixture.job(&[&line[..], &["job.dir=run"]].concat())
    };
    for role in ["model.reference=wide", "model.critic=wide"] {
        let made = fixture.job(&["job.steps=1", "eval.every_steps=0", "ppo.kl_coef=0.1", "job.export=false", role]);
        made.well();
        fs::remove_dir_all(fixture.path("run")).unwrap();
    }
    let words = ["pads its vocabulary to 272 tokens, but model.actor pads it to 300"];
    distill("wide", "same").refused(65, &words).hinted("resize_token_embeddings(300)");
    fixture
        .jsonl("rows.jsonl", &[json!({"prompt": "1+1=", "response": "2"}), json!({"prompt": "1+2=", "response": "3"})]);
    // A teacher whose weights are the same without the padding gives the same loss.
    fixture.copy("wide", "cut");
    cut(&fixture, "cut", 272);
    let losses = ["wide", "cut"].map(|teacher| {
        fs::remove_dir_all(fixture.path("run")).ok();
        let line = ["job.kind=distill", "job.steps=1", "data.prompts=[\"rows.jsonl\"]", "data.label_key=\"\""];
        let more =
            ["data.prompt_split=\"\"", "data.eval_split=\"\"", "eval.every_steps=0", "distill.minibatch_samples=2"];
        let teacher = format!("model.teachers=[\"{teacher}\"]");
        fixture.job(&[&line[..], &more[..], &[&teacher]].concat()).well();
        rows(&fixture.text("run/metrics.jsonl"))[0]["loss"].as_f64().unwrap()
    });
    assert_eq!(losses[0], losses[1]);
}

/// Drops the last rows of a model's embedding and head.
fn cut(fixture: &Fixture, dir: &str, vocabulary: usize) {
    fixture.edit(&format!("{dir}/config.json"), |config| config["vocab_size"] = json!(vocabulary));
    let name = format!("{dir}/model.safetensors");
    let bytes = fixture.read(&name);
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut table: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let mut data = Vec::new();
    for tensor in table.as_object_mut().unwrap().iter_mut().filter(|(name, _)| *name != "__metadata__").map(|(_, t)| t)
    {
        let [from, to] = [0, 1].map(|i| tensor["data_offsets"][i].as_u64().unwrap() as usize);
        let mut own = &bytes[header + from..header + to];
        if tensor["shape"][0] == 300 {
            own = &own[..own.len() * vocabulary / 300];
            tensor["shape"][0] = json!(vocabulary);
        }
        tensor["data_offsets"] = json!([data.len(), data.len() + own.len()]);
        data.extend_from_slice(own);
    }
    let mut text = table.to_string();
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len());
    fixture.write(&name, [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &data].concat());
}

#[test]
fn unused_keys_are_named_once() {
    let fixture = Fixture::new();
    fixture.edit("model/config.json", |config| {
        config["logit_softcap"] = json!(30.0);
        config["attention_dropout"] = json!(0.1);
        config["hidden_dropout"] = json!(0.0);
        config["sliding_window"] = json!(16);
        config["rope_scaling"] = json!({"rope_type": "default", "mrope_section": [1, 2]});
        config["use_cache"] = json!(true);
        config["a_key_of_null"] = json!(null);
    });
    fixture.edit("model/tokenizer_config.json", |config| {
        config["do_lower_case"] = json!(true);
        config["padding_side"] = json!("left");
        config["add_eos_token"] = json!(true);
    });
    fixture.write("model/special_tokens_map.json", r#"{"eos_token": "<|user|>", "strange": 1}"#);
    let sampling =
        json!({"eos_token_id": 1, "do_sample": true, "temperature": 0.5, "top_k": 0, "repetition_penalty": 1.1});
    fixture.write("model/generation_config.json", sampling.to_string());
    let made = fixture.run(&["generate", "--model", "model", "--prompt", "1+1=", "--max-new-tokens", "2"]).well();
    made.assert(
        0,
        &[
            "config.json: unknown keys, not used: logit_softcap, attention_dropout, sliding_window\n",
            "config.json/rope_scaling: unknown key, not used: mrope_section\n",
            "tokenizer_config.json: unknown key, not used: do_lower_case\n",
            "special_tokens_map.json: unknown key, not used: strange\n",
            "sets add_eos_token = true, but tokenizer.json adds no end token",
            "eos_token is \"<|user|>\" in special_tokens_map.json and \"<|end|>\" in tokenizer_config.json; using \"<|user|>\"",
            "generate: not applied: temperature = 0.5, repetition_penalty = 1.1 of generation_config.json\n",
        ],
    );
}
