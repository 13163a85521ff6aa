use std::fs;

use rlhf_hpc::cli::shard::{Args, run};
use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::data::shard::Shard;
use rlhf_hpc::data::{Reading, RowKind, shard_rows};
use rlhf_hpc::error::{Error, Kind};
use serde_json::{Map, Value, json};

use crate::data::fixture::{Fixture, config, questions};

pub fn chat() -> DataConfig {
    DataConfig { chat_template: true, ..config("") }
}

/// A message of a chat.
pub fn says(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}

pub fn shard(fixture: &Fixture, file: &str, kind: RowKind, config: &DataConfig) -> Result<Shard, Error> {
    let prefix = fixture.path("shards/rows");
    let reading = Reading { config, kind, tokenizer: &fixture.tokenizer, vocabulary: fixture.vocabulary() };
    shard_rows(reading, &[(file.as_ref(), None)], &[], &prefix)?;
    Shard::open(&prefix, fixture.vocabulary())
}

#[test]
fn rows_become_prompts_with_labels_in_the_order_of_the_file() {
    let fixture = Fixture::new();
    let rows = questions(10_000);
    let shard = shard(&fixture, &fixture.jsonl("q.jsonl", &rows), RowKind::Prompt, &config("")).unwrap();
    assert_eq!(shard.documents(), 10_000);
    for i in [0, 1, 8191, 8192, 9999] {
        let prompt = rows[i]["prompt"].as_str().unwrap();
        assert_eq!(shard.document(i).unwrap(), [fixture.tokenizer.encode(prompt, true).unwrap()]);
        assert_eq!(shard.meta(i).unwrap().label, (2 * i).to_string());
        assert!(shard.meta(i).unwrap().source.ends_with(&format!("q.jsonl:{}", i + 1)));
    }
    assert_eq!(shard.sidecar().tokenizer_sha256, fixture.tokenizer.sha256());
}

#[test]
fn a_demonstration_ends_with_the_end_token_and_its_prompt_with_none() {
    let fixture = Fixture::new();
    let shard = shard(&fixture, &fixture.jsonl("q.jsonl", &questions(3)), RowKind::Demonstration, &config("")).unwrap();
    let document = shard.document(2).unwrap();
    let (bos, eos) = (fixture.tokenizer.bos_id().unwrap(), fixture.tokenizer.eos_ids()[0]);
    assert_eq!(document.len(), 2);
    assert_eq!(document[0][0], bos);
    assert_eq!(document[1].last(), Some(&eos));
    assert!(!document[0].contains(&eos) && !document[1].contains(&bos));
    assert_eq!(fixture.tokenizer.decode(&document[1], true).unwrap(), "it is 4");
}

#[test]
fn turns_of_a_chat_alternate_and_join_to_the_rendered_chat() {
    let fixture = Fixture::new();
    let messages = json!([
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]);
    let rows = [json!({"messages": messages, "answer": "4"})];
    let shard = shard(&fixture, &fixture.jsonl("c.jsonl", &rows), RowKind::Demonstration, &chat()).unwrap();
    let document = shard.document(0).unwrap();
    assert_eq!(document.len(), 4);
    let whole = fixture.tokenizer.chat().unwrap().apply(&messages, &Map::new(), false).unwrap();
    assert_eq!(fixture.tokenizer.decode(&document.concat(), false).unwrap(), whole);
    let texts: Vec<String> = document.iter().map(|s| fixture.tokenizer.decode(s, false).unwrap()).collect();
    assert_eq!(texts[0], "<|begin|><|system|>be brief<|user|>what is 1 + 1?<|assistant|>");
    assert_eq!(texts[1], "2<|end|>");
    assert_eq!(texts[3], "4<|end|>");
}

#[test]
fn a_chat_as_prompt_ends_where_the_assistant_begins() {
    let fixture = Fixture::new();
    let rows = [
        json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "answer": 1}),
        json!({"prompt": "hi", "answer": 1}),
        json!({"prompt": [{"role": "user", "content": "hi"}], "answer": 1}),
    ];
    let shard = shard(&fixture, &fixture.jsonl("c.jsonl", &rows), RowKind::Prompt, &chat()).unwrap();
    for i in 0..3 {
        let text = fixture.tokenizer.decode(&shard.prompt(i).unwrap(), false).unwrap();
        assert_eq!(text, "<|begin|><|user|>hi<|assistant|>");
    }
}

#[test]
fn a_message_marked_as_not_trained_is_masked() {
    let fixture = Fixture::new();
    let said = |left_out: [Value; 2]| {
        let [mut first, mut second] = ["2", "4"].map(|text| json!({"role": "assistant", "content": text}));
        first.as_object_mut().unwrap().extend(left_out[0].as_object().unwrap().clone());
        second.as_object_mut().unwrap().extend(left_out[1].as_object().unwrap().clone());
        let user = |text: &str| json!({"role": "user", "content": text});
        let rows = [json!({"messages": [user("1 + 1?"), first, user("2 + 2?"), second]})];
        let config = DataConfig { label_key: String::new(), ..chat() };
        let shard = shard(&fixture, &fixture.jsonl("c.jsonl", &rows), RowKind::Demonstration, &config)?;
        let document = shard.document(0).unwrap();
        Ok::<_, Error>(document.iter().map(|s| fixture.tokenizer.decode(s, false).unwrap()).collect::<Vec<_>>())
    };
    let (all, none) = (json!({}), json!({"train": false}));
    let first = "<|begin|><|user|>1 + 1?<|assistant|>";
    let both = format!("{first}2<|end|><|user|>2 + 2?<|assistant|>");
    assert_eq!(said([all.clone(), all.clone()]).unwrap().len(), 4);
    assert_eq!(said([none.clone(), all.clone()]).unwrap(), [&both, "4<|end|>"]);
    assert_eq!(said([json!({"weight": 1}), json!({"weight": 0})]).unwrap(), [first, "2<|end|>"]);
    let error = said([none.clone(), none]).unwrap_err();
    assert!(error.message.contains("all assistant messages have train = false"), "{error}");
}

