//! Data that a job cannot use, and what becomes of every row of data that it can.

use super::room::Room;
use serde_json::{Value, json};

const ALL_ROWS: [&str; 2] = ["data.prompt_split=", "data.eval_split="];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&ALL_ROWS, more].concat()
}

#[test]
fn data_is_looked_at_before_the_weights_of_a_model() {
    let room = Room::new();
    // Whatever reads these ends there.
    room.write("model/model.safetensors", "no weights");
    room.write("bad.jsonl", "{\"prompt\": \"2+2=\", \"answer\": 4, \"response\": \"4\"}\nno row\n");
    for kind in ["ppo", "sft"] {
        let kind = format!("job.kind={kind}");
        room.refuses(65, &with(&["data.prompts=[\"bad.jsonl\"]", &kind]), &["bad.jsonl:2", "not JSON"]);
        room.refuses(65, &["data.prompts=[\"nosuch.jsonl\"]", &kind], &["there is no file", "nosuch.jsonl"]);
    }
    room.refuses(65, &["job.kind=sft"], &["has a prompt and no response"]).hinted("--response-key");
    room.refuses(65, &[], &["model.actor: ", "model.safetensors"]);
}

#[test]
fn parquet_is_refused_by_name() {
    let room = Room::new();
    room.write("rows.parquet", "PAR1");
    let words = ["rows.parquet", "Parquet is not in this release"];
    room.refuses(2, &["data.prompts=[\"rows.parquet\"]"], &words).hinted("JSONL");
    room.run(&["shard", "rows.parquet", "--tokenizer", "model", "--out", "x"]).refused(2, &words).hinted("JSONL");
    assert!(!room.path("x.idx").exists());
}

/// Exchanges the first two tokens of different values.
fn swap_tokens(room: &Room, name: &str) {
    let mut bytes = room.read(name);
    let at = (0..bytes.len() - 2).step_by(2).find(|at| bytes[*at..at + 2] != bytes[at + 2..at + 4]).unwrap();
    bytes[at..at + 4].rotate_left(2);
    room.write(name, bytes);
}

#[test]
fn tokens_that_were_swapped_in_a_shard_are_found_by_a_start_a_dry_run_and_a_resume() {
    let room = Room::new();
    let written = room.read("questions.bin");
    swap_tokens(&room, "questions.bin");
    let words = ["questions.bin: ", " bytes with hash ", "the sidecar says "];
    room.run(&["run", "job.toml", "--dry-run"]).refused(65, &words).hinted("write the shard again");
    assert!(!room.path("run/inputs.json").exists(), "a dry run keeps no hashes");
    room.refuses(65, &[], &words);
    room.write("questions.bin", written);
    room.job(&["job.steps=1"]).well();
    assert!(room.path("run/inputs.json").exists());
    swap_tokens(&room, "questions.bin");
    room.job(&["checkpoint.changed_inputs=accept"]).refused(65, &words);
    // A shard of another program has no hashes until it was opened once.
    std::fs::remove_file(room.path("questions.json")).unwrap();
    let all = ["data.prompt_split=", "data.eval_split=", "eval.every_steps=0", "reward.rule=length"];
    room.job(&[&all[..], &["job.dir=other"]].concat()).well();
    swap_tokens(&room, "questions.bin");
    room.job(&[&all[..], &["job.dir=another"]].concat()).refused(65, &words).hinted("questions.json");
}

#[test]
fn a_damaged_shard_in_the_run_directory_is_found_by_the_next_start() {
    let room = Room::new();
    let rows = ["data.prompts=[\"rows.jsonl\"]", "data.prompt_split=", "data.eval_split=", "eval.every_steps=0"];
    room.job(&[&rows[..], &["job.steps=1"]].concat()).well();
    let made = std::fs::read_dir(room.path("run/data")).unwrap().map(|entry| entry.unwrap().file_name());
    let made = made.map(|name| name.into_string().unwrap()).find(|name| name.contains(".bin")).unwrap();
    swap_tokens(&room, &format!("run/data/{made}"));
    room.job(&rows).refused(65, &[&made, "the sidecar says "]).hinted("remove ");
    std::fs::remove_file(room.path(&format!("run/data/{made}"))).unwrap();
    room.job(&rows).well();
}

