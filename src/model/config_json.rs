//! Typed reading of config.json. A key is absent (or null) or has the right type; else the error names it.

use crate::error::{Error, Result};
use serde_json::{Map, Value};

pub(super) const GENERATION: &str = "generation_config.json";

/// One object of config.json, or of a file of the same form.
pub(super) struct Reader<'a> {
    /// The name of the file.
    file: &'static str,
    object: &'a Map<String, Value>,
    /// The prefix of keys in messages, e.g. `rope_scaling.`.
    prefix: String,
}

impl<'a> Reader<'a> {
    pub(super) fn new(object: &'a Map<String, Value>) -> Self {
        Self::of("config.json", object)
    }

    pub(super) fn of(file: &'static str, object: &'a Map<String, Value>) -> Self {
        Self { file, object, prefix: String::new() }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    /// Whether the object has the key, even with the value null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// A key whose value is an object.
    pub(super) fn nested(&self) -> Option<&'a str> {
        self.object.iter().find(|(_, value)| value.is_object()).map(|(key, _)| key.as_str())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.object.is_empty()
    }

    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.object == other.object
    }

    pub(super) fn wrong(&self, key: &str, what: &str) -> Error {
        Error::data(format!("{}: {}{key} {what}", self.file, self.prefix))
    }

    fn typed<T>(&self, key: &str, kind: &str, as_type: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        as_type(value).map(Some).ok_or_else(|| self.wrong(key, &format!("must be {kind}, got {value}")))
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Reader<'a>>> {
        let object = self.typed(key, "an object", Value::as_object)?;
        Ok(object.map(|object| Reader { object, prefix: format!("{}{key}.", self.prefix), ..*self }))
    }

    /// A count: an integer from 1 to 2^31 - 1.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>> {
        let as_count = |v: &Value| v.as_u64().filter(|n| (1..1 << 31).contains(n)).map(|n| n as usize);
        self.typed(key, "a positive integer below 2^31", as_count)
    }

    pub(super) fn count_needed(&self, key: &str) -> Result<usize> {
        self.count(key)?.ok_or_else(|| self.wrong(key, "is missing"))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", |v| v.as_f64().filter(|x| x.is_finite()))
    }

    pub(super) fn needed(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| self.wrong(key, "is missing"))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// One token id or a list of them.
    pub(super) fn tokens(&self, key: &str) -> Result<Vec<u32>> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let found = self.typed(key, "a token id or a list of token ids", |v| match v {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<u32>>>(),
            // transformers writes -1 for "none".
            Value::Number(n) if n.as_i64() == Some(-1) => Some(Vec::new()),
            one => id(one).map(|n| vec![n]),
        })?;
        Ok(found.unwrap_or_default())
    }
}
