//! The offline verbs: rows in, rows out, and errors that name the number of the row.

use super::command;
use super::fixture::Fixture;
use crate::process::Running;
use rlhf_hpc::device::Device;
use rlhf_hpc::model::{Head, Keys, Transformer, Weights, load, packed_positions};
use rlhf_hpc::tensor::{DType, Tensor};
use rlhf_hpc::text::Tokenizer;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::fs::File;

/// Checks the result of one good line, and the error for each bad line in second place.
fn check(verb: &[&str], good: &str, bad: &[(&str, &str)]) {
    let fixture = Fixture::new();
    fixture.write("rows.jsonl", format!("{good}\n{good}\n"));
    let arguments = [verb, &["--model", "model", "--input", "rows.jsonl"]].concat();
    let lines = fixture.run(&arguments).well().stdout;
    assert_eq!(lines.lines().count(), 2, "{lines}");
    for (line, words) in bad {
        fixture.write("rows.jsonl", format!("{good}\n{line}\n{good}\n"));
        let ended = fixture.run(&arguments).refused(65, &["rows.jsonl line 2", words]);
        assert_eq!(ended.stdout, "", "rows are checked before the work");
    }
    fixture.write("rows.jsonl", "");
    fixture.run(&arguments).refused(65, &["has no rows"]);
}

#[test]
fn generate_names_the_row_that_it_cannot_read() {
    let long = format!("{{\"tokens\": {:?}}}", vec![1; 256]);
    let bad = [
        ("{\"prompt\": \"1+1=\"", "not JSON"),
        ("[1]", "the line must be a JSON object (got a list)"),
        ("", "empty"),
        ("{\"prompt\": \"\"}", "the prompt is empty"),
        ("{\"prompt\": 3}", "field \"prompt\" must be a string (got a number)"),
        ("{\"tokens\": []}", "at least 1 token"),
        ("{\"tokens\": [1, 272]}", "token 272 (index 1) is outside the vocabulary of 272"),
        ("{\"tokens\": [1.5]}", "must be a list of token ids or messages (got 1.5)"),
        ("{\"tokens\": [1], \"prompt\": \"a\"}", "prompt and tokens"),
        ("{\"text\": \"a\"}", "exactly one of prompt, messages and tokens (got none)"),
        ("{\"messages\": [{\"role\": \"robot\", \"content\": \"a\"}]}", "a role is system, user or assistant"),
        ("{\"messages\": \"hello\"}", "messages must be a list of messages"),
        ("{\"tokens\": [1], \"sampling\": 3}", "field \"sampling\" must be an object (got a number)"),
        ("{\"tokens\": [1], \"sampling\": {\"temprature\": 1}}", "did you mean `temperature`?"),
        ("{\"tokens\": [1], \"sampling\": {\"beams\": 4}}", "use one of temperature, top_k"),
        ("{\"tokens\": [1], \"sampling\": {\"top_p\": 2}}", "sampling.top_p must be between 0 and 1 (got 2)"),
        ("{\"tokens\": [1], \"sampling\": {\"max_new_tokens\": \"a\"}}", "sampling.max_new_tokens: invalid type"),
        (
            "{\"tokens\": [1], \"sampling\": {\"seed\": -1}}",
            "sampling.seed: must be an integer of at least 0 (got a number)",
        ),
        (
            "{\"tokens\": [1], \"sampling\": {\"bad_words\": \"a\"}}",
            "sampling.bad_words: must be a list of strings (got a string)",
        ),
        (
            "{\"tokens\": [1], \"sampling\": {\"logit_bias\": {\"272\": 1}}}",
            "token 272 is outside the vocabulary of 272",
        ),
        (
            "{\"tokens\": [1], \"sampling\": {\"logit_bias\": {\"5\": null}}}",
            "the value for \"5\" must be a finite number (got null)",
        ),
        ("{\"tokens\": [1], \"sampling\": {\"logit_bias\": {\"1+1=2\": 1}}}", "must be 1 token"),
        (&long, "the model's context of 256"),
    ];
    check(&["generate", "--max-new-tokens", "2"], "{\"prompt\": \"1+1=\"}", &bad);
}

