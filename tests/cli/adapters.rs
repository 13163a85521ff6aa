//! Adapters on command lines: those of PEFT, and those of jobs, applied, merged and exported.

use super::command;
use super::fixture::Fixture;
use super::offline::{answers, floats};
use crate::process::Ended;
use rlhf_hpc::dtype::round_bf16;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The numbers of a tensor, of 4 bytes each.
fn numbers<T: bytemuck::Pod>(file: &SafeTensors, name: &str) -> Vec<T> {
    file.tensor(name)
        .unwrap_or_else(|e| panic!("{name}: {e}"))
        .data()
        .chunks(4)
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

#[track_caller]
fn near(got: &[f32], want: &[f32], most: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let gap = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(gap <= most, "{what}: {gap}");
}

/// Asserts that the tensors of the file `short` are those of `long`, rounded to bf16.
#[track_caller]
fn assert_rounded_once(long: &[u8], short: &[u8], what: &str) {
    let [long, short] = [long, short].map(|bytes| SafeTensors::deserialize(bytes).expect("tensors"));
    assert_eq!(long.names().len(), short.names().len(), "{what}");
    for (tensor, view) in short.tensors() {
        let once = numbers::<f32>(&long, &tensor).into_iter().flat_map(|x| round_bf16(x).to_le_bytes());
        assert!(view.data() == once.collect::<Vec<u8>>(), "{what}: {tensor} is not rounded once");
    }
}

fn lines(ended: Ended) -> Vec<Value> {
    command::rows(&ended.well().stdout)
}

/// The numbers of all rows, and the greedy responses to the first tokens of the last one.
fn results(rows: &str, prompt: Option<&str>, model: &[&str]) -> (Vec<f32>, Vec<Value>) {
    let of = |verb: &[&str]| lines(command::run(&golden(), &[verb, model].concat()));
    let Some(prompt) = prompt else {
        let scored = of(&["reward", "--input", rows]);
        return (scored.iter().map(|row| row["reward"].as_f64().expect("a score") as f32).collect(), Vec::new());
    };
    let logprobs = of(&["logprobs", "--input", rows]).iter().flat_map(|row| floats(&row["logprobs"])).collect();
    let greedy = ["generate", "--input", prompt, "--temperature", "0", "--max-new-tokens", "12", "--ignore-eos"];
    (logprobs, of(&greedy).iter().map(|answer| answer["tokens"].clone()).collect())
}

/// Against tests/golden/adapters.py, in float64.
#[test]
fn adapters_of_peft_have_its_results_with_their_base_alone_and_merged() {
    let fixture = Fixture::new();
    let at = |name: &str| fixture.path(name).display().to_string();
    let plain = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "reward", "reward-qwen2"];
    // Joined matrices, reordered heads, and a model with images.
    let joined = ["phi3-short", "glm4", "gemma3"];
    // Routers and experts, in several forms of files, one of transformers 4.
    let experts = ["mixtral-old", "qwen3_moe-experts", "gpt_oss-experts", "qwen3_next-experts"];
    for name in plain.into_iter().chain(joined).chain(experts) {
        let bytes = fs::read(golden().join(format!("adapters/{name}.safetensors"))).expect("results");
        let file = SafeTensors::deserialize(&bytes).expect("tensors");
        let (tokens, ends) = (numbers::<u32>(&file, "tokens"), numbers::<u32>(&file, "cu_seqlens"));
        let row = |ends: &[u32]| json!({"tokens": tokens[ends[0] as usize..ends[1] as usize]});
        fixture.jsonl("rows.jsonl", &ends.windows(2).map(row).collect::<Vec<_>>());
        let is_reward = name.starts_with("reward");
        let expected = numbers::<f32>(&file, if is_reward { "scores" } else { "logprobs" });
        let model = name.trim_end_matches("-experts").trim_end_matches("-old");
        let (base, adapter) = (format!("models/{model}"), format!("adapters/{name}"));
        let greedy = (!is_reward).then(|| numbers::<u32>(&file, "greedy"));
        let prompt = greedy.as_ref().map(|greedy| {
            fixture.jsonl("prompt.jsonl", &[json!({"tokens": greedy[..greedy.len() - 12]})]);
            at("prompt.jsonl")
        });
        let out = at(name);
        command::run(&golden(), &["export", &base, "--adapter", &adapter, "--out", &out]).well();
        for model in [&["--model", &base, "--adapter", &adapter][..], &["--model", &adapter], &["--model", &out]] {
            let (found, drawn) = results(&at("rows.jsonl"), prompt.as_deref(), model);
            near(&found, &expected, 3e-5, name);
            let best = greedy.iter().map(|greedy| json!(greedy[greedy.len() - 12..])).collect::<Vec<_>>();
            assert_eq!(drawn, best, "{name} {model:?}");
        }
        let short = at("short");
        let rounded = ["export", &base, "--adapter", &adapter, "--dtype", "bf16", "--force", "--out", &short];
        command::run(&golden(), &rounded).well();
        let file = if fixture.path(&format!("{name}/model.safetensors.index.json")).exists() {
            "model-00001-of-00002.safetensors"
        } else {
            "model.safetensors"
        };
        let [whole, short] = [name, "short"].map(|dir| fixture.read(&format!("{dir}/{file}")));
        assert_rounded_once(&whole, &short, name);
    }
}