#[test]
fn shards_are_verified_without_tokenizer_and_the_first_wrong_file_is_named() {
    let room = Room::new();
    let both = ["shard", "--verify", "questions", "demonstrations.idx"];
    let shown = room.run(&both).well().stdout;
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines.len() == 2 && lines[1].starts_with("demonstrations: 128 documents, "), "{shown}");
    assert!(lines.iter().all(|line| line.ends_with("every file has its hash")), "{shown}");
    for file in ["demonstrations.bin", "demonstrations.idx", "demonstrations.meta.idx", "demonstrations.meta.jsonl"] {
        let mut bytes = room.read(file);
        let written = bytes.clone();
        *bytes.last_mut().unwrap() ^= 1;
        room.write(file, bytes);
        let ended = room.run(&both).refused(65, &[file]);
        assert_eq!(ended.stdout.lines().count(), 1, "the first one is whole: {}", ended.stdout);
        room.write(file, written);
    }
    room.run(&["shard", "--verify"]).refused(2, &["needs the prefixes"]);
    room.run(&["shard", "--verify", "questions", "--out", "x"]).refused(2, &["no --out"]);
    room.run(&["shard", "--verify", "nosuch"]).refused(65, &["there is no nosuch.idx"]);
    std::fs::remove_file(room.path("questions.json")).unwrap();
    let scanned = room.run(&["shard", "--verify", "questions"]).well().stdout;
    assert!(scanned.contains("had no sidecar"), "{scanned}");
}

#[test]
fn a_run_directory_that_cannot_be_made_is_named() {
    let room = Room::new();
    room.write("file", "");
    room.refuses(74, &["job.dir=file/run"], &["file/run", "Not a directory"]).hinted("job.dir");
    room.refuses(74, &["job.dir=/proc/nosuch"], &["cannot create /proc/nosuch"]).hinted("job.dir");
}

#[test]
fn a_run_directory_with_a_checkpoint_of_another_shape_is_refused() {
    let room = Room::new();
    room.job(&["job.steps=1"]).well();
    let before = room.text("run/metrics.jsonl");
    let ended = room.job(&["job.kind=sft", "data.prompts=[\"demonstrations\"]"]);
    ended.refused(2, &["cannot go on with", "job.kind = \"sft\" (was \"ppo\")"]).hinted("another job.dir");
    // The directory is the same, what is in it is not.
    let remake = |change: fn(&mut Value)| {
        room.edit("config.json", change);
        std::fs::remove_dir_all(room.path("model")).expect("it is there");
        room.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "model"]).well();
    };
    remake(|config| config["num_hidden_layers"] = json!(3));
    room.job(&[]).refused(65, &["run/checkpoints/step-1", "model.actor is", "3 layers"]).hinted("another job.dir");
    remake(|config| {
        config["num_hidden_layers"] = json!(2);
        config["rope_theta"] = json!(5000.0);
    });
    room.job(&[]).refused(65, &["run/checkpoints/step-1", "rope"]).hinted("another job.dir");
    assert_eq!(room.text("run/metrics.jsonl"), before, "what the run recorded stays");
}

#[test]
fn data_that_changed_since_the_checkpoint_is_refused() {
    let room = Room::new();
    room.job(&["job.steps=1"]).well();
    let rows: Vec<Value> = room.text("rows.jsonl").lines().skip(1).map(|l| serde_json::from_str(l).unwrap()).collect();
    room.jsonl("rows.jsonl", &rows);
    let shard = ["shard", "rows.jsonl", "--tokenizer", "model", "--out", "questions", "--label-key", "answer"];
    room.run(&[&shard[..], &["--split-field", "split"]].concat()).well();
    room.job(&["job.steps=2"]).refused(2, &["other contents of data.prompts[0] (.bin, "]).hinted("job.dir");
    let accepted = room.job(&["job.steps=2", "checkpoint.changed_inputs=accept"]);
    accepted.refused(65, &["the rows changed in number", "knew 128, there are 127"]).hinted("job.dir");
}