#[test]
fn logprobs_names_the_row_that_it_cannot_read() {
    let long = format!("{{\"tokens\": {:?}}}", vec![1; 257]);
    let bad = [
        ("{\"tokens\": \"1 2\"}", "field \"tokens\" must be a list of token ids (got a string)"),
        ("{\"prompt\": \"a\"}", "the row has no field \"response\"; it has: prompt"),
        ("{\"text\": \"a\"}", "the row has no field \"tokens\"; it has: text"),
        ("{\"prompt_tokens\": [], \"tokens\": [1]}", "prompt and response must each have at least 1 token"),
        ("{\"tokens\": [-1]}", "field \"tokens\" must be a list of token ids or messages (got -1)"),
        (&long, "at most max_position_embeddings = 256 tokens (got 257)"),
    ];
    check(&["logprobs"], "{\"tokens\": [1, 2, 3]}", &bad);
}

/// The output of each kind of verb on standard output: results, tables, help.
const TELLING: [&str; 6] = [
    "generate --model model --input rows.jsonl",
    "logprobs --model model --input rows.jsonl",
    "plan job.toml --json",
    "bench logprobs --model tiny --repeats 1",
    "info",
    "--help",
];

#[test]
fn a_failed_write_is_an_error_and_a_closed_output_ends_a_verb_silently() {
    let fixture = Fixture::new();
    fixture.write("rows.jsonl", "{\"tokens\": [1, 2]}\n");
    for line in TELLING {
        let arguments: Vec<&str> = line.split(' ').collect();
        let full = File::options().write(true).open("/dev/full").expect("Linux has it");
        let ended = command::run_onto(fixture.root(), full, &arguments);
        ended.refused(74, &["cannot write standard output", "No space left"]);
        let (reader, closed) = std::io::pipe().expect("the system has pipes");
        drop(reader);
        let ended = command::run_onto(fixture.root(), closed, &arguments).well();
        assert!(!ended.stderr.contains("panicked") && !ended.stderr.contains("rror"), "{line}: {}", ended.stderr);
    }
}

#[test]
fn errors_of_sampling_options_use_the_options_own_names() {
    let fixture = Fixture::new();
    fixture.write("rows.jsonl", "{\"prompt\": \"1+1=\"}\n");
    for (option, value, needed) in [
        ("--temperature", "-1", "at least 0"),
        ("--temperature", "0.0001", "0 (greedy) or at least 0.001"),
        ("--top-p", "1.5", "between 0 and 1"),
        ("--min-p", "2", "between 0 and 1"),
        ("--repetition-penalty", "0", "above 0"),
        ("--samples", "0", "at least 1"),
        ("--samples", "100000000", "at most 65536"),
        ("--max-new-tokens", "18446744073709551615", "at most 134217728"),
        ("--temperature", "inf", "not finite"),
        ("--max-new-tokens", "0", "at least 1"),
    ] {
        let ended = fixture.run(&["generate", "--model", "model", "--input", "rows.jsonl", option, value]);
        ended.refused(2, &[option, needed]);
    }
}

#[test]
fn the_error_of_a_model_that_overflows_names_the_row_and_the_layer() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1"]).well();
    fixture.run(&["export", "run", "--out", "critic", "--role", "critic"]).well();
    fixture.write("rows.jsonl", "{\"tokens\": [1, 2, 3]}\n{\"tokens\": [7, 2, 7]}\n");
    for (verb, model) in [("logprobs", "model"), ("reward", "critic")] {
        let weights = format!("{model}/model.safetensors");
        let mut bytes = fixture.read(&weights);
        // Gate and up of the MLP are finite, and silu(g) * u overflows if the embedding's row is positive.
        for (name, token, value) in [
            ("model.embed_tokens.weight", Some(1), -1.0f32),
            ("model.embed_tokens.weight", Some(2), -1.0),
            ("model.embed_tokens.weight", Some(3), -1.0),
            ("model.embed_tokens.weight", Some(7), 1.0),
            ("model.layers.0.mlp.gate_proj.weight", None, 1e25),
            ("model.layers.0.mlp.up_proj.weight", None, 1e25),
        ] {
            let range = tensor(&bytes, name, token);
            bytes[range].as_chunks_mut::<4>().0.iter_mut().for_each(|x| *x = value.to_le_bytes());
        }
        fixture.write(&weights, bytes);
        let ended = fixture.run(&[verb, "--model", model, "--input", "rows.jsonl", "--batch-tokens", "3"]);
        let ended = ended.refused(65, &["rows.jsonl line 2", "are not finite", "layer 0"]);
        assert_eq!(ended.stdout.lines().count(), 1, "{verb}: {}", ended.stdout);
        assert!(!ended.stdout.contains("null"), "{verb}: {}", ended.stdout);
    }
}