#[test]
fn a_template_gets_the_tools_of_a_row_and_the_arguments_of_the_job() {
    let fixture = Fixture::new();
    let template = "{{ messages[0].content }}|{{ tools | tojson }}|{{ enable_thinking }}";
    fs::write(fixture.path("tokenizer/chat_template.jinja"), template).unwrap();
    let told = rlhf_hpc::text::Tokenizer::load(&fixture.path("tokenizer")).unwrap();
    let fixture = Fixture { tokenizer: told.into(), ..fixture };
    let tools = json!([{"name": "add"}]);
    let row = |tools: &Value| fixture.jsonl("t.jsonl", &[json!({"prompt": "hi", "answer": 1, "tools": tools})]);
    let args = json!({"enable_thinking": false}).as_object().unwrap().clone();
    let config = DataConfig { chat_template_args: args, ..chat() };
    for tools in [tools.clone(), Value::String(tools.to_string())] {
        let shard = shard(&fixture, &row(&tools), RowKind::Prompt, &config).unwrap();
        let text = fixture.tokenizer.decode(&shard.prompt(0).unwrap(), false).unwrap();
        assert_eq!(text, "hi|[{\"name\": \"add\"}]|False");
    }
    for (tools, found) in [(json!(3), "a number"), (json!("add"), "a string"), (json!(["add"]), "a list")] {
        let error = shard(&fixture, &row(&tools), RowKind::Prompt, &config).unwrap_err();
        assert!(
            error.message.contains(&format!("field \"tools\" must be a list of JSON schemas (got {found})")),
            "{error}"
        );
    }
}

#[test]
fn the_first_of_several_bad_rows_is_named() {
    let fixture = Fixture::new();
    let mut lines: Vec<String> = questions(200).iter().map(Value::to_string).collect();
    lines[150] = "no".to_owned();
    lines[90] = "{}".to_owned();
    let error =
        shard(&fixture, &fixture.text("bad.jsonl", &lines.join("\n")), RowKind::Prompt, &config("")).unwrap_err();
    assert!(error.message.contains("bad.jsonl:91: "), "{error}");
}

#[test]
fn a_file_without_rows_and_a_missing_file_are_rejected() {
    let fixture = Fixture::new();
    for text in ["", "\n", "  \n\n"] {
        // Blank lines are not rows, so these files have none.
        let error = shard(&fixture, &fixture.text("empty.jsonl", text), RowKind::Prompt, &config("")).unwrap_err();
        assert!(error.message.contains("empty.jsonl has no rows"), "{error}");
    }
    let error =
        shard(&fixture, fixture.path("none.jsonl").to_str().unwrap(), RowKind::Prompt, &config("")).unwrap_err();
    assert_eq!(error.kind, Kind::Io);
}

/// Arguments of the verb, which writes the shard `out/rows`.
pub fn args(fixture: &Fixture, input: &str, more: &[&str]) -> Args {
    let (tokenizer, out) = (fixture.path("tokenizer"), fixture.path("out/rows"));
    let mut all = vec![input, "--tokenizer", tokenizer.to_str().unwrap(), "--out", out.to_str().unwrap()];
    all.extend(more);
    argh::FromArgs::from_args(&["shard"], &all).unwrap()
}

#[test]
fn the_shard_verb_writes_splits_by_field_ratio_and_file() {
    let fixture = Fixture::new();
    let file = fixture.jsonl("q.jsonl", &questions(500));
    let more = fixture.jsonl("more.jsonl", &questions(20));
    let names = |more: &[&str]| -> Vec<(String, u64)> {
        run(&args(&fixture, &file, &[more, &["--force"]].concat())).unwrap();
        let shard = Shard::open(&fixture.path("out/rows"), fixture.vocabulary()).unwrap();
        shard.verify().unwrap();
        shard.sidecar().splits.iter().map(|s| (s.name.clone(), s.documents)).collect()
    };
    assert_eq!(names(&[]), []);
    assert_eq!(names(&["--split-field", "split"]), [("eval".to_owned(), 100), ("train".to_owned(), 400)]);
    assert_eq!(names(&["--split-test", &more]), [("test".to_owned(), 20), ("train".to_owned(), 500)]);
    let ratio = names(&["--split-ratio", "0.2"]);
    assert_eq!(ratio[0].0, "test");
    assert!((60..140).contains(&ratio[0].1) && ratio[0].1 + ratio[1].1 == 500, "{ratio:?}");
    let named = run(&args(&fixture, &file, &["--vocabulary", "270", "--force"])).unwrap_err();
    assert!(named.message.contains("outside the model's vocabulary of 270"), "{named}");
}
