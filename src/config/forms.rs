//! Additions of a job's JSON schema to the types of the keys: ranges, and other forms of a value.

use super::limits::{ABOVE_0, FINITE, Ranged};
use schemars::Schema;
use serde_json::{Value, json};

/// Adds the ranges of the numbers of a table.
pub fn with_ranges<T: Ranged>(table: &mut Schema) {
    for (key, range) in T::RANGES {
        let key = table.pointer_mut(&format!("/properties/{key}")).expect("a key of the table");
        let forms = key["anyOf"].as_array().into_iter().flatten();
        let place = forms.clone().position(|form| form["type"] == "integer");
        let number = if let Some(place) = place { &mut key["anyOf"][place] } else { key };
        let is_whole = number["type"] == "integer";
        let json = |x: f64| if is_whole { Value::from(x as i64) } else { Value::from(x) };
        let (low, high) = (*range.start(), *range.end());
        if low > 0.0 && low <= ABOVE_0 {
            number["exclusiveMinimum"] = 0.into();
        } else if low > -FINITE {
            number["minimum"] = json(low);
        }
        // TOML has no larger integers.
        if high < FINITE && high < i64::MAX as f64 {
            number["maximum"] = json(high);
        }
    }
}

/// Accepts the value of the key `word` in place of a table, which needs the keys `required`.
pub fn word_or_table(word: &'static str, required: &'static [&str]) -> impl Fn(&mut Schema) {
    move |table| {
        let key = &table.as_value()["properties"][word];
        let mut short = key.get("items").unwrap_or(key).clone();
        // The first form of the key, if it has several.
        short = short["anyOf"].get(0).unwrap_or(&short).clone();
        if !required.is_empty() {
            table.insert("required".into(), json!(required));
        }
        *table = schemars::json_schema!({ "anyOf": [short, table] });
    }
}

/// Accepts true and false, too.
pub fn or_bool(word: &mut Schema) {
    *word = schemars::json_schema!({ "anyOf": [word, { "type": "boolean" }] });
}
