//! Rows that are not what they should be.

use std::fs;

use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::data::RowKind::{self, Demonstration, Labelled, Pair, Prompt, Steps};
use rlhf_hpc::error::Kind;

use crate::data::fixture::{Fixture, config};
use crate::data::rows::{chat, shard};

/// The kind of row that is expected, a row of another kind, and the message.
const BAD: &[(RowKind, &str, &str)] = &[
    (Demonstration, r#"{"prompt": "x""#, "not JSON"),
    (Demonstration, "[1, 2]", "the line must be a JSON object (got a list)"),
    (Demonstration, "", "the line must be a JSON object (got an empty line)"),
    (Demonstration, r#"{"prompt": 3, "answer": 1}"#, "must be a string (got a number)"),
    (Demonstration, r#"{"prompt": "", "answer": 1}"#, "\"prompt\" is empty"),
    (Demonstration, r#"{"prompt": [], "answer": 1}"#, "\"prompt\" is empty"),
    (Demonstration, r#"{"prompt": [5, 100000], "response": "y", "answer": 1}"#, "token 100000 is outside"),
    (Demonstration, r#"{"prompt": [5, "a"], "answer": 1}"#, "must be a list of token ids or messages (got "),
    (Demonstration, r#"{"question": "x", "answer": 1}"#, "no field \"prompt\"; it has: question, answer"),
    (Demonstration, r#"{"prompt": "x", "answer": 1}"#, "no field \"response\""),
    (Demonstration, r#"{"prompt": "x", "response": "y"}"#, "no field \"answer\""),
    (Demonstration, r#"{"prompt": [{"role": "user", "content": "x"}], "answer": 1}"#, "chat_template = true"),
    (Pair, r#"{"prompt": "x", "chosen": "y"}"#, "no field \"rejected\"; it has: "),
    (Pair, r#"{"prompt": "x", "rejected": "y"}"#, "no field \"chosen\"; it has: "),
    (Pair, r#"{"prompt": "x", "chosen": "y", "rejected": "y"}"#, "\"chosen\" and \"rejected\" must differ"),
    (Pair, r#"{"prompt": "x", "chosen": "y", "rejected": 3}"#, "\"rejected\" must be a string (got a number)"),
    (Pair, r#"{"prompt": "x", "chosen": "y", "rejected": ""}"#, "\"rejected\" is empty"),
    (Pair, r#"{"prompt": "", "chosen": "y", "rejected": "z"}"#, "\"prompt\" is empty"),
    (Pair, r#"{"chosen": [5, 6], "rejected": [7, 8]}"#, "\"chosen\" and \"rejected\" have no common beginning"),
    (Pair, r#"{"prompt": "x", "chosen": [5, 100000], "rejected": [7]}"#, "token 100000 is outside"),
    (
        Pair,
        r#"{"chosen": [{"role": "user", "content": "x"}], "rejected": [{"role": "user", "content": "y"}]}"#,
        "chat_template = true",
    ),
    (Pair, r#"{"chosen": "ab c", "rejected": "xy z"}"#, "have no common beginning"),
    (Labelled, r#"{"prompt": "x", "response": "y"}"#, "no field \"label\"; it has: "),
    (Labelled, r#"{"prompt": "x", "label": true}"#, "no field \"response\"; it has: "),
    (Labelled, r#"{"response": "x", "label": true}"#, "no field \"prompt\"; it has: "),
    (Labelled, r#"{"prompt": "x", "response": "y", "label": 2}"#, "\"label\" must be true or false (got 2)"),
    (
        Labelled,
        r#"{"prompt": "x", "response": "y", "label": "good"}"#,
        "\"label\" must be true or false (got \"good\")",
    ),
    (Labelled, r#"{"prompt": "x", "response": "y", "label": null}"#, "no field \"label\"; it has: prompt, response"),
    (Labelled, r#"{"prompt": "x", "response": "y", "label": [true]}"#, "must be true or false (got [true])"),
    (Labelled, r#"{"prompt": "x", "response": "", "label": true}"#, "\"response\" is empty"),
    (Labelled, r#"{"prompt": "", "response": "y", "label": true}"#, "\"prompt\" is empty"),
    (Labelled, r#"{"prompt": "x", "response": 3, "label": true}"#, "\"response\" must be a string (got a number)"),
    (Steps, r#"{"prompt": "x"}"#, "no field \"label\"; it has: "),
    (Steps, r#"{"label": ["+"]}"#, "no field \"prompt\"; it has: "),
    (Steps, r#"{"prompt": "x", "label": "+"}"#, "\"label\" must be a list of labels (got a string)"),
    (Steps, r#"{"prompt": "x", "label": []}"#, "\"label\" is empty"),
    (Steps, r#"{"prompt": "x", "label": ["+", 1.5]}"#, "\"label\" must hold strings, or numbers from 0 to 1 (got 1.5)"),
    (
        Steps,
        r#"{"prompt": "x", "label": [[true]]}"#,
        "\"label\" must hold strings, or numbers from 0 to 1 (got [true])",
    ),
    (Steps, r#"{"prompt": "", "label": ["+"]}"#, "\"prompt\" is empty"),
];

/// Pairs that are read as chats.
const CHATS: &[(&str, &str)] = &[
    (r#"{"prompt": "x", "chosen": 3, "rejected": "y"}"#, "\"chosen\" must be a string (got a number)"),
    (r#"{"prompt": "x", "chosen": "", "rejected": "y"}"#, "\"chosen\" is empty"),
    (
        r#"{"prompt": "x", "chosen": [{"role": "user", "content": "x"}], "rejected": "z"}"#,
        "\"chosen\" must end with an assistant message",
    ),
    (r#"{"prompt": "x", "chosen": "y", "rejected": [5, 6]}"#, "answer different prompts"),
    (
        r#"{"prompt": "x", "chosen": "y", "rejected": [{"role": "assistant", "content": "y"}]}"#,
        "\"chosen\" and \"rejected\" must differ",
    ),
    (
        r#"{"chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}], "rejected": [{"role": "user", "content": "y"}, {"role": "assistant", "content": "b"}]}"#,
        "answer different prompts",
    ),
    (
        r#"{"prompt": "x", "chosen": [{"role": "user", "content": "y"}, {"role": "assistant", "content": "a"}], "rejected": "b"}"#,
        "\"chosen\" must begin with the prompt's messages",
    ),
];

/// A row that is valid except for its label.
const GOOD: &str =
    r#"{"prompt": "x", "response": "y", "chosen": "y", "rejected": "z", "margin": 1, "answer": 1, "label": LABEL}"#;

#[test]
fn a_bad_row_is_named_by_file_and_line_and_nothing_is_written() {
    let fixture = Fixture::new();
    let refused = |kind: RowKind, line: &str, config: &DataConfig, message: &str| {
        let good = GOOD.replace("LABEL", if kind == Steps { "[\"+\"]" } else { "true" });
        let file = fixture.text("bad.jsonl", &format!("{good}\n{good}\n{line}\n{good}\n"));
        let error = shard(&fixture, &file, kind, config).unwrap_err();
        assert_eq!(error.kind, Kind::Data, "{line}");
        for words in ["bad.jsonl:3: ", message] {
            assert!(error.to_string().contains(words), "{line}: {error}");
        }
        let left: Vec<_> = fs::read_dir(fixture.path("shards")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    };
    for (kind, line, message) in BAD {
        let label_key = if matches!(kind, Labelled | Steps) { "label" } else { "answer" };
        refused(*kind, line, &DataConfig { label_key: label_key.to_owned(), ..config("") }, message);
    }
    for (line, message) in CHATS {
        refused(Pair, line, &chat(), message);
    }
    let margin = DataConfig { margin_key: "margin".to_owned(), ..config("") };
    for (found, message) in [("\"big\"", "\"margin\" must be a number (got \"big\")"), ("null", "no field \"margin\"")]
    {
        let row = format!(r#"{{"prompt": "x", "chosen": "y", "rejected": "z", "margin": {found}}}"#);
        refused(Pair, &row, &margin, message);
    }
    let pair = r#"{"prompt": "x", "chosen": "y", "rejected": "z"}"#;
    refused(Pair, pair, &margin, "no field \"margin\"; it has: prompt, chosen, rejected\nhint: set data.margin_key");
    let wrong = DataConfig { label_key: "label".to_owned(), ..config("") };
    for kind in [Prompt, Demonstration, Labelled, Steps] {
        let row = r#"{"prompt": "x", "response": "y", "answer": "1"}"#;
        refused(kind, row, &wrong, "it has: prompt, response, answer\nhint: set data.label_key (or pass --label-key)");
    }
}
