//! The offline verbs: rows in, rows out, and the row that is wrong by its number.

use super::command;
use super::room::Room;
use serde_json::Value;

/// What one good line gives, and what each bad line, put second, is refused for.
fn check(verb: &[&str], good: &str, bad: &[(&str, &str)]) {
    let room = Room::new();
    room.write("rows.jsonl", format!("{good}\n{good}\n"));
    let arguments = [verb, &["--model", "model", "--input", "rows.jsonl"]].concat();
    let lines = room.run(&arguments).well().stdout;
    assert_eq!(lines.lines().count(), 2, "{lines}");
    for (line, words) in bad {
        room.write("rows.jsonl", format!("{good}\n{line}\n{good}\n"));
        let ended = room.run(&arguments).refused(65, &["rows.jsonl line 2", words]);
        assert_eq!(ended.stdout, "", "rows are checked before the work");
    }
    room.write("rows.jsonl", "");
    room.run(&arguments).refused(65, &["holds no rows"]);
}

#[test]
fn generate_names_the_row_that_it_cannot_read() {
    let long = format!("{{\"tokens\": {:?}}}", vec![1; 64]);
    let bad = [
        ("{\"prompt\": \"1+1=\"", "invalid JSON"),
        ("[1]", "needed is a JSON object"),
        ("", "empty"),
        ("{\"prompt\": \"\"}", "the prompt is empty"),
        ("{\"prompt\": 3}", "prompt is a number, needed is a string"),
        ("{\"tokens\": []}", "no tokens"),
        ("{\"tokens\": [1, 280]}", "token 280 (at 1) is outside the vocabulary of 280"),
        ("{\"tokens\": [1.5]}", "needed is a token id"),
        ("{\"tokens\": [1], \"prompt\": \"a\"}", "prompt and tokens"),
        ("{\"text\": \"a\"}", "none of prompt, messages, tokens"),
        ("{\"messages\": [{\"role\": \"robot\", \"content\": \"a\"}]}", "a role is system, user or assistant"),
        ("{\"messages\": \"hello\"}", "messages is no list of messages"),
        (&long, "the model's context of 64"),
    ];
    check(&["generate", "--max-new-tokens", "2"], "{\"prompt\": \"1+1=\"}", &bad);
}

#[test]
fn logprobs_names_the_row_that_it_cannot_read() {
    let long = format!("{{\"tokens\": {:?}}}", vec![1; 65]);
    let bad = [
        ("{\"tokens\": \"1 2\"}", "tokens is a string, needed is a list"),
        ("{\"prompt\": \"a\"}", "the row has no tokens"),
        ("{\"tokens\": [-1]}", "tokens[0] is -1"),
        (&long, "65 tokens, the model's max_position_embeddings is 64"),
    ];
    check(&["logprobs"], "{\"tokens\": [1, 2, 3]}", &bad);
}

#[test]
fn generate_answers_each_row_in_its_order_with_the_fields_of_the_format() {
    let room = Room::new();
    room.write("rows.jsonl", "{\"prompt\": \"1+1=\"}\n{\"tokens\": [5, 6, 7]}\n{\"prompt\": \"9*9=\"}\n");
    let line = "generate --model model --input rows.jsonl --max-new-tokens 3 --samples 2 --ignore-eos --seed 4";
    let generate = || room.run(&line.split(' ').collect::<Vec<_>>()).well().stdout;
    let lines = generate();
    assert_eq!(lines, generate(), "the same seed gives the same samples");
    let rows: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 6);
    for row in &rows {
        let keys: Vec<&String> = row.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["tokens", "text", "logprobs", "finish"]);
        assert_eq!((row["tokens"].as_array().unwrap().len(), row["logprobs"].as_array().unwrap().len()), (3, 3));
        assert_eq!(row["finish"], "length");
    }
}

#[test]
fn logprobs_are_those_that_greedy_generation_reports() {
    let room = Room::new();
    room.write("rows.jsonl", "{\"tokens\": [5, 6, 7]}\n");
    let line = "generate --model model --input rows.jsonl --max-new-tokens 4 --temperature 0 --ignore-eos";
    let made: Value = serde_json::from_str(&room.run(&line.split(' ').collect::<Vec<_>>()).well().stdout).unwrap();
    let whole: Vec<Value> =
        [5, 6, 7].map(Value::from).into_iter().chain(made["tokens"].as_array().unwrap().clone()).collect();
    room.write("whole.jsonl", format!("{}\n", serde_json::json!({ "tokens": whole })));
    let scored = room.run(&["logprobs", "--model", "model", "--input", "whole.jsonl"]).well().stdout;
    let scored: Value = serde_json::from_str(&scored).unwrap();
    assert_eq!(scored["logprobs"].as_array().unwrap().len(), 6);
    assert_eq!(scored["logprobs"].as_array().unwrap()[2..], made["logprobs"].as_array().unwrap()[..]);
}

/// What each kind of verb writes to standard output: results, what it shows, its help.
const TELLING: [&str; 6] = [
    "generate --model model --input rows.jsonl",
    "logprobs --model model --input rows.jsonl",
    "plan job.toml --gpu a100-80g",
    "bench logprobs --model tiny --repeats 1",
    "info",
    "--help",
];

#[test]
fn what_cannot_be_written_is_an_error() {
    let room = Room::new();
    room.write("rows.jsonl", "{\"tokens\": [1, 2]}\n");
    for line in TELLING {
        let ended = command::run_on_full(room.root(), &line.split(' ').collect::<Vec<_>>());
        ended.refused(74, &["cannot write standard output", "No space left"]);
    }
}

