//! The JSON schema of a job, for editors. The meaning of a key is in the manual, its range next to its type, and serde
//! knows the accepted values. So nothing is defined twice.

use super::TABLES;
use super::limits::{ABOVE_0, FINITE, Ranged, Ranges};
use super::load::{REQUIRED, refusal};
use super::mesh::RoleName;
use super::reference::{Entry, REFERENCE, entries, example};
use super::reward::{EnvironmentConfig, HttpConfig, JudgeConfig, ModelRewardConfig, PythonConfig};
use serde_json::{Map, Value, json};
use toml::Value as Toml;

/// The values that a key accepts. `refused` returns the error for a rejected value. Numbers are within `range`.
fn takes(refused: &dyn Fn(Toml) -> Option<String>, range: Option<&std::ops::RangeInclusive<f64>>) -> Value {
    let fits = |value: Toml| refused(value).is_none();
    match refused("-".into()) {
        None => return json!({ "type": "string" }),
        // unknown variant `-`, expected one of `a`, `b`
        Some(message) if message.starts_with("unknown variant") => {
            let words: Vec<&str> = message.split('`').skip(3).step_by(2).collect();
            let word = json!({ "type": "string", "enum": words });
            return if fits(true.into()) { json!({ "anyOf": [word, { "type": "boolean" }] }) } else { word };
        }
        Some(_) => {}
    }
    if fits(true.into()) {
        return json!({ "type": "boolean" });
    }
    if fits(1.into()) {
        let is_whole = !fits(0.5.into());
        let mut number = json!({ "type": if is_whole { "integer" } else { "number" } });
        if !fits((-1).into()) {
            number["minimum"] = 0.into();
        }
        if let Some(range) = range {
            bound(&mut number, *range.start(), *range.end(), is_whole);
        }
        return if fits("auto".into()) { json!({ "anyOf": [number, { "const": "auto" }] }) } else { number };
    }
    let sizes = if fits(Toml::Array(Vec::new())) { [1, 0] } else { [2, 2] };
    let one = takes(&|value| refused(Toml::Array(vec![value; sizes[0]])), range);
    list(&one, sizes[1])
}

/// A list of `one` with `size` entries. With size 0, any number of entries, or a single value.
fn list(one: &Value, size: usize) -> Value {
    if size > 0 {
        return json!({ "type": "array", "items": one, "minItems": size, "maxItems": size });
    }
    json!({ "anyOf": [{ "type": "array", "items": one }, one] })
}

fn bound(number: &mut Value, low: f64, high: f64, is_whole: bool) {
    let json = |x: f64| if is_whole { Value::from(x as i64) } else { Value::from(x) };
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

fn key(entry: &Entry, path: &[&str], ranges: Ranges) -> Value {
    let range = ranges.iter().find(|(key, _)| entry.key == *key).map(|(_, range)| range);
    let full = path.join(".");
    let mut schema = match full.as_str() {
        "mesh.placement" => list(&placement(), 0),
        "data.eval_sets" => list(&object(&table_of(&full, &[]).into(), &["name", "prompts"]), 0),
        "reward.rule" => source(&full, "kind", &[]),
        "reward.python" => source(&full, "file", PythonConfig::RANGES),
        "reward.http" => source(&full, "url", HttpConfig::RANGES),
        "data.eval_sets.prompts" | "reward.http.url" => list(&json!({ "type": "string" }), 0),
        "reward.models" => source(&full, "dir", ModelRewardConfig::RANGES),
        "reward.environment" => source(&full, "python", EnvironmentConfig::RANGES),
        "reward.judge" => source(&full, "dir", JudgeConfig::RANGES),
        _ => takes(&|value| refusal(path, value), range),
    };
    schema["description"] = entry.description().into();
    let default = serde_json::to_value(entry.default()).expect("TOML is JSON");
    if REQUIRED.contains(&full.as_str()) {
        schema["examples"] = json!([default]);
    } else {
        schema["default"] = default;
    }
    schema
}

fn placement() -> Value {
    let roles = RoleName::ALL.map(RoleName::name);
    object(
        &json!({
            "roles": { "type": "array", "items": { "type": "string", "enum": roles } },
            "ranks": { "type": "string", "pattern": r"^\s*[0-9]+\s*\.\.\s*[0-9]+\s*$" },
        }),
        &["roles", "ranks"],
    )
}

/// The keys of a table that the manual shows as an example.
fn table_of(path: &str, ranges: Ranges) -> Map<String, Value> {
    let of_table = example(path).into_iter().map(|entry| {
        let full: Vec<&str> = path.split('.').chain([entry.key.as_str()]).collect();
        let described = key(&entry, &full, ranges);
        (entry.key, described)
    });
    of_table.collect()
}

/// A source of rewards: a short name, which is the value of `word`, a table, or a list of either.
fn source(path: &str, word: &str, ranges: Ranges) -> Value {
    let keys = table_of(path, ranges);
    // One value of a list.
    let mut short = keys[word].get("anyOf").map_or(&keys[word], |forms| &forms[1]).clone();
    short.as_object_mut().expect("an object").retain(|name, _| name == "type" || name == "enum");
    let required: &[&str] = if matches!(word, "file" | "url") { std::slice::from_ref(&word) } else { &[] };
    list(&json!({ "anyOf": [short, object(&keys.into(), required)] }), 0)
}

fn object(properties: &Value, required: &[&str]) -> Value {
    let mut object = json!({ "type": "object", "properties": properties, "additionalProperties": false });
    if !required.is_empty() {
        object["required"] = json!(required);
    }
    object
}

/// The JSON schema (draft 2020-12) of a job file.
pub fn schema() -> Value {
    let mut root = object(&json!({}), &[]);
    for entry in entries(REFERENCE, "") {
        let path: Vec<&str> = entry.table.split('.').collect();
        let mut at = &mut root;
        for name in &path {
            let tables = at["properties"].as_object_mut().expect("a table");
            at = tables.entry(*name).or_insert_with(|| object(&json!({}), &[]));
        }
        if entry.key.is_empty() {
            at["description"] = entry.description().into();
            if entry.table == "data.chat_template_args" {
                at["additionalProperties"] = true.into();
            }
            continue;
        }
        let ranges = TABLES.iter().find(|(table, _)| entry.table == *table).map_or(&[][..], |(_, ranges)| ranges);
        let full: Vec<&str> = path.iter().copied().chain([entry.key.as_str()]).collect();
        at["properties"][entry.key.as_str()] = key(&entry, &full, ranges);
    }
    for (table, key) in REQUIRED.iter().filter_map(|key| key.split_once('.')) {
        root["properties"][table]["required"] = json!([key]);
    }
    if let Some(data) = root["properties"]["data"].as_object_mut() {
        // A job that only evaluates may have only sets.
        let of_rows = data.remove("required");
        data.insert("anyOf".into(), json!([{ "required": of_rows }, { "required": ["eval_sets"] }]));
    }
    let tables: Vec<&str> = REQUIRED.iter().filter_map(|key| Some(key.split_once('.')?.0)).collect();
    root["required"] = json!(tables);
    let about = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An rlhf-hpc job",
        "description": "jobs/reference.toml is the manual of these keys.",
    });
    let Value::Object(mut schema) = about else { unreachable!("an object") };
    schema.extend(root.as_object_mut().map(std::mem::take).unwrap_or_default());
    schema.into()
}