/// The bytes of a tensor of a safetensors file, or of one of its rows.
fn tensor(file: &[u8], name: &str, row: Option<usize>) -> std::ops::Range<usize> {
    let (header, tensors) = SafeTensors::read_metadata(file).expect("safetensors");
    let tensor = tensors.info(name).expect("it is there");
    assert_eq!(tensor.dtype, Dtype::F32);
    let [start, end] = <[usize; 2]>::from(tensor.data_offsets).map(|at| 8 + header + at);
    let width = 4 * tensor.shape[1];
    row.map_or(start..end, |row| start + row * width..start + (row + 1) * width)
}

#[test]
fn paths_that_are_not_regular_files_are_named_and_hang_nothing() {
    let fixture = Fixture::new();
    fixture.write("rows.jsonl", "{\"tokens\": [1, 2]}\n");
    let made = std::process::Command::new("mkfifo").arg(fixture.path("fifo")).status().expect("mkfifo runs");
    assert!(made.success());
    let copy = |name: &str, file: &str| {
        fixture.copy("model", name);
        let path = fixture.path(&format!("{name}/{file}"));
        std::fs::remove_file(&path).expect("it was there");
        std::os::unix::fs::symlink(fixture.path("fifo"), path).expect("a link");
    };
    copy("no-config", "config.json");
    copy("no-weights", "model.safetensors");
    copy("no-tokenizer", "tokenizer.json");
    for (arguments, code, name) in [
        (&["logprobs", "--model", "model", "--input", "fifo"][..], 74, "fifo"),
        (&["logprobs", "--model", "no-config", "--input", "rows.jsonl"], 74, "no-config/config.json"),
        (&["logprobs", "--model", "no-weights", "--input", "rows.jsonl"], 65, "no-weights"),
        (&["generate", "--model", "no-tokenizer", "--input", "rows.jsonl"], 74, "no-tokenizer/tokenizer.json"),
        (&["init", "--config", "fifo", "--out", "new"], 74, "fifo"),
        (&["tokenizer", "fifo", "--vocabulary", "300", "--out", "new"], 74, "fifo"),
        (&["shard", "fifo", "--tokenizer", "model", "--out", "new"], 74, "fifo"),
        (&["run", "fifo"], 2, "fifo"),
        (&["run", "job.toml", "data.prompts=[\"fifo.jsonl\"]"], 65, "fifo.jsonl"),
    ] {
        fixture.run(arguments).refused(code, &[name]);
    }
}

/// The output rows of a verb for input rows, with a model of the fixture.
pub fn answers(fixture: &Fixture, verb: &str, model: &str, rows: &[Value], more: &[&str]) -> Vec<Value> {
    fixture.jsonl("rows.jsonl", rows);
    command::rows(&fixture.run(&[&[verb, "--model", model, "--input", "rows.jsonl"], more].concat()).well().stdout)
}

pub fn floats(value: &Value) -> Vec<f32> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number") as f32).collect()
}

fn token_rows() -> Vec<Vec<u32>> {
    [7, 1, 60, 33, 2].map(|n| (0..n).map(|i| 3 + (n * 31 + i * 17) % 200).collect()).into()
}

fn rows_of(tokens: &[Vec<u32>]) -> Vec<Value> {
    tokens.iter().map(|tokens| json!({"tokens": tokens, "id": tokens.len()})).collect()
}

/// A model of the fixture in memory, and the hidden state of a row of tokens.
fn forward(fixture: &Fixture, name: &str, head: Head, tokens: &[u32]) -> (Transformer, Weights, Tensor) {
    let (arch, weights) = load::load(Device::Cpu, &fixture.path(name), head, DType::F32, 0).expect("a model");
    let (transformer, cu_seqlens) = (Transformer::new(&arch, &weights.table), [0, tokens.len()]);
    let keys = Keys::Packed(cu_seqlens.as_slice().into());
    let hidden = transformer.forward(&weights, tokens, &packed_positions(&cu_seqlens), keys, None);
    (transformer, weights, hidden)
}