/// Adapters of rank r have r (inputs + outputs) parameters. The model has two layers of width 32, with 16 outputs of keys
/// and values, and MLPs of width 64.
#[test]
fn the_banner_lists_the_trained_parameters_of_each_matrix_and_their_number() {
    let fixture = Fixture::new();
    for (sets, wanted) in [
        ("lora.rank=3 lora.targets=[\"q_proj\",\"down_proj\"]", "trains 960 (down_proj 576, q_proj 384)"),
        (
            "lora.rank=2 lora.targets=[\"k_proj\"] lora.layers=[1] lora.train_also=[\"model.norm\"]",
            "trains 128 (k_proj 96, norm 32)",
        ),
        (
            "lora.rank=1 lora.targets=[\"v_proj\"] lora.rank_pattern={\"layers.1.self_attn.v_proj\"=4}",
            "trains 240 (v_proj 240)",
        ),
        (
            "model.freeze=[\"embed_tokens\",\"lm_head\",\"attention\",\"mlp\"]",
            "trains 160 (input_layernorm 64, norm 32, post_attention_layernorm 64)",
        ),
    ] {
        let line = sets.split(' ').chain(["--dry-run", "job.kind=sft", "data.prompts=demonstrations"]);
        let stderr = fixture.job(&line.collect::<Vec<_>>()).well().stderr;
        let row = stderr.lines().find(|line| line.trim_start().starts_with("trains ")).unwrap_or_default();
        assert!(row.contains(&format!("{wanted}, on a frozen base; ")), "{sets}: {stderr}");
    }
}

