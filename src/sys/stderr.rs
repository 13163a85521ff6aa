//! Messages on standard error. A closed or full standard error must not change how the program ends.

use super::environment;
use super::lock::lock;
use super::terminal::visible;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;

/// Writes a line at once, or as much of it as possible. Control characters are always made visible, even in a log:
/// people read it on a terminal later.
pub fn line(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(format!("{}\n", visible(text)).as_bytes()).and_then(|()| stderr.flush());
}

/// Prints a warning on the first rank, unless this process has printed it before.
pub fn warn_once(text: &str) {
    once(&format!("warning: {text}"));
}

/// Prints a note on the first rank, unless this process has printed it before.
pub fn note_once(text: &str) {
    once(&format!("note: {text}"));
}

fn once(text: &str) {
    static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if environment::launched_rank().unwrap_or(0) == 0 && lock(&PRINTED).insert(text.to_owned()) {
        line(text);
    }
}

/// Warns once about the keys of a JSON file that are not `known`, except keys without a value.
pub fn warn_of_keys(file: &Path, object: &Map<String, Value>, known: impl Fn(&str) -> bool) {
    if let Some(text) = unknown_keys(file, object, known) {
        warn_once(&text);
    }
}

/// The text of that warning; none if all keys are known.
pub fn unknown_keys(file: &Path, object: &Map<String, Value>, known: impl Fn(&str) -> bool) -> Option<String> {
    let is_set = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
    let unknown = object.iter().filter(|(key, value)| !known(key) && is_set(value)).map(|(key, _)| key.as_str());
    let unknown: Vec<&str> = unknown.collect();
    let plural = if unknown.len() == 1 { "" } else { "s" };
    let text = format!("{}: unknown key{plural}, not used: {}", file.display(), unknown.join(", "));
    Some(text).filter(|_| !unknown.is_empty())
}
