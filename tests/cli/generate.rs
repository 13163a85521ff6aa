//! `generate`: beam search, options of single rows, and rows that come one by one.

use super::command;
use super::fixture::Fixture;
use super::offline::{answers, floats};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

#[test]
fn a_beam_search_returns_the_best_responses_with_their_scores_and_obeys_stop_texts() {
    let fixture = Fixture::new();
    let search = ["--beams", "3", "--samples", "2", "--max-new-tokens", "12", "--length-penalty", "2"];
    let rows = [json!({"prompt": "1+1=", "score": "kept by samples"}), json!({"prompt": "2+2="})];
    let found = |more: &[&str]| answers(&fixture, "generate", "model", &rows, &[&search, more].concat());
    let best = found(&[]);
    assert_eq!(best.len(), 4);
    for answer in &best {
        let logprobs = floats(&answer["logprobs"]);
        let score = f64::from(logprobs.iter().sum::<f32>()) / (logprobs.len() as f64).powi(2);
        assert!((answer["score"].as_f64().expect("a score") - score).abs() < 1e-4, "{answer}");
    }
    assert!(best[0]["score"].as_f64() >= best[1]["score"].as_f64() && best[0]["tokens"] != best[1]["tokens"]);
    let text = best[0]["text"].as_str().expect("text").to_owned();
    let stop: String = text.chars().skip(3).take(2).collect();
    let stopped = found(&["--stop", &stop, "--early-stopping", "true", "--ignore-eos"]);
    assert!(stopped.iter().any(|answer| answer["finish"] == "stop_string"), "{stopped:?}");
    assert!(stopped.iter().all(|answer| !answer["text"].as_str().expect("text").contains(&stop)), "{stopped:?}");
    let drawn = answers(&fixture, "generate", "model", &rows, &["--max-new-tokens", "1"]);
    assert_eq!((&drawn[0]["score"], &drawn[1]["score"]), (&json!("kept by samples"), &Value::Null));
}

#[test]
fn sampling_fields_of_a_row_act_like_the_options_of_the_same_names() {
    let fixture = Fixture::new();
    let cases = [
        (json!({"temperature": 0, "max_new_tokens": 7}), "--temperature 0 --max-new-tokens 7"),
        (
            json!({"samples": 3, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3, "max_new_tokens": 9}),
            "--samples 3 --top-k 9 --min-p 0.01 --repetition-penalty 1.3 --max-new-tokens 9",
        ),
        (
            json!({"logit_bias": {"40": 4, "7": 2.5}, "top_p": 0.9, "max_new_tokens": 9}),
            "--logit-bias {\"7\":2.5,\"40\":4} --top-p 0.9 --max-new-tokens 9",
        ),
        (
            json!({"bad_words": ["1", "2="], "stop": ["3"], "ignore_eos": true, "max_new_tokens": 30}),
            "--bad-word 1 --bad-word 2= --stop 3 --ignore-eos --max-new-tokens 30",
        ),
    ];
    let row = |i: usize| json!({"prompt": format!("{i}+1="), "id": i});
    let with = |i: usize, sampling: &Value| {
        let mut row = row(i);
        row["sampling"] = sampling.clone();
        row
    };
    let of_rows = |rows: &[Value], options: &str| {
        let options: Vec<&str> = options.split_whitespace().collect();
        answers(&fixture, "generate", "model", rows, &[&["--top-logprobs", "2"], &options[..]].concat())
    };
    let mixed: Vec<Value> = cases.iter().enumerate().map(|(i, (sampling, _))| with(i, sampling)).collect();
    let plain: Vec<Value> = (0..cases.len()).map(row).collect();
    let got = of_rows(&mixed, "");
    for (i, (sampling, options)) in cases.iter().enumerate() {
        let mut want = of_rows(&plain, options);
        want.retain(|answer| answer["id"] == i);
        for answer in &mut want {
            assert_eq!(answer["top_logprobs"].as_array().map(Vec::len), answer["tokens"].as_array().map(Vec::len));
            answer["sampling"] = sampling.clone();
        }
        let got: Vec<&Value> = got.iter().filter(|answer| answer["id"] == i).collect();
        assert_eq!(got, want.iter().collect::<Vec<_>>(), "{options}");
    }
    // A row with its own seed is sampled like the first row of that --seed, at any position.
    let seeded = of_rows(&[row(1), row(2), with(3, &json!({"seed": 9}))], "--max-new-tokens 9");
    assert_eq!(seeded[2]["tokens"], of_rows(&[row(3)], "--max-new-tokens 9 --seed 9")[0]["tokens"]);
}

#[test]
fn rows_of_standard_input_are_answered_as_they_arrive() {
    let fixture = Fixture::new();
    let arguments = ["generate", "--model", "model", "--input", "-", "--max-new-tokens", "3"];
    let mut command = command::program(fixture.root(), 0);
    let mut program = command.args(arguments).stdin(Stdio::piped()).spawn().expect("the program");
    let (mut input, output) = (program.stdin.take().expect("a pipe"), program.stdout.take().expect("a pipe"));
    let mut lines = BufReader::new(output).lines();
    let mut seen = Vec::new();
    for _ in 0..2 {
        writeln!(input, "{{\"tokens\": [5, 6]}}").expect("it reads");
        seen.push(lines.next().expect("an answer before the input ends").expect("a line"));
    }
    fixture.jsonl("rows.jsonl", &[json!({"tokens": [5, 6]}), json!({"tokens": [5, 6]})]);
    let of_file = fixture.run(&[&arguments[..4], &["rows.jsonl"], &arguments[5..]].concat()).well().stdout;
    assert_eq!(seen, of_file.lines().collect::<Vec<_>>());
    writeln!(input, "{{\"tokens\": []}}").expect("it reads");
    drop(input);
    let ended = program.wait_with_output().expect("our own child");
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.code() == Some(65) && said.contains("- line 3: a row must have at least 1 token"), "{said}");
}

#[test]
fn a_limit_beyond_the_context_is_reported_before_the_responses() {
    let fixture = Fixture::new();
    fixture.jsonl("rows.jsonl", &[json!({"tokens": [5, 6]})]);
    let asked = |most: &str| {
        let ended = fixture.run(&["generate", "--model", "model", "--input", "rows.jsonl", "--max-new-tokens", most]);
        ended.well().stderr
    };
    let said = asked("257");
    let at = |text: &str| said.find(text).unwrap_or_else(|| panic!("{text} is not in {said}"));
    let note = at("generate: --max-new-tokens = 257 exceeds the model's context of 256 tokens");
    assert!(note < at("generate: 1 responses"), "{said}");
    assert!(!asked("256").contains("exceeds"));
}

#[test]
fn a_chat_without_a_template_is_rejected_with_the_options_and_verbs_that_work() {
    let fixture = Fixture::new();
    fixture.edit("model/tokenizer_config.json", |config| drop(config.as_object_mut().unwrap().remove("chat_template")));
    let ended = fixture.run(&["chat", "--model", "model"]).refused(65, &["has no chat template"]);
    ended.hinted("put the model's chat_template.jinja into model, or let it continue plain text with `rlhf-hpc generate --model model --prompt TEXT`");
}
