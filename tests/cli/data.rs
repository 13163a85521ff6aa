//! Data that a job cannot use, and the use of every row of valid data.

use super::fixture::Fixture;
use serde_json::{Value, json};

#[test]
fn data_is_checked_before_model_weights_are_read() {
    let fixture = Fixture::new();
    // Any reader of these fails.
    fixture.write("model/model.safetensors", "no weights");
    fixture.write("bad.jsonl", "{\"prompt\": \"2+2=\", \"answer\": 4, \"response\": \"4\"}\nno row\n");
    for kind in ["ppo", "sft"] {
        let kind = format!("job.kind={kind}");
        let bad = ["data.prompts=[\"bad.jsonl\"]", "data.prompt_split=", "data.eval_split=", &kind];
        fixture.refuses(65, &bad, &["bad.jsonl:2", "not JSON"]);
        fixture.refuses(65, &["data.prompts=[\"nosuch.jsonl\"]", &kind], &["nosuch.jsonl does not exist"]);
    }
    fixture.refuses(65, &["job.kind=sft"], &["has a prompt but no response"]).hinted("--response-key");
    fixture.refuses(65, &[], &["model.actor: ", "model.safetensors"]);
}

/// Rows that jobs with labels cannot learn from, after a good one, and the messages.
const LABELS: &[(&str, &str, &str)] = &[
    ("kto", r#"{"prompt": "3=", "response": "4", "label": true}"#, "every row is labeled true"),
    ("step_reward", r#"{"prompt": "3= 3", "label": ["+"]}"#, "bad.jsonl:2: the text has no placeholder \";\""),
    ("step_reward", r#"{"prompt": "3= 3;", "label": ["+", "-"]}"#, "needs one label (labels: 2, placeholders: 1)"),
    ("step_reward", r#"{"prompt": "3; 3;", "label": ["-"]}"#, "needs one label (labels: 1, placeholders: 2)"),
    ("step_reward", r#"{"prompt": "3= 3;", "label": ["*"]}"#, "bad.jsonl:2: label \"*\" is not a reward token"),
];

#[test]
fn a_row_with_unusable_labels_is_named_before_model_weights_are_read() {
    let fixture = Fixture::new();
    fixture.write("model/model.safetensors", "no weights");
    let keys = ["data.prompts=[\"bad.jsonl\"]", "data.prompt_split=", "data.eval_split=", "data.label_key=label"];
    let keys = [&keys[..], &["step_reward.placeholder=;"]].concat();
    for (kind, row, words) in LABELS {
        let good = if *kind == "kto" {
            r#"{"prompt": "2=", "response": "2", "label": true}"#
        } else {
            r#"{"prompt": "2= 2; 3;", "label": ["+", 0.25]}"#
        };
        fixture.write("bad.jsonl", format!("{good}\n{row}\n"));
        fixture.refuses(65, &[&keys[..], &[&format!("job.kind={kind}")]].concat(), &[words]);
    }
    let steps = [&keys[..], &["job.kind=step_reward"]].concat();
    let three = [&steps[..], &["step_reward.reward_tokens=[\"+\", \"-\", \"?\"]"]].concat();
    fixture
        .refuses(65, &three, &["bad.jsonl:1: a number as a label (0.25) needs exactly two reward tokens (got 3)"])
        .hinted("set two step_reward.reward_tokens");
    let long = [&steps[..], &["step_reward.placeholder=<step>"]].concat();
    fixture.refuses(2, &long, &["step_reward.placeholder: \"<step>\" must be one token (got "]).hinted("one token");
    let seen = [&steps[..], &["--dry-run"]].concat();
    fixture.write("bad.jsonl", "{\"prompt\": \"2= 2;\", \"label\": [1]}");
    fixture.refuses(65, &seen, &["model.safetensors"]);
}

#[test]
fn a_python_reward_gets_every_field_of_jsonl_rows_and_the_fields_kept_in_a_shard() {
    let fixture = Fixture::new();
    fixture.write(
        "reward.py",
        "def f(prompts, completions, weight, **columns):\n    print(sorted(set(columns) - {'finish'}), prompts[0])\n    \
         return [float(w) for w in weight]",
    );
    let row = |i: usize| json!({"prompt": format!("{i}+1="), "answer": i + 1, "weight": 0.5, "level": "easy"});
    fixture.write("rows.jsonl", (0..8).map(|i| row(i).to_string() + "\n").collect::<String>());
    let shard = ["shard", "rows.jsonl", "--tokenizer", "model", "--out", "kept", "--label-key", "answer"];
    fixture.run(&[&shard[..], &["--keep-field", "weight"]].concat()).well();
    let job = |prompts: &str, dir: &str| {
        let prompts = format!("data.prompts=[\"{prompts}\"]");
        let dir = format!("job.dir={dir}");
        let all = ["data.prompt_split=", "data.eval_split=", "eval.every_steps=0"];
        fixture.job(&[&all[..], &["reward.rule=[]", "reward.python=reward.py", &prompts, &dir]].concat())
    };
    for (prompts, dir, seen) in [("rows.jsonl", "a", "'level'"), ("kept", "b", "")] {
        job(prompts, dir).well();
        let line = String::from_utf8(fixture.read(&format!("{dir}/metrics.jsonl"))).unwrap();
        assert!(line.lines().all(|line| line.contains("\"score_mean\":0.5")), "{line}");
        let log = String::from_utf8(fixture.read(&format!("{dir}/logs/reward-rank-0.log"))).unwrap();
        assert!(log.contains("+1=") && log.contains(seen) && log.contains("'level'") == (dir == "a"), "{log}");
    }
    fixture.run(&[&shard[..5], &["without", "--label-key", "answer"]].concat()).well();
    job("without", "c").refused(2, &["no value for its argument 'weight'", "--keep-field weight"]);
}

#[test]
fn rows_are_shown_as_the_model_reads_them_with_learned_tokens_marked() {
    let fixture = Fixture::new();
    let shard =
        "shard rows.jsonl --tokenizer tokenizer --response-key demonstration --label-key answer --out shown --show 2";
    let shown = fixture.run(&shard.split(' ').collect::<Vec<_>>()).well().stdout;
    assert!(shown.contains("rows.jsonl:1: ") && shown.contains(" tokens, label 10\n"), "{shown}");
    assert!(shown.contains("6+4=⟦6+4=10 20<|end|>⟧\n") && shown.matches('⟦').count() == 2, "{shown}");
    let sft = ["job.kind=sft", "data.prompts=[\"demonstrations\"]"];
    let dry = |more: &[&str]| fixture.run(&[&["run", "job.toml", "--dry-run"], more].concat()).well().stderr;
    let (sft, ppo) = (dry(&sft), dry(&[]));
    let row = |text: &str| text.lines().find(|line| line.starts_with("the first row")).unwrap_or_default().to_string();
    assert!(row(&sft).contains("=⟦") && row(&sft).ends_with("⟧"), "{sft}");
    assert!(row(&ppo).contains("=  label ") && row(&ppo).matches('⟦').count() == 1, "{ppo}");
}

#[test]
fn prompt_fields_that_do_not_become_part_of_the_prompt_are_named() {
    let fixture = Fixture::new();
    fixture.write("model/chat_template.jinja", "{{ mood }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}");
    let tool = json!([{"type": "function", "function": {"name": "add"}}]);
    let unread = |name: &str| format!("the rows have a field {name:?}, which does not become a part of their prompts");
    for (name, value, shown) in [
        ("system", json!("be brief"), [unread("system"), unread("system")]),
        ("videos", json!(["a.mp4"]), [unread("videos"), unread("videos")]),
        ("tools", tool, [unread("tools"), "the chat template does not print tools".to_owned()]),
        ("chat_template_kwargs", json!({"mood": "glad"}), [unread("chat_template_kwargs"), String::new()]),
        ("context", json!(""), [String::new(), String::new()]),
        ("note", json!("by hand"), [String::new(), String::new()]),
    ] {
        fixture.jsonl("more.jsonl", &[json!({"prompt": "1+1=", name: value}), json!({"prompt": "2+1=", name: value})]);
        for (template, words) in [&[][..], &["--chat-template"]].into_iter().zip(shown) {
            let line = ["shard", "more.jsonl", "--tokenizer", "model", "--out", "x", "--force", "--show", "1"];
            let ended = fixture.run(&[&line[..], template].concat()).well();
            let warnings = ended.stderr.lines().filter(|line| line.starts_with("warning: ")).count();
            assert_eq!(warnings, usize::from(!words.is_empty()), "{name}: {}", ended.stderr);
            assert!(ended.stderr.contains(&words), "{name}: {}", ended.stderr);
            let is_glad = name == "chat_template_kwargs" && !template.is_empty();
            assert_eq!(ended.stdout.contains("glad"), is_glad, "{}", ended.stdout);
        }
    }
    fixture.jsonl("more.jsonl", &[json!({"prompt": "1+1="}), json!({"prompt": "2+1=", "images": ["a.png"]})]);
    let line = ["shard", "more.jsonl", "--tokenizer", "model", "--out", "x", "--force"];
    fixture.run(&line).refused(65, &["more.jsonl:2: ", "the model reads text only"]);
}

#[test]
fn files_and_subfolders_whose_rows_are_not_read_are_named() {
    let fixture = Fixture::new();
    let row = "{\"prompt\": \"1+1=\"}\n";
    for name in ["rows/train.jsonl", "rows/extra/train.jsonl", "hub/a.jsonl"] {
        fixture.write(name, row);
    }
    for name in ["rows/more.csv", "tables/a.csv", "rows/LICENSE.txt"] {
        fixture.write(name, "prompt\n1+1=\n");
    }
    let card =
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path: a.jsonl\n---\n# Rows\n";
    fixture.write("hub/README.md", card);
    let shard = |folder: &str| fixture.run(&["shard", folder, "--tokenizer", "model", "--out", "x", "--force"]);
    shard("rows").assert(0, &["warning: rows: not read: rows/more.csv, rows/extra\n"]);
    shard("hub").assert(0, &["hub/README.md assigns files to splits (data_files)", "hub/a.jsonl has no such name"]);
    shard("tables").refused(65, &["tables/a.csv", "CSV"]).hinted("pandas.read_csv");
}

#[test]
fn texts_are_read_from_the_field_text_unless_another_is_named() {
    let fixture = Fixture::new();
    fixture.jsonl("texts.jsonl", &[json!({"text": "1+1=", "prompt": "3+4="})]);
    let line = ["shard", "texts.jsonl", "--tokenizer", "model", "--out", "x", "--force", "--text", "--show", "1"];
    for (more, text) in [(&[][..], "1+1="), (&["--prompt-key", "prompt"], "3+4=")] {
        let shown = fixture.run(&[&line[..], more].concat()).well().stdout;
        assert!(shown.contains(text), "{shown}");
    }
}

#[test]
fn an_incomplete_parquet_file_is_rejected_and_the_error_names_it() {
    let fixture = Fixture::new();
    fixture.write("rows.parquet", "PAR1");
    let words = ["rows.parquet", "not a complete Parquet file (4 bytes)"];
    fixture.refuses(65, &["data.prompts=[\"rows.parquet\"]"], &words).hinted("truncated");
    fixture.run(&["shard", "rows.parquet", "--tokenizer", "model", "--out", "x"]).refused(65, &words);
    assert!(!fixture.path("x.idx").exists());
}

/// Exchanges the first two tokens of different values.
fn swap_tokens(fixture: &Fixture, name: &str) {
    let mut bytes = fixture.read(name);
    let at = (0..bytes.len() - 2).step_by(2).find(|at| bytes[*at..at + 2] != bytes[at + 2..at + 4]).unwrap();
    bytes[at..at + 4].rotate_left(2);
    fixture.write(name, bytes);
}

#[test]
fn swapped_tokens_in_a_shard_are_detected_by_a_start_a_dry_run_and_a_resume() {
    let fixture = Fixture::new();
    let written = fixture.read("questions.bin");
    swap_tokens(&fixture, "questions.bin");
    let words = ["questions.bin: ", " bytes with hash ", "the sidecar lists "];
    fixture.run(&["run", "job.toml", "--dry-run"]).refused(65, &words).hinted("write the shard again");
    assert!(!fixture.path("run/inputs.json").exists(), "a dry run keeps no hashes");
    fixture.refuses(65, &[], &words);
    fixture.write("questions.bin", written);
    fixture.job(&["job.steps=1"]).well();
    assert!(fixture.path("run/inputs.json").exists());
    swap_tokens(&fixture, "questions.bin");
    fixture.job(&["checkpoint.changed_inputs=accept"]).refused(65, &words);
    // A shard of another program has no hashes until it is opened for the first time.
    std::fs::remove_file(fixture.path("questions.json")).unwrap();
    let all = ["data.prompt_split=", "data.eval_split=", "eval.every_steps=0", "reward.rule=length"];
    fixture.job(&[&all[..], &["job.dir=other"]].concat()).well();
    swap_tokens(&fixture, "questions.bin");
    fixture.job(&[&all[..], &["job.dir=another"]].concat()).refused(65, &words).hinted("questions.json");
}

#[test]
fn a_damaged_shard_in_the_run_directory_is_detected_at_the_next_start() {
    let fixture = Fixture::new();
    let rows = ["data.prompts=[\"rows.jsonl\"]", "data.prompt_split=", "data.eval_split=", "eval.every_steps=0"];
    fixture.job(&[&rows[..], &["job.steps=1"]].concat()).well();
    let made = std::fs::read_dir(fixture.path("run/data")).unwrap().map(|entry| entry.unwrap().file_name());
    let made = made.map(|name| name.into_string().unwrap()).find(|name| name.contains(".bin")).unwrap();
    swap_tokens(&fixture, &format!("run/data/{made}"));
    fixture.job(&rows).refused(65, &[&made, "the sidecar lists "]).hinted("remove ");
    std::fs::remove_file(fixture.path(&format!("run/data/{made}"))).unwrap();
    fixture.job(&rows).well();
}

#[test]
fn shards_are_verified_without_tokenizer_and_the_first_wrong_file_is_named() {
    let fixture = Fixture::new();
    let both = ["shard", "--verify", "questions", "demonstrations.idx"];
    let shown = fixture.run(&both).well().stdout;
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines.len() == 2 && lines[1].starts_with("demonstrations: 128 documents, "), "{shown}");
    assert!(lines.iter().all(|line| line.ends_with("all hashes match")), "{shown}");
    for file in ["demonstrations.bin", "demonstrations.idx", "demonstrations.meta.idx", "demonstrations.meta.jsonl"] {
        let mut bytes = fixture.read(file);
        let written = bytes.clone();
        *bytes.last_mut().unwrap() ^= 1;
        fixture.write(file, bytes);
        let ended = fixture.run(&both).refused(65, &[file]);
        assert_eq!(ended.stdout.lines().count(), 1, "the first one is whole: {}", ended.stdout);
        fixture.write(file, written);
    }
    fixture.run(&["shard", "--verify"]).refused(2, &["needs prefixes"]);
    fixture.run(&["shard", "--verify", "questions", "--out", "x"]).refused(2, &["does not accept --out"]);
    fixture.run(&["shard", "--verify", "nosuch"]).refused(65, &["nosuch.idx does not exist"]);
    std::fs::remove_file(fixture.path("questions.json")).unwrap();
    let scanned = fixture.run(&["shard", "--verify", "questions"]).well().stdout;
    assert!(scanned.contains("no sidecar"), "{scanned}");
}

#[test]
fn a_run_directory_that_cannot_be_created_is_named() {
    let fixture = Fixture::new();
    fixture.write("file", "");
    fixture.refuses(74, &["job.dir=file/run"], &["file/run", "Not a directory"]).hinted("job.dir");
    fixture.refuses(74, &["job.dir=/proc/nosuch"], &["cannot create /proc/nosuch"]).hinted("job.dir");
}

#[test]
fn a_run_directory_with_a_checkpoint_of_another_shape_is_rejected() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1"]).well();
    let before = fixture.text("run/metrics.jsonl");
    let ended = fixture.job(&["job.kind=sft", "data.prompts=[\"demonstrations\"]"]);
    ended.refused(2, &["cannot resume with", "job.kind = \"sft\" (was \"ppo\")"]).hinted("another job.dir");
    // The directory is the same, its contents are not.
    let remake = |change: fn(&mut Value)| {
        fixture.edit("config.json", change);
        std::fs::remove_dir_all(fixture.path("model")).expect("it is there");
        fixture.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "model"]).well();
    };
    remake(|config| config["num_hidden_layers"] = json!(3));
    fixture.job(&[]).refused(65, &["run/checkpoints/step-1", "model.actor is", "3 layers"]).hinted("another job.dir");
    remake(|config| {
        config["num_hidden_layers"] = json!(2);
        config["rope_theta"] = json!(5000.0);
    });
    fixture.job(&[]).refused(65, &["run/checkpoints/step-1", "rope"]).hinted("another job.dir");
    assert_eq!(fixture.text("run/metrics.jsonl"), before, "what the run recorded stays");
}

#[test]
fn data_that_changed_since_the_checkpoint_is_rejected() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=1"]).well();
    let rows: Vec<Value> =
        fixture.text("rows.jsonl").lines().skip(1).map(|l| serde_json::from_str(l).unwrap()).collect();
    fixture.jsonl("rows.jsonl", &rows);
    let shard = ["shard", "rows.jsonl", "--tokenizer", "model", "--out", "questions", "--label-key", "answer"];
    fixture.run(&[&shard[..], &["--split-field", "split", "--force"]].concat()).well();
    fixture.job(&["job.steps=2"]).refused(2, &["its checkpoint: data.prompts[0] (.bin, "]).hinted("job.dir");
    let accepted = fixture.job(&["job.steps=2", "checkpoint.changed_inputs=accept"]);
    accepted.refused(65, &["rows have changed in number", "had 128 rows; now there are 127"]).hinted("job.dir");
}
