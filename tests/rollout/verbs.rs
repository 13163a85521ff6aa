//! The offline verbs, as a user runs them.

use crate::rollout::models::{Tiny, prompts, tiny, training_logprobs};
use crate::rollout::stopping::write_tokenizer;
use rlhf_hpc::model::{Arch, Head, Keys, Transformer, Weights, export, init, packed_positions};
use rlhf_hpc::tensor::DType;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Output};

fn rlhf(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rlhf-hpc")).args(arguments).output().expect("the binary starts")
}

fn lines(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number") as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|x| x.as_u64().expect("a number") as u32).collect()
}

/// A model directory, rows in a file beside it, and what they are in memory.
struct Fixture {
    dir: tempfile::TempDir,
    model: Tiny,
}

impl Fixture {
    fn new() -> Self {
        let model = tiny("llama", "LlamaForCausalLM", &json!({}), DType::F32);
        let dir = tempfile::tempdir().expect("a directory");
        let fixture = Self { dir, model };
        let arch = &fixture.model.transformer.arch;
        export::export(&fixture.path("m"), arch, &fixture.model.weights, DType::F32, None).expect("an export");
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn input(&self, rows: &[Value]) -> String {
        self.text(&rows.iter().map(|row| row.to_string() + "\n").collect::<String>())
    }

    fn text(&self, text: &str) -> String {
        let path = self.path("in.jsonl");
        std::fs::write(&path, text).expect("a file");
        path.to_string_lossy().into_owned()
    }

    /// Runs a verb on the model `name`.
    fn run(&self, verb: &str, name: &str, input: &str, more: &[&str]) -> Output {
        let model = self.path(name).to_string_lossy().into_owned();
        rlhf(&[&[verb, "--model", &model, "--input", input], more].concat())
    }
}

fn token_rows() -> Vec<Value> {
    prompts(&[7, 1, 60, 33, 2]).iter().map(|p| json!({"tokens": p.tokens, "other": "is kept out of it"})).collect()
}

#[test]
fn logprobs_gives_the_training_forward_of_every_token_but_the_first_in_order() {
    let fixture = Fixture::new();
    let out = lines(&fixture.run("logprobs", "m", &fixture.input(&token_rows()), &[]));
    let Tiny { transformer, weights } = &fixture.model;
    for (line, prompt) in out.iter().zip(prompts(&[7, 1, 60, 33, 2])) {
        let n = prompt.tokens.len();
        let keys = Keys::Packed { cu_seqlens: &[0, n] };
        let hidden = transformer.forward(weights, &prompt.tokens, &packed_positions(&[0, n]), keys, None);
        let rows: Vec<u32> = (0..n as u32 - 1).collect();
        let (expected, _) = transformer.logprobs(weights, &hidden, &rows, &prompt.tokens[1..], 1.0, false);
        assert_eq!(floats(&line["logprobs"]), expected);
    }
    assert_eq!(out.len(), 5);
}

#[test]
fn generate_gives_what_the_engine_gives_in_the_order_of_the_rows() {
    let fixture = Fixture::new();
    let input = fixture.input(&token_rows());
    let options = ["--max-new-tokens", "20", "--samples", "3", "--temperature", "0.8", "--top-p", "0.9"];
    let out = lines(&fixture.run("generate", "m", &input, &options));
    assert_eq!(out.len(), 15);
    // The verb reads a row's number as its prompt's identity, and counts nothing but it.
    let mut prompts = prompts(&[7, 1, 60, 33, 2]);
    prompts.iter_mut().enumerate().for_each(|(i, p)| p.id = i as u64);
    for (i, line) in out.iter().enumerate() {
        let tokens = ids(&line["tokens"]);
        let response = rlhf_hpc::experience::Response {
            prompt: i / 3,
            tokens: tokens.clone(),
            ..rlhf_hpc::experience::Response::default()
        };
        let trained = training_logprobs(&fixture.model, &prompts, &[response], 0.8);
        assert_eq!(floats(&line["logprobs"]), trained[0], "row {i}");
        assert_eq!(line["text"], Value::Null, "there is no tokenizer");
        let stopped = tokens.last() == Some(&2);
        assert_eq!(line["finish"], if stopped { "stop" } else { "length" });
        assert!(stopped || tokens.len() == 20);
    }
    assert_eq!(lines(&fixture.run("generate", "m", &input, &options)), out, "the same seed repeats");
    let seeded = [&options[..], &["--seed", "9"]].concat();
    assert_ne!(lines(&fixture.run("generate", "m", &input, &seeded)), out);
}

#[test]
fn a_text_prompt_is_encoded_and_the_new_text_is_decoded_and_cut_before_a_stop_text() {
    let fixture = Fixture::new();
    let tokenizer = write_tokenizer(&fixture.path("m"));
    let text = "a";
    let out = lines(&fixture.run("generate", "m", &fixture.input(&[json!({"prompt": text})]), &["--ignore-eos"]));
    let tokens = ids(&out[0]["tokens"]);
    assert_eq!(out[0]["text"], tokenizer.decode(&tokens, true).expect("text"));
    let by_tokens = json!({"tokens": tokenizer.encode(text, true).expect("tokens")});
    assert_eq!(lines(&fixture.run("generate", "m", &fixture.input(&[by_tokens]), &["--ignore-eos"])), out);
    let whole = out[0]["text"].as_str().expect("text");
    let stop: String = whole.chars().skip(10).take(3).collect();
    let stop_options = ["--ignore-eos", "--stop", &stop];
    let stopped = lines(&fixture.run("generate", "m", &fixture.input(&[json!({"prompt": text})]), &stop_options));
    assert_eq!(stopped[0]["finish"], "stop_string");
    assert_eq!(stopped[0]["text"], whole[..whole.find(&stop).expect("it is in there")]);
}

fn refused(output: &Output, code: i32, words: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(output.stdout.is_empty(), "nothing is written before all rows are known to be good");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

/// A reward model of the same shape, with mean and std in its config.json.
fn reward_model(fixture: &Fixture) -> (Transformer, Weights) {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "initializer_range": 0.2,
        "mean": 0.5, "std": 0.25
    });
    let arch = Arch::from_config(config.as_object().expect("an object")).expect("a reward model");
    let weights = init::init(&arch, Head::Value, DType::F32, 3);
    export::export(&fixture.path("rm"), &arch, &weights, DType::F32, None).expect("an export");
    (Transformer::new(&arch, &weights.table), weights)
}