#[test]
fn logprobs_gives_the_training_forward_of_every_token_but_the_first_in_order() {
    let fixture = Fixture::new();
    let answers = answers(&fixture, "logprobs", "model", &rows_of(&token_rows()), &[]);
    assert_eq!(answers.len(), 5);
    for (answer, tokens) in answers.iter().zip(token_rows()) {
        let (transformer, weights, hidden) = forward(&fixture, "model", Head::LanguageModel, &tokens);
        let rows: Vec<u32> = (0..tokens.len() as u32 - 1).collect();
        let (expected, _) = transformer.logprobs(&weights, &hidden, &rows, &tokens[1..], 1.0, false);
        assert_eq!(floats(&answer["logprobs"]), expected);
    }
}

#[test]
fn generate_records_what_logprobs_gives_repeats_with_its_seed_and_decodes_and_stops() {
    let fixture = Fixture::new();
    let options = ["--max-new-tokens", "20", "--samples", "3", "--top-p", "0.9"];
    let generate =
        |more: &[&str]| answers(&fixture, "generate", "model", &rows_of(&token_rows()), &[&options, more].concat());
    let drawn = generate(&[]);
    assert_eq!(drawn.len(), 15);
    let ids = |answer: &Value| -> Vec<u32> { floats(&answer["tokens"]).into_iter().map(|id| id as u32).collect() };
    let scored = answers(&fixture, "logprobs", "model", &drawn, &[]);
    for (answer, scored) in drawn.iter().zip(&scored) {
        let tokens = ids(answer);
        assert_eq!((&scored["logprobs"], &scored["tokens"]), (&answer["logprobs"], &answer["tokens"]));
        let stopped = answer["finish"] == "stop";
        assert!(stopped || (answer["finish"] == "length" && tokens.len() == 20), "{answer}");
    }
    assert_eq!(generate(&[]), drawn, "the same seed repeats");
    assert_ne!(generate(&["--seed", "9"]), drawn);

    // A text prompt is encoded, and the new text is decoded and cut before a stop text.
    let tokenizer = Tokenizer::load(&fixture.path("model")).expect("a tokenizer");
    let free =
        |row: Value, more: &[&str]| answers(&fixture, "generate", "model", &[row], &[&["--ignore-eos"], more].concat());
    let by_text = free(json!({"prompt": "1+1="}), &[]);
    assert_eq!(by_text[0]["text"], tokenizer.decode(&ids(&by_text[0]), true).expect("text"));
    let by_ids = free(json!({"tokens": tokenizer.encode("1+1=", true).expect("tokens")}), &[]);
    assert_eq!(
        (&by_ids[0]["prompt_tokens"], &by_ids[0]["tokens"]),
        (&by_text[0]["prompt_tokens"], &by_text[0]["tokens"])
    );
    let text = by_text[0]["text"].as_str().expect("text");
    let of_text = answers(&fixture, "logprobs", "model", &[json!({"prompt": "1+1=", "response": "12"})], &[]);
    let tokens = ["1+1=", "12"].map(|text| tokenizer.encode(text, text == "1+1=").expect("tokens"));
    let by_tokens = json!({"prompt_tokens": tokens[0], "tokens": tokens[1]});
    assert_eq!(ids(&of_text[0]), tokens[1]);
    assert_eq!(of_text, answers(&fixture, "logprobs", "model", &[by_tokens], &[]));
    let stop: String = text.chars().skip(10).take(3).collect();
    let stopped = free(json!({"prompt": "1+1="}), &["--stop", &stop]);
    assert_eq!(stopped[0]["finish"], "stop_string");
    assert_eq!(stopped[0]["text"], text[..text.find(&stop).expect("it is in there")]);
}