#[test]
fn a_verb_whose_output_was_closed_ends_without_words() {
    let room = Room::new();
    room.write("rows.jsonl", "{\"tokens\": [1, 2]}\n");
    for line in TELLING {
        let ended = command::run_on_closed(room.root(), &line.split(' ').collect::<Vec<_>>()).well();
        assert!(!ended.stderr.contains("panicked") && !ended.stderr.contains("rror"), "{line}: {}", ended.stderr);
    }
}

#[test]
fn sampling_options_out_of_range_are_refused_in_their_own_words() {
    let room = Room::new();
    room.write("rows.jsonl", "{\"prompt\": \"1+1=\"}\n");
    for (option, value, needed) in [
        ("--temperature", "-1", "0 (greedy) or at least 0.001"),
        ("--top-p", "1.5", "from 0 to 1"),
        ("--min-p", "2", "from 0 to 1"),
        ("--repetition-penalty", "0", "above 0"),
        ("--samples", "0", "at least 1"),
        ("--max-new-tokens", "0", "at least 1"),
    ] {
        let ended = room.run(&["generate", "--model", "model", "--input", "rows.jsonl", option, value]);
        ended.refused(2, &[option, needed]);
    }
}

#[test]
fn reward_wants_a_reward_model() {
    let room = Room::new();
    room.write("rows.jsonl", "{\"tokens\": [1, 2]}\n");
    let ended = room.run(&["reward", "--model", "model", "--input", "rows.jsonl"]);
    ended.refused(65, &["holds a language model, needed is a reward model"]).hinted("score.weight");
}

#[test]
fn a_trained_critic_is_exported_as_a_reward_model_that_scores() {
    let room = Room::new();
    room.job(&[]).well();
    room.run(&["export", "run", "--out", "critic", "--role", "critic"]).well();
    room.write("rows.jsonl", "{\"tokens\": [1, 2]}\n{\"prompt\": \"1+1=\", \"response\": \"2\"}\n");
    let lines = room.run(&["reward", "--model", "critic", "--input", "rows.jsonl"]).well().stdout;
    for line in lines.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        assert!(row["reward"].as_f64().is_some_and(f64::is_finite), "{row}");
    }
    assert_eq!(lines.lines().count(), 2);
    room.run(&["export", "run", "--out", "x", "--role", "judge"]).refused(2, &["--role judge", "actor or critic"]);
}

#[test]
fn the_export_of_a_checkpoint_is_the_export_of_the_run() {
    let room = Room::new();
    room.job(&[]).well();
    room.run(&["export", "run/checkpoints/step-2", "--out", "again"]).well();
    assert!(room.read("again/model.safetensors") == room.read("run/export/model.safetensors"));
    // A folder that holds something else is not overwritten.
    room.write("mine/notes.txt", "keep");
    room.run(&["export", "run", "--out", "mine"]).refused(2, &["mine"]);
    assert_eq!(room.text("mine/notes.txt"), "keep");
}

#[test]
fn a_damaged_checkpoint_is_not_exported() {
    let room = Room::new();
    room.job(&[]).well();
    let name = "run/checkpoints/step-2/actor.weights.rank-0000.bin";
    let mut bytes = room.read(name);
    bytes[40] ^= 1;
    room.write(name, bytes);
    room.run(&["export", "run/checkpoints/step-2", "--out", "x"]).refused(65, &["step-2", "actor.weights"]);
    assert!(!room.path("x").exists());
}

#[test]
fn the_device_is_said_and_one_that_is_not_there_or_not_fit_is_refused() {
    let room = Room::new();
    room.write("rows.jsonl", "{\"tokens\": [1, 2, 3]}\n");
    for verb in ["generate", "logprobs"] {
        let run = |more: &[&str]| room.run(&[&[verb, "--model", "model", "--input", "rows.jsonl"], more].concat());
        // Heads of 8 are no GPU's: said before anybody looks for one.
        let words = "a head dim of 8 with --device gpu, needed one of 32, 64, 80, 96, 128, 256";
        let chosen = run(&[]).well();
        let line = chosen.stderr.lines().next().expect("a line").to_owned();
        assert!(
            line.starts_with(&format!("{verb}: ")) && line.ends_with(&format!(" in f32, no GPU: {words}")),
            "{line}"
        );
        run(&["--device", "gpu"]).refused(2, &[words]).hinted("--device cpu");
        run(&["--device", "gpu", "--dtype", "f32"]).refused(2, &["--dtype f32"]).hinted("--dtype bf16");
        let asked = run(&["--device", "cpu", "--dtype", "bf16"]).well();
        assert!(asked.stderr.lines().next().expect("a line").ends_with(" in bf16"), "{}", asked.stderr);
        assert_eq!(run(&["--device", "cpu", "--dtype", "f32"]).well().stdout, chosen.stdout);
        run(&["--device", "tpu"]).refused(2, &["tpu is no device"]);
        run(&["--dtype", "f16"]).refused(2, &["f16 is no dtype of weights"]);
    }
}

#[test]
fn without_a_driver_a_verb_says_so() {
    // SAFETY: the driver's initialisers ask nothing of the process that opens it.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        return;
    }
    let room = Room::new();
    room.edit("config.json", |config| config["head_dim"] = 32.into());
    room.run(&["init", "--config", "config.json", "--out", "fit"]).well();
    room.write("rows.jsonl", "{\"tokens\": [1, 2, 3]}\n");
    let run = |more: &[&str]| room.run(&[&["logprobs", "--model", "fit", "--input", "rows.jsonl"], more].concat());
    let words = "libcuda.so.1 is not on this machine";
    let chosen = run(&[]).well();
    assert!(chosen.stderr.lines().next().expect("a line").ends_with(&format!("no GPU: {words}")), "{}", chosen.stderr);
    run(&["--device", "gpu"]).refused(2, &["--device gpu: ", words]).hinted("set --device cpu");
}
