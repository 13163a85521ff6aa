//! Data that a job cannot use, and what becomes of every row of data that it can.

use super::room::Room;
use serde_json::{Value, json};
use std::collections::HashSet;

const ALL_ROWS: [&str; 2] = ["data.prompt_split=", "data.eval_split="];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&ALL_ROWS, more].concat()
}

/// `n` prompts of `3 + 4 x turns` tokens or more.
fn long_rows(n: usize, turns: usize) -> Vec<Value> {
    (0..n).map(|i| json!({"prompt": format!("{}{i}", "1+2=".repeat(turns)), "response": "3", "answer": "3"})).collect()
}

#[test]
fn data_that_does_not_exist_is_named() {
    let room = Room::new();
    room.refuses(65, &["data.prompts=[\"nosuch\"]"], &["nosuch.idx"]).hinted("PREFIX.bin and PREFIX.idx");
    room.refuses(65, &["data.prompts=[\"nosuch.jsonl\"]"], &["there is no file", "nosuch.jsonl"]);
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

#[test]
fn a_split_that_does_not_exist_comes_with_those_that_do() {
    let room = Room::new();
    let words = ["data.prompt_split = \"dev\"", "eval, train"];
    room.refuses(65, &["data.prompt_split=dev"], &words).hinted("data.split.by");
    room.refuses(65, &["data.eval_split=dev"], &["data.eval_split = \"dev\"", "eval, train"]);
    room.refuses(2, &["data.eval_split=train"], &["are both \"train\"", "trains or evaluates"]);
}

#[test]
fn a_shard_that_was_cut_short_is_refused() {
    for (file, words) in
        [("bin", "questions.bin"), ("idx", "bytes"), ("meta.jsonl", "the sidecar says"), ("meta.idx", "meta")]
    {
        let room = Room::new();
        room.shorten(&format!("questions.{file}"), 100);
        room.refuses(65, &[], &["questions", words]).hinted("write the shard again");
    }
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
    assert!(lines.len() == 2 && lines[1].starts_with("demonstrations: 220 documents, "), "{shown}");
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
fn a_shard_of_which_a_file_is_missing_is_refused() {
    let room = Room::new();
    std::fs::remove_file(room.path("questions.bin")).unwrap();
    room.refuses(65, &[], &["questions.bin"]);
}

#[test]
fn a_shard_made_with_another_tokenizer_is_refused() {
    let room = Room::new();
    room.run(&["tokenizer", "rows.jsonl", "--vocabulary", "262", "--out", "other"]).well();
    room.run(&["shard", "rows.jsonl", "--tokenizer", "other", "--out", "foreign"]).well();
    let words = ["foreign was made with tokenizer", "the model has"];
    room.refuses(65, &with(&["data.prompts=[\"foreign\"]"]), &words).hinted("the model's own tokenizer");
}

#[test]
fn a_row_that_is_no_prompt_is_named_by_file_and_line() {
    let room = Room::new();
    for (line, words) in [
        ("{\"prompt\": \"\", \"answer\": 1}", "field \"prompt\" is empty"),
        ("{\"question\": \"1+1=\", \"answer\": 2}", "there is no field \"prompt\""),
        ("{\"prompt\": \"1+1=\"}", "there is no field \"answer\""),
        ("{\"prompt\": 7, \"answer\": 2}", "\"prompt\""),
        ("{\"prompt\": \"1+1=\"", "not JSON"),
        ("[1, 2]", "JSON object"),
        ("", "the line is empty"),
    ] {
        room.write(
            "bad.jsonl",
            format!("{{\"prompt\": \"2+2=\", \"answer\": 4}}\n{line}\n{{\"prompt\": \"3+2=\", \"answer\": 5}}\n"),
        );
        room.refuses(65, &with(&["data.prompts=[\"bad.jsonl\"]"]), &["bad.jsonl:2", words]);
        let shard = room.run(&["shard", "bad.jsonl", "--tokenizer", "model", "--label-key", "answer", "--out", "bad"]);
        shard.refused(65, &["bad.jsonl:2", words]);
        assert!(!room.path("bad.idx").exists(), "nothing is left of a shard that failed");
    }
    room.write("bad.jsonl", "");
    room.refuses(65, &with(&["data.prompts=[\"bad.jsonl\"]"]), &["bad.jsonl has no rows"]);
}

#[test]
fn a_row_without_a_demonstration_is_no_row_for_sft() {
    let room = Room::new();
    room.refuses(65, &["job.kind=sft"], &["has a prompt and no response"]).hinted("--response-key");
}

#[test]
fn long_prompts_are_filtered_or_cut_as_asked_and_counted() {
    let room = Room::new();
    room.jsonl("long.jsonl", &[long_rows(3, 6), long_rows(5, 1)].concat());
    let job = |long: &str| {
        let _ = std::fs::remove_dir_all(room.path("run"));
        let long = format!("data.long_prompts={long}");
        room.job(&with(&["data.prompts=[\"long.jsonl\"]", "data.prompt_tokens_max=8", &long])).well();
        room.ledger()
    };
    let reject = job("reject");
    assert_eq!((&reject["rows"], &reject["filtered"]["prompt_tokens_max"]), (&json!(8), &json!(3)), "{reject}");
    for way in ["truncate_left", "truncate_right"] {
        let cut = job(way);
        assert_eq!((&cut["truncated"]["rows"], &cut["trained"]), (&json!(3), &json!(5)), "{cut}");
        assert!(cut["truncated"]["tokens"].as_u64() > Some(30), "{cut}");
    }
    let short = ["data.prompts=[\"long.jsonl\"]", "data.prompt_tokens_max=2", "job.dir=none"];
    let words = ["no row is left to train on", "prompt_tokens_max 8"];
    room.job(&with(&short)).refused(65, &words).hinted("long_prompts");
}

#[test]
fn prompts_that_fill_the_context_are_refused_before_work() {
    let room = Room::new();
    room.jsonl("long.jsonl", &[long_rows(2, 20), long_rows(6, 1)].concat());
    let prompts = ["data.prompts=[\"long.jsonl\"]", "data.prompt_tokens_max=200"];
    let words = ["2 rows do not fit the model's context of 64 tokens", "long.jsonl:"];
    room.refuses(65, &with(&prompts), &words).hinted("data.prompt_tokens_max to at most 63");
    room.refuses(65, &with(&[&prompts[..], &["--dry-run"]].concat()), &words);
}

#[test]
fn demonstrations_longer_than_the_context_are_refused_before_work() {
    let room = Room::new();
    let rows: Vec<Value> = (0..4).map(|i| json!({"prompt": "1+", "response": "2+".repeat(20 * i + 1)})).collect();
    room.jsonl("long.jsonl", &rows);
    let job = ["job.kind=sft", "data.prompts=[\"long.jsonl\"]", "data.label_key=", "eval.every_steps=0"];
    let words = ["rows do not fit the model's context of 64 tokens", "long.jsonl:4"];
    room.refuses(65, &with(&job), &words).hinted("data.row_tokens_max = 64");
    room.job(&with(&[&job[..], &["data.row_tokens_max=64"]].concat())).well();
}

#[test]
fn rows_of_the_eval_split_never_train() {
    let room = Room::new();
    let rows: Vec<Value> = room.text("rows.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |split: &str| -> HashSet<&str> {
        rows.iter().filter(|row| row["split"] == split).map(|row| row["prompt"].as_str().unwrap()).collect()
    };
    assert!(of("eval").is_disjoint(&of("train")), "the corpus keeps them apart");
    // A prompt of the eval split, under another split: it must be seen, and held out too.
    let held_out = rows.iter().find(|row| row["split"] == "eval").unwrap();
    let mut again = held_out.clone();
    again["split"] = json!("train");
    room.write("rows.jsonl", room.text("rows.jsonl") + &format!("{again}\n"));
    let shard = "shard rows.jsonl --tokenizer model --out questions --label-key answer --split-field split";
    room.run(&shard.split(' ').collect::<Vec<_>>()).well();
    // Whole epochs, so that whatever can be trained on is.
    room.job(&["job.steps=3", "rollout.prompts_per_step=100", "ppo.minibatch_samples=100"]).well();
    let ledger = room.ledger();
    assert_eq!((&ledger["trained"], &ledger["deferred"]), (&json!(200), &json!(0)), "{ledger}");
    assert_eq!(
        (&ledger["filtered"]["eval_split"], &ledger["filtered"]["same_prompt_in_eval_split"]),
        (&json!(20), &json!(1))
    );
}

#[test]
fn every_row_of_the_data_is_in_the_ledger() {
    let room = Room::new();
    room.job(&[]).well();
    let ledger = room.ledger();
    let count = |value: &Value| value.as_u64().unwrap();
    let filtered: u64 = ledger["filtered"].as_object().unwrap().values().map(count).sum();
    let ends = [&ledger["trained"], &ledger["truncated"]["rows"], &ledger["deferred"]].map(count);
    assert_eq!(count(&ledger["rows"]), 220);
    assert_eq!(ends.iter().sum::<u64>() + filtered, 220, "{ledger}");
    assert_eq!(ends[0], 8);
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
    remake(|config| config["num_hidden_layers"] = json!(2));
    room.job(&[]).refused(65, &["run/checkpoints/step-1", "model.actor is", "2 layers"]).hinted("another job.dir");
    remake(|config| {
        config["num_hidden_layers"] = json!(1);
        config["rope_theta"] = json!(5000.0);
    });
    room.job(&[]).refused(65, &["run/checkpoints/step-1", "rope"]).hinted("another job.dir");
    assert_eq!(room.text("run/metrics.jsonl"), before, "what the run recorded stays");
}

#[test]
fn data_that_changed_since_the_checkpoint_is_refused() {
    let room = Room::new();
    room.job(&["job.steps=1"]).well();
    let ended = room.job(&["data.prompt_split=", "data.eval_split="]);
    ended.refused(2, &["cannot go on with data.prompt_split = \"\" (was \"train\")"]).hinted("job.dir");
    let rows: Vec<Value> = room.text("rows.jsonl").lines().skip(1).map(|l| serde_json::from_str(l).unwrap()).collect();
    room.jsonl("rows.jsonl", &rows);
    let shard = ["shard", "rows.jsonl", "--tokenizer", "model", "--out", "questions", "--label-key", "answer"];
    room.run(&[&shard[..], &["--split-field", "split"]].concat()).well();
    room.job(&["job.steps=2"]).refused(2, &["other contents of data.prompts[0] (.bin, "]).hinted("job.dir");
    let accepted = room.job(&["job.steps=2", "checkpoint.changed_inputs=accept"]);
    accepted.refused(65, &["the rows changed in number", "knew 220, there are 219"]).hinted("job.dir");
}