#[test]
fn an_exported_checkpoint_is_the_adapter_or_with_merged_the_model_that_samples_like_its_job() {
    let fixture = Fixture::new();
    let also = "lora.train_also=[\"model.norm\"]";
    fixture.job(&["lora.rank=3", "lora.targets=[\"q_proj\",\"down_proj\"]", also, "optim.actor.ema_beta=0.5"]).well();
    for (export, more) in [("run/export", &[][..]), ("run/export-ema", &["--ema"])] {
        fixture.run(&[&["export", "run", "--force", "--out", "again"], more].concat()).well();
        let (job, verb) = (fixture.files(export), fixture.files("again"));
        let names: Vec<_> = job.keys().map(|path| path.file_name().expect("a file")).collect();
        assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors"]);
        assert!(job.values().eq(verb.values()), "{export} differs");
        fixture.run(&[&["export", "run", "--merged", "--force", "--out", "whole"], more].concat()).well();
        fixture.run(&["export", "model", "--adapter", export, "--force", "--out", "merged"]).well();
        let [whole, merged] = ["whole", "merged"].map(|dir| fixture.read(&format!("{dir}/model.safetensors")));
        assert!(whole == merged && whole != fixture.read("model/model.safetensors"), "{export}");
        let rows = [json!({"prompt": "1+1=", "response": "2 and more"})];
        let logprobs = |model: &str, more: &[&str]| {
            floats(
                &answers(&fixture, "logprobs", model, &rows, &[&["--no-chat-template"], more].concat())[0]["logprobs"],
            )
        };
        near(&logprobs("whole", &[]), &logprobs("model", &["--adapter", export]), 1e-5, export);
        assert_eq!(logprobs("model", &["--adapter", export]), logprobs(export, &[]), "{export}");
        assert_ne!(logprobs("model", &[]), logprobs(export, &[]), "{export} changes nothing");
        let drawn = ["whole", export].map(|model| {
            answers(
                &fixture,
                "generate",
                model,
                &[json!({"prompt": "1+1="})],
                &["--temperature", "0", "--no-chat-template"],
            )
        });
        assert_eq!(drawn[0][0]["tokens"], drawn[1][0]["tokens"], "{export}");
    }
    fixture.run(&["export", "run", "--dtype", "bf16", "--out", "bf16"]).well();
    let [long, short] = ["run/export", "bf16"].map(|dir| fixture.read(&format!("{dir}/adapter_model.safetensors")));
    assert_rounded_once(&long, &short, "the adapter");
    // The critic is the same base with its own adapter and head.
    fixture.run(&["export", "run", "--role", "critic", "--out", "critic"]).well();
    fixture.run(&["export", "run", "--role", "critic", "--merged", "--out", "scores"]).well();
    let rows = [json!({"tokens": [5, 6, 7]}), json!({"tokens": [9]})];
    let scores = ["critic", "scores"].map(|model| {
        let scored = answers(&fixture, "reward", model, &rows, &[]);
        scored.iter().map(|row| row["reward"].as_f64().expect("a score") as f32).collect::<Vec<_>>()
    });
    near(&scores[0], &scores[1], 1e-5, "scores");
    fixture.run(&["generate", "--model", "critic", "--prompt", "1+1="]).refused(65, &["adapter of a value or reward"]);
}

#[test]
fn an_exported_checkpoint_of_a_job_with_frozen_weights_is_the_model_that_the_job_exports() {
    let fixture = Fixture::new();
    fixture.job(&["model.freeze=[\"layers.0\",\"embed_tokens\"]"]).well();
    fixture.run(&["export", "run", "--out", "again"]).well();
    let (job, verb) = (fixture.files("run/export"), fixture.files("again"));
    assert_eq!(job.len(), verb.len());
    for ((path, job), verb) in job.iter().zip(verb.values()) {
        assert!(job == verb, "{} differs", path.display());
    }
    fixture
        .run(&["export", "run", "--merged", "--out", "x"])
        .refused(2, &["--merged needs a checkpoint with adapters"]);
}