#[test]
fn a_trained_critic_is_exported_as_a_reward_model_whose_head_scores_raw_or_normalised() {
    let fixture = Fixture::new();
    fixture.job(&[]).well();
    fixture.run(&["export", "run", "--out", "critic", "--role", "critic"]).well();
    fixture.edit("critic/config.json", |config| {
        config["mean"] = json!(0.5);
        config["std"] = json!(0.25);
    });
    let rows = rows_of(&token_rows());
    let raw = answers(&fixture, "reward", "critic", &rows, &[]);
    let normalised = answers(&fixture, "reward", "critic", &rows, &["--normalize"]);
    let reward = |answer: &Value| answer["reward"].as_f64().expect("a number") as f32;
    for (i, tokens) in token_rows().iter().enumerate() {
        let (transformer, weights, hidden) = forward(&fixture, "critic", Head::Value, tokens);
        let expected = transformer.values(&weights, &hidden, &[tokens.len() as u32 - 1])[0];
        assert_eq!((reward(&raw[i]), reward(&normalised[i])), (expected, (expected - 0.5) / 0.25));
    }
    let tokens =
        Tokenizer::load(&fixture.path("model")).and_then(|tokenizer| tokenizer.encode("1+1=2", true)).expect("tokens");
    let joined = answers(&fixture, "reward", "critic", &[json!({"prompt": "1+1=", "response": "2"})], &[]);
    assert_eq!(joined[0]["reward"], answers(&fixture, "reward", "critic", &rows_of(&[tokens]), &[])[0]["reward"]);
    let said = |response: &str| {
        fixture.jsonl("rows.jsonl", &[json!({"prompt": "1+1=", "response": response})]);
        fixture.run(&["reward", "--model", "critic", "--input", "rows.jsonl"]).well().stderr
    };
    assert!(said("2").contains("write <|end|> at the end of each response") && !said("2<|end|>").contains("<|end|>"));
    fixture.run(&["reward", "--model", "model", "--input", "rows.jsonl"]).refused(65, &["must hold a reward model"]);
    fixture.jsonl("rows.jsonl", &[json!({"prompt": "a"})]);
    fixture.run(&["reward", "--model", "critic", "--input", "rows.jsonl"]).refused(65, &["line 1", "response"]);
    fixture
        .run(&["export", "run", "--out", "x", "--role", "judge"])
        .refused(2, &["--role must be actor or critic", "judge"]);
}

/// Lines of a verb that reads the file `rows.jsonl`.
fn piped(fixture: &Fixture, arguments: &[&str]) -> Vec<Value> {
    command::rows(&fixture.run(&[arguments, &["--input", "rows.jsonl"]].concat()).well().stdout)
}

