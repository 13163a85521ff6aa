//! Foreign text on a terminal: control characters are made visible and have no effect.

use super::fixture::Fixture;
use serde_json::json;
use std::fs;
use std::process::{Command, Stdio};

/// The terminal output of a shell command that runs the program.
fn on_terminal(fixture: &Fixture, arguments: &str) -> String {
    let line = format!("{} {arguments}", env!("CARGO_BIN_EXE_rlhf-hpc"));
    let mut script = Command::new("script");
    script.args(["-qec", &line, "shown"]).current_dir(fixture.root()).env("TERM", "xterm");
    let status = script.stdin(Stdio::null()).stdout(Stdio::null()).status();
    assert!(status.expect("util-linux has it").success(), "{line}");
    fixture.text("shown")
}

#[test]
fn answers_of_a_model_cannot_control_a_terminal_and_are_raw_in_a_pipe() {
    let fixture = Fixture::new();
    let bias = r#"{"\u001b": 1000}"#;
    let options = ["generate", "--model", "model", "--prompt", "1+1=", "--max-new-tokens", "3", "--logit-bias"];
    let piped = fixture.run(&[&options[..], &[bias]].concat()).well();
    assert_eq!(piped.stdout, "\x1b\x1b\x1b\n");
    let shown = on_terminal(&fixture, &format!("{} '{bias}'", options.join(" ")));
    assert!(shown.contains("\r\n\\x1b\\x1b\\x1b\r\n"), "{shown:?}");
    assert!(!shown.contains('\x1b'), "{shown:?}");
}

#[test]
fn rows_and_names_of_files_cannot_control_a_terminal() {
    let fixture = Fixture::new();
    let row = json!({"prompt": "p", "reward": 1.0, "response": "\u{9b}2J\x7f\u{202e}"});
    fixture.write("rows.jsonl", format!("{row}\n"));
    let select = "select --input rows.jsonl";
    let piped = fixture.run(&select.split(' ').collect::<Vec<_>>()).well();
    assert!(piped.stdout.contains('\u{9b}'), "{:?}", piped.stdout);
    let shown = on_terminal(&fixture, select);
    assert!(shown.contains("\\x9b2J\\x7f\\u{202e}") && !shown.contains(['\u{9b}', '\x7f', '\u{202e}']), "{shown:?}");
    // Messages are for people, also in a log file.
    let missing = fixture.run(&["run", "\x1b[2J.toml"]);
    assert!(missing.stderr.contains("\\x1b[2J.toml") && !missing.stderr.contains('\x1b'), "{:?}", missing.stderr);
    let name = "\x1b]0;owned\x07.jsonl";
    fs::copy(fixture.path("rows.jsonl"), fixture.path(name)).expect("a copy");
    let opened = fixture.job(&["--dry-run", &format!("data.prompts=[{}]", json!(name)), "data.prompt_split="]);
    let line = opened.stderr.lines().find(|line| line.starts_with("opening the data: ")).expect("a line");
    assert!(line.ends_with("\\x1b]0;owned\\x07.jsonl"), "{line}");
    assert!(!opened.stderr.contains('\x1b'), "{:?}", opened.stderr);
}