#[test]
fn an_adapter_or_an_export_that_cannot_be_used_is_rejected_with_what_helps() {
    let fixture = Fixture::new();
    fixture.job(&["lora.rank=2", "eval.every_steps=0"]).well();
    let adapter = |name: &str| fixture.copy("run/export", name);
    let config = |name: &str, key: &str, value: Value| {
        adapter(name);
        fixture.edit(&format!("{name}/adapter_config.json"), |config| config[key] = value);
    };
    config("lost", "base_model_name_or_path", json!("org/base"));
    config("unknown", "new_feature", json!(3));
    config("dora", "use_dora", json!(true));
    adapter("cut");
    let tensors = fixture.read("cut/adapter_model.safetensors");
    fixture.write("cut/adapter_model.safetensors", &tensors[..tensors.len() - 9]);
    fixture.edit("config.json", |config| config["hidden_size"] = json!(64));
    fixture.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "wide"]).well();
    for (model, adapter, code, words, hint) in [
        ("wide", "run/export", 65, "the adapter is for another base model", "use the adapter's base model, which is "),
        ("model", "cut", 65, "adapter_model.safetensors: the file is truncated", ""),
        ("model", "unknown", 65, "new_feature is unknown (got 3)", "remove the key"),
        ("model", "dora", 65, "use_dora must be off", "merge_and_unload"),
        ("model", "model", 65, "model has no adapter_config.json", "adapter of PEFT"),
        ("run/export", "run/export", 2, "--model must be the base model", "with --adapter"),
        ("lost", "", 65, "lost is an adapter (LoRA) for org/base", "--model org/base --adapter lost"),
    ] {
        let adapter = if adapter.is_empty() { vec![] } else { vec!["--adapter", adapter] };
        for verb in [
            &["generate", "--input", "rows.jsonl"][..],
            &["generate", "--prompt", "1"],
            &["logprobs", "--input", "rows.jsonl"],
        ] {
            fixture.run(&[verb, &["--model", model], &adapter].concat()).refused(code, &[words]).hinted(hint);
        }
        if !adapter.is_empty() {
            let export = fixture.run(&[&["export", model, "--out", "x"], &adapter[..]].concat());
            export.refused(code, &[words]).hinted(hint);
        }
    }
    let scores = ["reward", "--model", "model", "--adapter", "run/export", "--input", "rows.jsonl"];
    fixture.run(&scores).refused(65, &["model must hold a reward model (got a language model)"]);
    for out in ["model", "run/export", "./model/../model"] {
        let line = ["export", "model", "--adapter", "run/export", "--force", "--out", out];
        fixture.run(&line).refused(2, &["--out must not be a directory that is read"]);
    }
    let merged = |more: &[&str]| fixture.run(&[&["export", "run", "--merged", "--force"], more].concat());
    merged(&["--out", "model"]).refused(2, &["--out must not be a directory that is read"]);
    for option in ["--ema", "--merged", "--role=actor"] {
        let line = format!("export model --adapter run/export --out x {}", option.replace('=', " "));
        let words = format!("{} does not apply", option.split('=').next().expect("a name"));
        fixture.run(&line.split(' ').collect::<Vec<_>>()).refused(2, &[&words]);
    }
    fixture.copy("wide", "model");
    merged(&["--out", "x"]).refused(65, &["the base model of run/", "has changed: ", "model/model.safetensors"]);
    let judged = ["job.kind=eval", "job.dir=judged", "model.actor=run", "eval.every_steps=0"];
    fixture.job(&judged).refused(65, &["the base model of ", "has changed: ", "model/model.safetensors"]);
    assert!(!fixture.path("x").exists());
}

#[test]
fn the_tokenizer_is_that_of_the_base_unless_the_adapter_has_another() {
    let fixture = Fixture::new();
    fixture.job(&["lora.rank=2", "job.steps=1", "eval.every_steps=0"]).well();
    let note = "the tokenizer is the adapter's, run/export, which differs";
    let says = |more: &[&str]| {
        let line =
            ["generate", "--model", "model", "--adapter", "run/export", "--no-chat-template", "--prompt", "1+1="];
        fixture.run(&[&line, more].concat()).well().stderr
    };
    assert!(!says(&[]).contains(note));
    fs::copy(fixture.path("model/tokenizer.json"), fixture.path("run/export/tokenizer.json")).expect("a copy");
    assert!(!says(&[]).contains(note), "it is the same");
    fixture.write("run/export/tokenizer.json", fixture.text("model/tokenizer.json") + "\n");
    assert!(says(&[]).contains(note));
    let job = fixture.run(&["run", "job.toml", "job.dir=more", "model.adapter=run/export", "--dry-run"]).well().stderr;
    assert!(job.contains("the tokenizer is that of model.actor"), "{job}");
}
