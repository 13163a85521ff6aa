//! The JSON schema of a job, for editors: the types of its keys, and the meanings and defaults of the manual.

use super::load::REQUIRED;
use super::reference::{self, Entry};
use super::{Config, layers};
use schemars::Schema;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use serde_json::{Value, json};

/// Removes descriptions for developers, and lists the possible values of a key in one `enum`.
fn plain(schema: &mut Schema) {
    for name in ["title", "description", "format", "default"] {
        schema.remove(name);
    }
    if let Some(Value::Array(forms)) = schema.remove("oneOf") {
        let of = |form: &Value| form["enum"].as_array().cloned().unwrap_or_else(|| vec![form["const"].clone()]);
        schema.insert("type".into(), "string".into());
        schema.insert("enum".into(), forms.iter().flat_map(of).collect());
    }
}

/// The schema at `path` in `schema`: a key of a table, or of the tables of a list.
fn at<'a>(schema: &'a mut Value, path: &str) -> &'a mut Value {
    path.split('.').fold(schema, |mut schema, name| {
        while schema.get("properties").is_none() {
            schema = if schema.get("items").is_some() { &mut schema["items"] } else { &mut schema["anyOf"][1] };
        }
        &mut schema["properties"][name]
    })
}

/// Adds the meaning and the default of a key. A list may be a single value.
fn describe(root: &mut Value, entry: &Entry) {
    let (path, default) = (entry.path(), entry.default().map(|value| serde_json::to_value(value).expect("it is JSON")));
    let key = at(root, &path);
    if key.get("items").is_some() && key.get("minItems").is_none() {
        *key = json!({ "anyOf": [key, key["items"]] });
    }
    key["description"] = entry.description().into();
    match default {
        Some(example) if REQUIRED.contains(&path.as_str()) => key["examples"] = json!([example]),
        Some(default) => key["default"] = default,
        // A table with free keys.
        None if key.get("properties").is_none() => key["default"] = json!({}),
        None => {}
    }
}

/// The JSON schema (draft 2020-12) of a job file.
pub fn schema() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let settings = settings.with_transform(RecursiveTransform(plain));
    let mut root = settings.into_generator().into_root_schema_for::<Config>().to_value();
    root["properties"][layers::KEY] = json!({ "type": "string" });
    // The keys of tables in lists come before the lists.
    reference::all().iter().rev().for_each(|entry| describe(&mut root, entry));
    // A job with a base may leave out any key. A job that only evaluates may have only sets.
    let mut needed = json!({ "required": [], "properties": {} });
    for (table, key) in REQUIRED.iter().filter_map(|key| key.split_once('.')) {
        let own = json!({ "required": [key] });
        let of_sets = json!({ "anyOf": [own, { "required": ["eval_sets"] }] });
        needed["properties"][table] = if table == "data" { of_sets } else { own };
        needed["required"].as_array_mut().expect("a list").push(table.into());
    }
    root["if"] = json!({ "required": [layers::KEY] });
    root["else"] = needed;
    root["title"] = "An rlhf-hpc job".into();
    root["description"] = "jobs/reference.toml is the manual of these keys.".into();
    root
}
