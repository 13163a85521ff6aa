//! The job that a conversion makes, and the outcome of each option.

use super::given::Given;
use super::launch::Launch;
use super::table::{self, Kind, Row, System};
use crate::config::{self, Config};
use std::collections::BTreeMap;
use toml::{Table, Value};

/// A key of the job.
#[derive(Clone, Debug)]
pub struct Item {
    pub value: Value,
    /// The options that it comes from.
    pub why: String,
    /// Whether one of them is given.
    pub is_given: bool,
}

/// The outcome of an option.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub option: String,
    pub key: String,
    pub kind: Kind,
    pub note: String,
}

pub struct Draft<'a> {
    pub launch: &'a Launch,
    pub known: BTreeMap<&'static str, &'static Row>,
    /// The kind of the job.
    pub kind: &'static str,
    pub items: BTreeMap<String, Item>,
    /// Outcomes that depend on the value, by option.
    pub special: BTreeMap<String, (Kind, String)>,
    /// Commands that download models and rows, and other lines for the head of the job.
    pub head: Vec<String>,
    /// The number of rows, if it is known.
    pub rows: Option<usize>,
    defaults: BTreeMap<String, Value>,
}

/// Values that mean nothing.
pub fn is_null(text: &str) -> bool {
    ["", "none", "null", "~"].contains(&text.to_lowercase().as_str())
}

impl<'a> Draft<'a> {
    pub fn new(launch: &'a Launch, rows: Option<usize>) -> Self {
        let known = table::options(&launch.dialect);
        let kind = match (launch.dialect.system, launch.dialect.command.as_str()) {
            (_, "sft") => "sft",
            (_, "rm" | "reward") => "reward_model",
            (_, "dpo" | "orpo" | "cpo") => "dpo",
            (_, "kto") => "kto",
            (_, "prm") => "step_reward",
            (_, "kd" | "gkd" | "distillation") => "distill",
            _ => "ppo",
        };
        let defaults = config::flat(&Table::try_from(Config::default()).expect("a configuration is TOML"));
        let (items, special, head) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Self { launch, known, kind, items, special, head, rows, defaults }
    }

    pub fn system(&self) -> System {
        self.launch.dialect.system
    }

    /// The default of one of our keys.
    pub fn ours(&self, key: &str) -> Option<&Value> {
        self.defaults.get(key)
    }

    pub fn given(&self, name: &str) -> Option<&'a Given> {
        self.launch.given.iter().rev().find(|one| one.name == name)
    }

    /// The first of `names` that is given, else the first that this dialect knows.
    pub fn name(&self, names: &[&'static str]) -> &'static str {
        let given = names.iter().find(|name| self.given(name).is_some());
        given.or_else(|| names.iter().find(|name| self.known.contains_key(*name))).copied().unwrap_or(names[0])
    }

    /// The values of the first of `names` that is given or has a default; empty if it has none or means nothing.
    pub fn list(&self, names: &[&'static str]) -> Vec<String> {
        let name = self.name(names);
        let default = || {
            let text = self.known.get(name).map_or("", |row| row.default);
            text.split(' ').filter(|part| !part.is_empty()).map(str::to_owned).collect()
        };
        let all = self.given(name).map_or_else(default, |given| given.values.clone());
        if all.len() == 1 && is_null(&all[0]) { Vec::new() } else { all }
    }

    pub fn text(&self, names: &[&'static str]) -> Option<String> {
        let all = self.list(names);
        (!all.is_empty()).then(|| all.join(" "))
    }

    pub fn number(&self, names: &[&'static str]) -> Option<f64> {
        self.text(names)?.parse().ok()
    }

    pub fn is_true(&self, names: &[&'static str]) -> bool {
        let name = self.name(names);
        match self.given(name) {
            Some(given) => given.values.first().is_none_or(|value| is_true(value)),
            None => self.known.get(name).is_some_and(|row| is_true(row.default)),
        }
    }

    /// Sets a key, which comes from `names`. The value of a given option stays if only a default follows.
    pub fn set(&mut self, key: &str, value: impl Into<Value>, names: &[&str]) {
        let given: Vec<&Given> = names.iter().filter_map(|name| self.given(name)).collect();
        let is_given = !given.is_empty();
        let system = self.system();
        let shown =
            |one: &&Given| format!("{} {}", system.written(&one.name), shortened(&one.text())).trim().to_owned();
        let why = if is_given {
            given.iter().map(shown).collect::<Vec<_>>().join(", ")
        } else {
            format!("the default of {system}")
        };
        let key = self.key(key);
        if self.items.get(&key).is_some_and(|item| item.is_given) && !is_given {
            return;
        }
        self.items.insert(key, Item { value: value.into(), why, is_given });
    }

    /// Sets a key that no option of theirs names, with the reason.
    pub fn imply(&mut self, key: &str, value: impl Into<Value>, why: &str) {
        let key = self.key(key);
        self.items.insert(key, Item { value: value.into(), why: why.to_owned(), is_given: false });
    }

    /// Sets a key from `names` unless the job has it.
    pub fn set_new(&mut self, key: &str, value: impl Into<Value>, names: &[&str]) {
        if !self.items.contains_key(&self.key(key)) {
            self.set(key, value, names);
        }
    }

    /// The path of a key of the table, in which `method` is the table of the job's kind.
    pub fn key(&self, key: &str) -> String {
        key.strip_prefix("method.").map_or_else(|| key.to_owned(), |rest| format!("{}.{rest}", self.kind))
    }

    pub fn value(&self, key: &str) -> Option<&Value> {
        self.items.get(key).map(|item| &item.value)
    }

    /// Records the outcome of an option with its value.
    pub fn note(&mut self, name: &str, kind: Kind, note: impl Into<String>) {
        self.special.insert(name.to_owned(), (kind, plain(&note.into())));
    }

    /// Every given option with its outcome, in the order of the launch, then options with a default that has one.
    pub fn outcomes(&self) -> Vec<Outcome> {
        let mut seen: Vec<&str> = Vec::new();
        let mut all = Vec::new();
        for given in &self.launch.given {
            if seen.contains(&given.name.as_str()) {
                continue;
            }
            seen.push(&given.name);
            all.push(self.outcome(&given.name, &given.text()));
        }
        for (name, (kind, note)) in self.special.iter().filter(|(name, _)| self.given(name).is_none()) {
            let key = self.known.get(name.as_str()).map_or_else(String::new, |row| self.key(row.key));
            let option = format!("{} (not given)", self.system().written(name));
            all.push(Outcome { option, key, kind: *kind, note: note.clone() });
        }
        all
    }

    fn outcome(&self, name: &str, value: &str) -> Outcome {
        let option = plain(format!("{} {}", self.system().written(name), shortened(value)).trim());
        let Some(row) = self.known.get(name) else {
            let hint = config::override_for(name, None).unwrap_or_default();
            let note = format!("{} has no such option. {hint}", self.launch.dialect).trim().to_owned();
            return Outcome { option, key: String::new(), kind: Kind::Missing, note };
        };
        let (kind, note) = match self.special.get(name) {
            Some((kind, note)) => (*kind, note.clone()),
            None => (row.kind, row.note.to_owned()),
        };
        Outcome { option, key: self.key(row.key), kind, note }
    }
}

/// A text without control characters, for comments and the terminal.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn shortened(text: &str) -> String {
    let text = plain(&text.replace('\n', "\\n"));
    if text.chars().count() <= 60 { text } else { text.chars().take(57).collect::<String>() + "..." }
}

pub fn is_true(text: &str) -> bool {
    ["true", "1", "yes", "on"].contains(&text.to_lowercase().as_str())
}
