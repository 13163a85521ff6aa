//! `jobs/reference.toml` is the manual: it holds every key of the schema, its default and its legal values.

use super::source::{files, root};
use rlhf_hpc::config::data::EvalSetConfig;
use rlhf_hpc::config::reward::{HttpConfig, JudgeConfig, ModelRewardConfig, PythonConfig, RuleConfig};
use rlhf_hpc::config::{self, Config};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::fs;

/// Keys without a default: the manual shows an example.
const REQUIRED: [&str; 3] = ["job.kind", "model.actor", "data.prompts"];

fn manual() -> String {
    fs::read_to_string(root().join("jobs/reference.toml")).unwrap()
}

/// A line `key = value` of a TOML text in which every value is on one line.
struct Line {
    path: String,
    value: String,
    /// The comment lines right above it, as one text.
    comment: String,
}

fn lines(text: &str) -> Vec<Line> {
    let (mut table, mut comment, mut all) = (String::new(), String::new(), Vec::new());
    for line in text.lines().map(str::trim) {
        if let Some(words) = line.strip_prefix('#') {
            comment.push_str(words);
        } else if let Some(name) = line.strip_prefix('[') {
            table = format!("{}.", name.trim_matches(['[', ']']));
            comment.clear();
        } else if let Some((key, value)) = line.split_once(" = ") {
            let path = format!("{table}{key}");
            all.push(Line { path, value: value.to_owned(), comment: std::mem::take(&mut comment) });
        } else {
            comment.clear();
        }
    }
    all
}

fn paths(text: &str) -> Vec<String> {
    lines(text).into_iter().map(|line| line.path).collect()
}

#[test]
fn the_manual_has_every_key_of_the_schema_in_its_order_and_no_other() {
    assert_eq!(paths(&manual()), paths(&Config::default().to_toml()));
}

#[test]
fn the_manual_shows_the_default_of_every_key() {
    let shown = config::parse(&manual(), &[]).unwrap().to_toml();
    for (shown, default) in lines(&shown).iter().zip(lines(&Config::default().to_toml())) {
        if !REQUIRED.contains(&shown.path.as_str()) {
            assert_eq!((&shown.path, &shown.value), (&default.path, &default.value));
        }
    }
    for line in lines(&manual()).iter().filter(|line| REQUIRED.contains(&line.path.as_str())) {
        assert!(line.comment.contains("Required."), "{} does not say that it is required", line.path);
    }
}

#[test]
fn the_manual_explains_every_key() {
    for line in lines(&manual()) {
        assert!(line.comment.trim().len() >= 10, "{} has no words", line.path);
    }
}

#[test]
fn the_manual_lists_every_allowed_value_of_a_key() {
    let mut keys = 0;
    for line in lines(&manual()).iter().filter(|line| line.value.starts_with('"')) {
        let (table, key) = line.path.rsplit_once('.').unwrap();
        let wrong = format!("[{table}]\n{key} = \"-\"\n");
        let Err(error) = toml::from_str::<Config>(&wrong) else { continue };
        // serde: unknown variant `-`, expected one of `a`, `b`
        let words: Vec<&str> = error.message().split('`').skip(3).step_by(2).collect();
        keys += usize::from(!words.is_empty());
        for word in words {
            assert!(line.comment.contains(&format!("\"{word}\"")), "{} may be {word:?}", line.path);
        }
    }
    assert!(keys >= 10, "only {keys} keys were found to have words of their own");
}

/// The commented example of a table, without its outer `# `.
fn example(table: &str) -> String {
    let text = manual();
    let begin = text.find(&format!("# [[{table}]]")).expect("the manual has the table");
    let inner = text[begin..].lines().skip(1).take_while(|line| line.starts_with("# "));
    inner.map(|line| &line[2..]).collect::<Vec<_>>().join("\n") + "\n"
}

/// Asserts that a table's example has the default of every key, with an explanation.
fn is_shown<T: Default + DeserializeOwned + Serialize + PartialEq + Debug>(table: &str) {
    let text = example(table);
    assert_eq!(toml::from_str::<T>(&text).unwrap(), T::default());
    assert_eq!(paths(&text), paths(&toml::to_string(&T::default()).unwrap()));
    for line in lines(&text) {
        assert!(line.comment.trim().len() >= 10, "{} has no words", line.path);
    }
}

#[test]
fn the_manual_shows_the_tables_of_rewards_and_sets_with_their_defaults() {
    is_shown::<RuleConfig>("reward.rule");
    is_shown::<PythonConfig>("reward.python");
    is_shown::<ModelRewardConfig>("reward.models");
    is_shown::<HttpConfig>("reward.http");
    is_shown::<JudgeConfig>("reward.judge");
    is_shown::<EvalSetConfig>("data.eval_sets");
}

#[test]
fn every_job_in_the_tree_is_valid() {
    let found = files("jobs", &[".toml"]);
    assert!(found.len() >= 4, "{} jobs", found.len());
    for path in found.iter().map(|file| root().join(&file.name)) {
        // The manual sets no reward, so its defaults are not a complete job.
        let overrides: &[String] = if path.ends_with("reference.toml") {
            &["reward.rule=exact".to_owned(), "job.steps=1".to_owned()]
        } else {
            &[]
        };
        config::load(&path, overrides).and_then(|config| config.check()).unwrap_or_else(|e| panic!("{e}"));
    }
}