#[test]
fn reward_is_the_head_at_the_last_token_raw_or_normalised() {
    let fixture = Fixture::new();
    let (transformer, weights) = reward_model(&fixture);
    let input = fixture.input(&token_rows());
    let raw = lines(&fixture.run("reward", "rm", &input, &[]));
    let normalised = lines(&fixture.run("reward", "rm", &input, &["--normalize"]));
    for (i, prompt) in prompts(&[7, 1, 60, 33, 2]).iter().enumerate() {
        let n = prompt.tokens.len();
        let keys = Keys::Packed { cu_seqlens: &[0, n] };
        let hidden = transformer.forward(&weights, &prompt.tokens, &packed_positions(&[0, n]), keys, None);
        let expected = transformer.values(&weights, &hidden, &[n as u32 - 1])[0];
        assert_eq!(raw[i]["reward"].as_f64().expect("a number") as f32, expected);
        assert_eq!(normalised[i]["reward"].as_f64().expect("a number") as f32, (expected - 0.5) / 0.25);
    }
}

#[test]
fn reward_joins_prompt_and_response_and_refuses_a_language_model() {
    let fixture = Fixture::new();
    reward_model(&fixture);
    let tokenizer = write_tokenizer(&fixture.path("rm"));
    let by_text = fixture.run("reward", "rm", &fixture.input(&[json!({"prompt": "a", "response": "b"})]), &[]);
    let tokens = tokenizer.encode("ab", true).expect("tokens");
    let by_tokens = fixture.run("reward", "rm", &fixture.input(&[json!({"tokens": tokens})]), &[]);
    assert_eq!(lines(&by_text), lines(&by_tokens));
    let input = fixture.input(&token_rows());
    refused(&fixture.run("reward", "m", &input, &[]), 65, &["holds a language model"]);
    refused(&fixture.run("reward", "rm", &fixture.input(&[json!({"prompt": "a"})]), &[]), 65, &["line 1", "response"]);
}