#[test]
fn generated_rows_are_scored_and_selected_with_all_fields_and_can_be_trained_on() {
    let fixture = Fixture::new();
    fixture.job(&[]).well();
    fixture.run(&["export", "run", "--out", "critic", "--role", "critic"]).well();
    // Rows with demonstrations, which differ from the model's answers.
    let asked = |i: i32| json!({"prompt": format!("{i}+{i}="), "answer": 2 * i, "response": "a demonstration"});
    let asked: Vec<Value> = (1..6).map(asked).collect();
    let options = ["--samples", "6", "--max-new-tokens", "6", "--ignore-eos"];
    let drawn = answers(&fixture, "generate", "model", &asked, &options);
    let mut scored = answers(&fixture, "reward", "critic", &drawn, &[]);
    assert_eq!(scored.len(), 30);
    // Ends two of three responses, as a trained model would.
    scored.iter_mut().enumerate().filter(|(i, _)| i % 3 > 0).for_each(|(_, row)| row["finish"] = json!("stop"));
    let of = |prompt: &Value| -> Vec<&Value> { scored.iter().filter(|row| row["prompt"] == *prompt).collect() };
    let reward = |row: &Value| row["reward"].as_f64().expect("a number");
    let is_whole = |row: &&&Value| row["finish"] != "length" && row["text"] != "";
    fixture.jsonl("rows.jsonl", &scored);
    let chosen = piped(&fixture, &["select", "--best", "1"]);
    assert!(!chosen.is_empty());
    for row in &chosen {
        let best = of(&row["prompt"]).iter().filter(is_whole).map(|row| reward(row)).fold(f64::MIN, f64::max);
        assert_eq!(reward(row), best);
        assert!(of(&row["prompt"]).iter().any(|one| one["text"] == row["response"]), "{row}");
        assert!(row["answer"].is_number() && row.get("tokens").is_none(), "{row}");
    }
    let pairs = piped(&fixture, &["select", "--pairs"]);
    for row in &pairs {
        let worst = of(&row["prompt"]).iter().map(|row| reward(row)).fold(f64::MAX, f64::min);
        let better = scored.iter().find(|one| one["prompt"] == row["prompt"] && one["text"] == row["chosen"]);
        assert_eq!(row["margin"], json!(reward(better.expect("a response")) - worst));
    }
    // A job trains on the selected rows.
    fixture.jsonl("pairs.jsonl", &pairs);
    fixture
        .run(&[
            "run",
            "job.toml",
            "--dry-run",
            "job.kind=\"dpo\"",
            "job.dir=\"round\"",
            "data.prompts=[\"pairs.jsonl\"]",
            "data.prompt_split=\"\"",
            "data.eval_split=\"\"",
        ])
        .well();
    let least = reward(&chosen[0]);
    let least = piped(&fixture, &["select", "--min", &least.to_string()]);
    assert!(least.iter().all(|row| reward(row) >= reward(&chosen[0])));
    let messages =
        json!({"messages": [{"role": "user", "content": "1+1"}], "text": "2", "reward": 0.5, "finish": "stop"});
    fixture.jsonl("rows.jsonl", &[messages, json!({"prompt": "a", "response": "b", "reward": -1})]);
    let conditioned = piped(&fixture, &["select", "--template", "{input} <score>: {reward} "]);
    let expected = json!([{"role": "user", "content": "1+1 <score>: 0.50 "}, {"role": "assistant", "content": "2"}]);
    assert_eq!((&conditioned[0]["messages"], &conditioned[1]["prompt"]), (&expected, &json!("a <score>: -1.00 ")));
    for (row, words) in [
        (json!({"prompt": "a", "response": "b"}), "no field \"reward\""),
        (json!({"prompt": "a", "response": "b", "reward": "high"}), "must be a number"),
        (json!({"response": "b", "reward": 1}), "prompt_tokens"),
        (json!({"prompt": "a", "response": "", "reward": 1}), "no row is selected"),
    ] {
        fixture.jsonl("rows.jsonl", &[row]);
        fixture.run(&["select", "--input", "rows.jsonl"]).refused(65, &[words]);
    }
    // Pairs need complete responses and different rewards: the hint names the missing one.
    for (finish, hint) in [("length", "--max-new-tokens"), ("stop", "different rewards")] {
        let row = |reward: i32| json!({"prompt": "a", "response": "b", "reward": reward, "finish": finish});
        fixture.jsonl("rows.jsonl", &[row(1), row(2)]);
        fixture.run(&["select", "--pairs", "--input", "rows.jsonl"]).refused(65, &["no row is selected"]).hinted(hint);
    }
}

#[test]
fn a_checkpoint_exports_like_its_run_and_a_damaged_one_is_not_exported() {
    let fixture = Fixture::new();
    let of_tools = "additional_chat_templates/tool_use (v2).jinja";
    fixture.write(&format!("model/{of_tools}"), "{{ messages }}");
    fixture.job(&[]).well();
    fixture.run(&["export", "run/checkpoints/step-2", "--out", "again"]).well();
    for file in ["model.safetensors", "tokenizer.json", of_tools] {
        assert!(fixture.read(&format!("again/{file}")) == fixture.read(&format!("run/export/{file}")), "{file}");
    }
    // A folder with other contents is not overwritten.
    fixture.write("mine/notes.txt", "keep");
    fixture.run(&["export", "run", "--out", "mine"]).refused(2, &["mine"]);
    assert_eq!(fixture.text("mine/notes.txt"), "keep");
    let name = "run/checkpoints/step-2/actor.weights.rank-0000.bin";
    let mut bytes = fixture.read(name);
    bytes[40] ^= 1;
    fixture.write(name, bytes);
    fixture.run(&["export", "run/checkpoints/step-2", "--out", "x"]).refused(65, &["step-2", "actor.weights"]);
    assert!(!fixture.path("x").exists());
}

