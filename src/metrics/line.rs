//! A line of `metrics.jsonl`.
//!
//! `step` and `time_unix_s` are first, then the keys in the order of the table of `metrics::keys`, then other keys by
//! name. JSON has no NaN and no infinities. Such a value is written as `null`, and the line ends with `"nonfinite":
//! {key: "NaN" | "inf" | "-inf"}`. So a reader that expects numbers finds a gap instead of a wrong number, and nothing
//! is lost.

use super::keys;
use crate::error::{Error, Result};
use serde_json::{Map, Value};

const NONFINITE: &str = "nonfinite";

/// One line: the metrics of a step, and of an evaluation after it.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub step: u64,
    /// Seconds since 1970 (UTC).
    pub time_unix_s: f64,
    /// The other keys, in file order.
    pub values: Vec<(String, f64)>,
}

impl Line {
    /// A line with `values` in order. If a key is given twice, the last value counts.
    pub fn new(step: u64, time_unix_s: f64, values: &[(&str, f64)]) -> Self {
        let mut ordered: Vec<(String, f64)> = Vec::with_capacity(values.len());
        for &(key, value) in values {
            match ordered.iter_mut().find(|(known, _)| known == key) {
                Some(slot) => slot.1 = value,
                None => ordered.push((key.to_owned(), value)),
            }
        }
        ordered.sort_by(|(a, _), (b, _)| keys::rank(a).cmp(&keys::rank(b)).then_with(|| a.cmp(b)));
        Self { step, time_unix_s, values: ordered }
    }

    pub fn get(&self, key: &str) -> Option<f64> {
        self.values.iter().find(|(known, _)| known == key).map(|&(_, value)| value)
    }

    /// Whether it contains more than an evaluation.
    pub fn is_of_step(&self) -> bool {
        self.values.is_empty() || self.values.iter().any(|(key, _)| !keys::is_eval(key))
    }

    pub fn is_evaluated(&self) -> bool {
        self.values.iter().any(|(key, _)| keys::is_eval(key))
    }

    /// The same line with the metrics of an evaluation, which replace existing ones.
    #[must_use]
    pub fn with(&self, eval: &Self) -> Self {
        let own = self.values.iter().filter(|(key, _)| !keys::is_eval(key));
        let all: Vec<(&str, f64)> = own.chain(&eval.values).map(|(key, value)| (key.as_str(), *value)).collect();
        Self::new(self.step, self.time_unix_s, &all)
    }

    pub fn to_json(&self) -> String {
        let mut object = Map::new();
        object.insert(keys::STEP.into(), self.step.into());
        object.insert(keys::TIME_UNIX_S.into(), self.time_unix_s.into());
        let mut nonfinite = Map::new();
        for (key, value) in &self.values {
            if !value.is_finite() {
                nonfinite.insert(key.clone(), value.to_string().into());
            }
            object.insert(key.clone(), number(key, *value));
        }
        if !nonfinite.is_empty() {
            object.insert(NONFINITE.into(), nonfinite.into());
        }
        Value::Object(object).to_string()
    }

    /// Reads a line back.
    pub fn parse(text: &str) -> Result<Self> {
        let object: Map<String, Value> = serde_json::from_str(text).map_err(|e| Error::data(e.to_string()))?;
        let step = object.get(keys::STEP).and_then(Value::as_u64).ok_or_else(|| Error::data("`step` is missing"))?;
        let time_unix_s = object.get(keys::TIME_UNIX_S).and_then(Value::as_f64).unwrap_or(0.0);
        let nonfinite = object.get(NONFINITE).and_then(Value::as_object);
        let mut values = Vec::with_capacity(object.len());
        for (key, value) in &object {
            if key == keys::STEP || key == keys::TIME_UNIX_S || key == NONFINITE {
                continue;
            }
            let written = || nonfinite?.get(key)?.as_str()?.parse::<f64>().ok();
            let value =
                value.as_f64().or_else(written).ok_or_else(|| Error::data(format!("`{key}` must be a number")))?;
            values.push((key.clone(), value));
        }
        Ok(Self { step, time_unix_s, values })
    }
}

/// Whole counts without a decimal point, other numbers in the shortest form that identifies them.
fn number(key: &str, value: f64) -> Value {
    let whole = keys::find(key).is_some_and(|key| key.unit.is_whole());
    if whole && value.fract() == 0.0 && (0.0..9.0e15).contains(&value) { (value as u64).into() } else { value.into() }
}
