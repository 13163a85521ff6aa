//! Keys and values as a job file writes them.

use serde::Serialize;
use std::collections::BTreeMap;
use toml::{Table, Value};

/// Every key of a table by its path, `job.kind`, with its value.
pub fn flat(table: &Table) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for (key, value) in table {
        match value {
            Value::Table(inner) => all.extend(flat(inner).into_iter().map(|(rest, v)| (format!("{key}.{rest}"), v))),
            value => drop(all.insert(key.clone(), value.clone())),
        }
    }
    all
}

/// The name of a value in a job file: `reinforce++`.
pub fn name(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|word| Some(word.as_str()?.to_string())).expect("a value with a name")
}
