//! Access to the fields of a row.

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// A field, or one within others (`reward_model.ground_truth`). A null is a missing field.
pub fn field<'a>(row: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    let nested = || {
        let (name, rest) = key.split_once('.')?;
        field(row.get(name)?.as_object()?, rest)
    };
    row.get(key).or_else(nested).filter(|value| !value.is_null())
}

pub fn required<'a>(row: &'a Map<String, Value>, key: &str) -> Result<&'a Value> {
    field(row, key).ok_or_else(|| missing(row, key))
}

/// The field that holds the `what` of a row. If it is missing, the error names the key that names the field.
pub fn named<'a>(row: &'a Map<String, Value>, key: &str, what: &str) -> Result<&'a Value> {
    let option = format!("data.{what}_key (or pass --{what}-key)");
    required(row, key).map_err(|e| e.hint(format!("set {option} to the one of its fields that holds the {what}")))
}

/// The error for a missing field.
pub fn missing(row: &Map<String, Value>, key: &str) -> Error {
    let there: Vec<&str> = row.keys().map(String::as_str).collect();
    let there = if there.is_empty() { "it has none".to_owned() } else { format!("it has: {}", there.join(", ")) };
    Error::data(format!("the row has no field {key:?}; {there}"))
}

pub fn token_ids(key: &str, items: &[Value]) -> Result<Vec<u32>> {
    let id = |item: &Value| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| Error::data(format!("field {key:?} must be a list of token ids or messages (got {item})")))
    };
    items.iter().map(id).collect()
}
