use rlhf_hpc::config::data::{DataConfig, LongPrompts};
use rlhf_hpc::data::{LabelledRow, RowKind, StepLabel, StepRow};
use serde_json::{Value, json};

use crate::data::fixture::{Fixture, config, questions};
use crate::data::rows::{chat, says, shard};

fn labelled(is_chat: bool) -> DataConfig {
    DataConfig { label_key: "label".to_owned(), ..if is_chat { chat() } else { config("") } }
}

#[test]
fn labelled_texts_messages_and_ids_become_prompt_and_response() {
    let fixture = Fixture::new();
    let (user, answer) = (says("user", "hi"), says("assistant", "ho"));
    let texts = |row: &Value, is_chat: bool| {
        let file = fixture.jsonl("l.jsonl", std::slice::from_ref(row));
        let shard = shard(&fixture, &file, RowKind::Labelled, &labelled(is_chat)).unwrap();
        assert_eq!(shard.meta(0).unwrap().label, "true", "{row}");
        let document = shard.document(0).unwrap();
        document.iter().map(|s| fixture.tokenizer.decode(s, false).unwrap()).collect::<Vec<_>>()
    };
    for row in [
        json!({"prompt": "hi", "response": "ho", "label": true}),
        json!({"prompt": [user], "response": "ho", "label": 1}),
        json!({"prompt": "hi", "response": [answer], "label": "true"}),
        json!({"messages": [user], "response": [answer], "label": 1.0}),
        json!({"messages": [user, answer], "label": true}),
        json!({"response": [user, answer], "label": true}),
    ] {
        assert_eq!(texts(&row, true), ["<|begin|><|user|>hi<|assistant|>", "ho<|end|>"], "{row}");
    }
    let row = json!({"prompt": "hi", "response": "ho", "label": true});
    assert_eq!(texts(&row, false), ["<|begin|>hi", "ho<|end|>"]);
    let ids = fixture.jsonl("ids.jsonl", &[json!({"prompt": [5, 6], "response": [7], "label": false})]);
    let mut source = fixture.rows::<LabelledRow>(&DataConfig { prompts: vec![ids], ..labelled(false) }, 0).unwrap();
    let row = source.next(1).unwrap().remove(0);
    assert_eq!((row.tokens, row.prompt_tokens, row.is_desirable), (vec![5, 6, 7], 2, false));
}

#[test]
fn responses_without_their_label_key_are_rejected() {
    let fixture = Fixture::new();
    let file = fixture.jsonl("good.jsonl", &[json!({"prompt": "x", "response": "y", "label": true})]);
    let unnamed = DataConfig { label_key: String::new(), ..labelled(false) };
    let error = shard(&fixture, &file, RowKind::Labelled, &unnamed).unwrap_err();
    assert!(error.hint.is_some_and(|hint| hint.contains("data.label_key")));
}

#[test]
fn shards_of_other_rows_are_rejected_where_labels_are_needed() {
    let fixture = Fixture::new();
    let of = |kind: RowKind| {
        shard(&fixture, &fixture.jsonl("q.jsonl", &questions(3)), kind, &config("")).unwrap();
        config(fixture.path("shards/rows").to_str().unwrap())
    };
    let prompts = of(RowKind::Prompt);
    let error = fixture.rows::<LabelledRow>(&prompts, 0).unwrap_err();
    assert!(
        error.message.contains("(sequences: 1)") && error.hint.unwrap().contains("--labelled"),
        "{}",
        error.message
    );
    // Their answers are numbers.
    let error = fixture.rows::<StepRow>(&prompts, 0).unwrap().check_each(|_| Ok(())).unwrap_err();
    assert!(
        error.message.contains("q.jsonl:1: the label must be a list of strings or numbers (got \"0\")"),
        "{}",
        error.message
    );
    let demonstrations = of(RowKind::Demonstration);
    let error = fixture.rows::<StepRow>(&demonstrations, 0).unwrap_err();
    assert!(error.message.contains("(sequences: 2)") && error.hint.unwrap().contains("--steps"), "{}", error.message);
    // 0 is a label.
    let error = fixture.rows::<LabelledRow>(&demonstrations, 0).unwrap().check_each(|_| Ok(())).unwrap_err();
    assert!(error.message.contains("q.jsonl:2: the label must be true or false (got \"2\")"), "{}", error.message);
}

#[test]
fn a_long_text_with_steps_loses_its_end_or_is_filtered() {
    let fixture = Fixture::new();
    let tokens = |n: u32| (5..5 + n).collect::<Vec<u32>>();
    let rows = [4, 9].map(|n| json!({"prompt": tokens(n), "label": ["+", 0.5]}));
    let of = |long_prompts| {
        let file = fixture.jsonl("steps.jsonl", &rows);
        let cut = DataConfig {
            prompts: vec![file],
            row_tokens_max: 6,
            prompt_tokens_max: 2,
            long_prompts,
            ..labelled(false)
        };
        fixture.rows::<StepRow>(&cut, 0).unwrap()
    };
    let mut source = of(LongPrompts::TruncateLeft);
    let mut kept = source.next(2).unwrap();
    kept.sort_by_key(|row| row.tokens.len());
    for (row, (n, is_cut)) in kept.iter().zip([(4, false), (6, true)]) {
        assert_eq!((&row.tokens, row.is_cut), (&tokens(n), is_cut));
        assert_eq!(row.labels, [StepLabel::Token("+".to_owned()), StepLabel::Soft(0.5)]);
    }
    assert_eq!(source.ledger().truncated.tokens, 3);
    assert_eq!(of(LongPrompts::Reject).ledger().filtered["row_tokens_max"], 1);
}