#[test]
fn the_device_is_reported_and_a_missing_or_unsuitable_device_is_rejected() {
    let fixture = Fixture::new();
    fixture.write("rows.jsonl", "{\"tokens\": [1, 2, 3]}\n");
    for verb in ["generate", "logprobs"] {
        let run = |more: &[&str]| fixture.run(&[&[verb, "--model", "model", "--input", "rows.jsonl"], more].concat());
        let chosen = run(&[]).well();
        let line = chosen.stderr.lines().next().expect("a line").to_owned();
        // The device is automatic: missing kernels of a GPU are not an error.
        assert!(line.starts_with(&format!("{verb}: ")) && line.contains(" in f32, no GPU: "), "{line}");
        assert!(!line.contains("--device"), "{line}");
        // No GPU kernel supports heads of 8: the error comes before the search for a GPU.
        let words = "the head dim must be one of 32, 64, 80, 96, 128, 256 with --device gpu (got 8)";
        run(&["--device", "gpu"]).refused(2, &[words]).hinted("--device cpu");
        run(&["--device", "gpu", "--dtype", "f32"]).refused(2, &["--dtype f32"]).hinted("--dtype bf16");
        let asked = run(&["--device", "cpu", "--dtype", "bf16"]).well();
        assert!(asked.stderr.lines().next().expect("a line").ends_with(" in bf16"), "{}", asked.stderr);
        assert_eq!(run(&["--device", "cpu", "--dtype", "f32"]).well().stdout, chosen.stdout);
        run(&["--device", "tpu"]).refused(2, &["--device", "tpu"]);
        run(&["--dtype", "f16"]).refused(2, &["--dtype", "f16"]);
    }
}

#[test]
fn a_prompt_option_and_chat_messages_are_answered_as_streamed_text() {
    let fixture = Fixture::new();
    let greedy = ["--temperature", "0", "--max-new-tokens", "12"];
    let text = |row: Value| {
        let answer = answers(&fixture, "generate", "model", &[row], &greedy)[0]["text"].as_str().map(str::to_owned);
        answer.expect("text") + "\n"
    };
    let by_prompt = fixture.run(&[&["generate", "--model", "model", "--prompt", "1+1="], &greedy[..]].concat()).well();
    assert_eq!(by_prompt.stdout, text(json!({"prompt": "1+1="})));
    fixture.run(&["generate", "--model", "model"]).refused(2, &["either --input or --prompt"]);
    fixture.write("said", "what is 1+1\n\n/reset\nwhat is 2+2\n");
    let mut chat = command::program(fixture.root(), 0);
    let said = File::open(fixture.path("said")).expect("it was written");
    chat.args([&["chat", "--model", "model"], &greedy[..]].concat()).stdin(said);
    let ended = Running::new(chat).end().well();
    let of = |content: &str| text(json!({"messages": [{"role": "user", "content": content}]}));
    assert_eq!(ended.stdout, of("what is 1+1") + &of("what is 2+2"), "{}", ended.stderr);
}

#[test]
fn progress_is_shown_on_a_terminal_that_does_not_receive_the_rows() {
    let fixture = Fixture::new();
    fixture.write("rows.jsonl", "{\"prompt\": \"1+1=\"}\n".repeat(40));
    for (verb, more) in [("generate", "--max-new-tokens 16"), ("logprobs", "--batch-tokens 16")] {
        if verb == "logprobs" {
            fixture.write("rows.jsonl", "{\"tokens\": [1, 2, 3]}\n".repeat(40));
        }
        let line = format!("{} {verb} --model model --input rows.jsonl {more}", env!("CARGO_BIN_EXE_rlhf-hpc"));
        let shown = |line: &str| {
            let mut script = std::process::Command::new("script");
            script.args(["-qec", line, "shown"]).current_dir(fixture.root()).env("TERM", "xterm");
            let status = script.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null()).status();
            assert!(status.expect("util-linux has it").success(), "{line}");
            fixture.text("shown")
        };
        let text = shown(&format!("{line} > rows"));
        assert!(text.contains(&format!("{verb}: ")) && text.contains("/40"), "{text:?}");
        assert_eq!(fixture.text("rows").lines().count(), 40, "{verb}");
        assert!(!shown(&line).contains("/40"), "rows and bar on one terminal");
    }
}
