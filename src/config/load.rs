//! Loading of a `Config` from a TOML file, its bases, and `key.path=value` overrides. All mistakes are reported together, each with
//! its line or override and with a suggestion.

use super::aliases::{elsewhere, nearest};
use super::effect::{is_within, without_indices};
use super::layers::{self, Layer, as_one_line, line_at};
use super::{Config, flat, paths, values, verl};
use crate::error::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

/// Keys without a default.
pub(super) const REQUIRED: [&str; 3] = ["job.kind", "model.actor", "data.prompts"];

/// Reads `path` and the files that are its bases, applies the overrides in order, and checks every key. A base comes
/// before the file that names it. Paths in a file are relative to its folder, paths in overrides to the current one.
pub fn load(path: &Path, overrides: &[String]) -> Result<Config> {
    let here = std::env::current_dir().map_err(|e| Error::io("find", Path::new("."), &e))?;
    let layers = layers::read(path)?;
    let mut config = read(&layers, overrides, &here).map_err(|e| e.within(path.display()))?;
    config.resolve_paths(&layers[0].folder());
    config.files = layers.into_iter().map(|layer| layer.path).collect();
    if config.job.name.is_empty() {
        let dir = std::path::absolute(&config.job.dir).unwrap_or_else(|_| config.job.dir.clone());
        config.job.name = dir.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    }
    Ok(config)
}

/// Parses the text of a job, like `load`, but does not change its paths.
pub fn parse(text: &str, overrides: &[String]) -> Result<Config> {
    let layer = Layer::parse(Path::new(""), text.to_owned())?;
    if layer.has_base() {
        return Err(Error::usage("base needs a job file, because it is a path from the folder of the file"));
    }
    read(&[layer], overrides, Path::new(""))
}

/// The keys of all layers and overrides so far, and what is wrong with them.
struct Reading {
    known: Table,
    table: Table,
    given: Vec<String>,
    of_base: BTreeMap<String, PathBuf>,
    mistakes: Vec<Error>,
    notes: Vec<String>,
}

/// Reads a job from its layers, the job file first.
fn read(layers: &[Layer], overrides: &[String], here: &Path) -> Result<Config> {
    let known = Table::try_from(Config::default()).expect("a configuration is TOML");
    let (table, of_base) = (Table::new(), BTreeMap::new());
    let mut reading = Reading { known, table, given: Vec::new(), of_base, mistakes: Vec::new(), notes: Vec::new() };
    for (i, layer) in layers.iter().enumerate().rev() {
        reading.layer(layer, (i > 0).then_some(&layers[0]))?;
    }
    for item in overrides {
        reading.apply(item, here);
    }
    let Reading { known, mut table, mut given, of_base, mut mistakes, notes } = reading;
    for key in REQUIRED {
        let (of, name) = key.split_once('.').expect("a key of a table");
        let value = |of: &str, name: &str| table.get(of).and_then(|table| table.get(name));
        let is_evaluated = key == "data.prompts" && value("data", "eval_sets").is_some();
        if value(of, name).is_none() && !is_evaluated {
            let hint =
                "set job.kind, model.actor and data.prompts, which have no default; jobs/reference.toml lists all keys";
            mistakes.push(Error::usage(format!("{key} is missing")).hint(hint));
        }
    }
    Error::all(mistakes)?;
    // Single values of overrides become lists, too.
    check(&mut table, &known, &mut Vec::new(), &mut |_, _| ());
    let mut config = Config::deserialize(Value::Table(table))
        .map_err(|e| Error::usage(e.message().lines().collect::<Vec<_>>().join(" ")))?;
    config.fill_defaults();
    given.sort_unstable();
    given.dedup();
    (config.given, config.of_base, config.notes) = (given, of_base, notes);
    Ok(config)
}

impl Reading {
    /// Adds the keys of a file over those of its bases. `job` is the job file, if the file is a base.
    fn layer(&mut self, layer: &Layer, job: Option<&Layer>) -> Result<()> {
        let Layer { path, text, table, .. } = layer;
        let places = DeTable::parse(text).map_err(|e| as_one_line(text, &e))?;
        let mut table = table.clone();
        let mut given = given_keys(&table, "");
        let is_listing = flat(&self.known).keys().all(|key| given.iter().any(|given| is_within(given, key)));
        if is_listing {
            // A run wrote this file and listed all keys, so nothing shows which ones the user set.
            given.clear();
        }
        let mut mistakes = Vec::new();
        let place = |path: &[&str]| place_of(places.get_ref(), path).unwrap_or(0);
        check(&mut table, &self.known, &mut Vec::new(), &mut |path, mistake| mistakes.push((place(path), mistake)));
        mistakes.sort_by_key(|(place, _)| *place);
        self.mistakes.extend(mistakes.into_iter().map(|(place, mistake)| {
            let mistake = mistake.within(line_at(text, place));
            if job.is_some() { mistake.within(path.display()) } else { mistake }
        }));
        // A list replaces that of the base, with all keys in it.
        let replaced: Vec<&str> = given.iter().map(|key| list_of(key)).collect();
        self.of_base.retain(|key, _| !replaced.iter().any(|own| is_within(key, own)));
        self.given.retain(|key| !replaced.iter().any(|own| is_within(key, own)));
        if let Some(job) = job {
            // The paths of the job file itself are resolved last.
            if layer.folder() != job.folder() {
                let folder = layer.folder();
                let folder = folder.canonicalize().map_err(|e| Error::io("find", &folder, &e))?;
                paths::make_absolute(&mut table, &folder, &mut self.notes);
            }
            self.of_base.extend(given.iter().map(|key| (without_indices(key), path.clone())));
        }
        self.given.extend(given);
        merge(&mut self.table, table, "");
        Ok(())
    }

    /// Applies an override.
    fn apply(&mut self, item: &str, here: &Path) {
        if item.split_once('=').is_some_and(|(key, _)| key.trim() == layers::KEY) {
            let mistake = Error::usage(format!("override `{item}`: only a file has a base"));
            self.mistakes.push(mistake.hint("write `base = \"FILE\"` as the first line of a job file"));
            return;
        }
        let mut given = Table::new();
        let mut apply = |table: &mut Table| apply(table, item, here, &mut self.notes);
        if let Err(mistake) = apply(&mut given).and_then(|()| apply(&mut self.table)) {
            self.mistakes.push(mistake);
            return;
        }
        let mistakes = &mut self.mistakes;
        let wrong = &mut |_: &[&str], mistake: Error| mistakes.push(mistake.within(format_args!("override `{item}`")));
        check(&mut given, &self.known, &mut Vec::new(), wrong);
        let given = given_keys(&given, "");
        self.of_base.retain(|key, _| !given.iter().any(|own| is_within(key, &without_indices(own))));
        self.given.extend(given);
    }
}

/// Sets the keys of `over` in `table`. Tables are merged key by key; lists, and the single entry of a list, are replaced.
fn merge(table: &mut Table, over: Table, within: &str) {
    for (key, value) in over {
        let path = if within.is_empty() { key.clone() } else { format!("{within}.{key}") };
        match (table.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) if !is_entry(&path) => merge(old, new, &path),
            (_, value) => drop(table.insert(key, value)),
        }
    }
}

/// The paths of all values of a job, with the index of each table of a list: `reward.rule.0.kind`.
fn given_keys(table: &Table, within: &str) -> Vec<String> {
    let path = |key: &str| if within.is_empty() { key.to_string() } else { format!("{within}.{key}") };
    let of = |(key, value): (&String, &Value)| match value {
        Value::Table(inner) if is_entry(&path(key)) => given_keys(inner, &format!("{}.0", path(key))),
        Value::Table(inner) => given_keys(inner, &path(key)),
        Value::Array(all) if all.iter().any(Value::is_table) => {
            let entry = |(i, one): (usize, &Value)| {
                one.as_table().map_or_else(Vec::new, |one| given_keys(one, &format!("{}.{i}", path(key))))
            };
            all.iter().enumerate().flat_map(entry).collect()
        }
        _ => vec![path(key)],
    };
    table.iter().flat_map(of).collect()
}

/// The part of a key's path before the index of an entry, or all of it.
fn list_of(key: &str) -> &str {
    let mut end = 0;
    for part in key.split('.').take_while(|part| part.parse::<usize>().is_err()) {
        end += part.len() + 1;
    }
    &key[..end - 1]
}

/// Whether a table at `path` is the only entry of a list.
fn is_entry(path: &str) -> bool {
    path == "data.eval_sets" || path.strip_prefix("reward.").is_some_and(|rest| !rest.contains('.'))
}

/// Compares each key of `given` with the `known` ones, and checks its value by itself. A single value becomes a list if
/// the key is a list. `wrong` is called with the path of a mistake and its error.
fn check<'a>(given: &'a mut Table, known: &Table, path: &mut Vec<&'a str>, wrong: &mut dyn FnMut(&[&str], Error)) {
    for (key, value) in given.iter_mut() {
        path.push(key);
        match known.get(key) {
            None if is_foreign_table(value, path) => {
                value.as_table_mut().into_iter().for_each(|inner| check(inner, &Table::new(), path, wrong));
            }
            None => {
                let names: Vec<&str> = known.keys().map(String::as_str).collect();
                let hint = if key == layers::KEY && path.len() > 1 {
                    "write `base` above the first [table] of the file".to_owned()
                } else {
                    elsewhere(&path[..path.len() - 1], key, &names)
                };
                // In a table of another system, a key is known by its whole path.
                let named = if known.is_empty() { path.join(".") } else { (*key).clone() };
                wrong(path, Error::usage(format!("unknown key `{named}`")).hint(hint));
            }
            Some(Value::Table(known)) if !known.is_empty() => match value {
                Value::Table(inner) => check(inner, known, path, wrong),
                other => {
                    let (name, found) = (path.join("."), other.type_str());
                    let error = Error::usage(format!("{key} must be a table (got a value of type {found})"));
                    wrong(path, error.hint(format!("write [{name}] with its keys below, or {name}.KEY = VALUE")));
                }
            },
            Some(default) => {
                if default.is_array() && !value.is_array() && !value.is_table() {
                    *value = Value::Array(vec![value.clone()]);
                }
                if let Some((place, message)) = refusal(path, value.clone()) {
                    wrong(path, explain(&place, value, &message));
                }
            }
        }
        path.pop();
    }
}

/// Whether `value` is a table of another system, each of whose keys has its own hint.
fn is_foreign_table(value: &Value, path: &[&str]) -> bool {
    value.as_table().is_some_and(|inner| !inner.is_empty()) && verl::is_table(&path.join("."))
}

/// The error of serde for a job with only `value` at `path`, and the key that it is about: this one, or one within it. None
/// if serde accepts it.
fn refusal(path: &[&str], value: Value) -> Option<(String, String)> {
    let within = |value, key: &&str| Value::Table(Table::from_iter([((*key).to_string(), value)]));
    let error = Config::deserialize(path.iter().rev().fold(value, within)).err()?;
    let (shown, path) = (error.to_string(), path.join("."));
    let place = shown.rsplit_once("in `").and_then(|(_, rest)| rest.split_once('`')).map(|(place, _)| place);
    let place = place.filter(|place| place.starts_with(&format!("{path}."))).unwrap_or(&path);
    Some((place.to_owned(), error.message().to_owned()))
}

/// The position of the value of `path` in the file.
fn place_of(table: &DeTable, path: &[&str]) -> Option<usize> {
    let (first, rest) = path.split_first()?;
    let (key, value) = table.iter().find(|(key, _)| key.get_ref() == first)?;
    match value.get_ref() {
        DeValue::Table(inner) if !rest.is_empty() => place_of(inner, rest),
        _ => Some(key.span().start),
    }
}

/// Sets `a.b.c=value`. The value is TOML, or a plain string if it does not parse as TOML. A path is relative to `here`.
fn apply(table: &mut Table, item: &str, here: &Path, notes: &mut Vec<String>) -> Result<()> {
    let Some((path, raw)) = item.split_once('=') else {
        return Err(Error::usage(format!("override `{item}` has no `=`"))
            .hint("write key.path=value, e.g. optim.actor.lr=3e-6"));
    };
    let value = format!("v = {raw}")
        .parse::<Table>()
        .ok()
        .filter(|t| t.len() == 1)
        .and_then(|mut t| t.remove("v"))
        .unwrap_or_else(|| Value::String(raw.to_string()));
    let value = paths::of_override(path.trim(), value, here, notes);
    let mut keys: Vec<&str> = path.split('.').map(str::trim).collect();
    if keys.iter().any(|key| key.is_empty()) {
        return Err(
            Error::usage(format!("override `{item}` has an empty key")).hint("write key.path=value, e.g. job.seed=7")
        );
    }
    let last = keys.pop().unwrap_or_default();
    let mut at = table;
    for key in keys {
        let next = at.entry(key).or_insert_with(|| Value::Table(Table::new()));
        at = next.as_table_mut().ok_or_else(|| Error::usage(format!("override `{item}`: {key} is not a table")))?;
    }
    at.insert(last.to_string(), value);
    Ok(())
}

/// Translates serde's error about the value of a key for users.
fn explain(key: &str, value: &Value, message: &str) -> Error {
    let message = message.replace('\n', " ");
    let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    if let (true, Some((wrong, known))) = (message.starts_with("unknown "), names.split_first()) {
        return unknown_word(key, value, message.starts_with("unknown field"), wrong, known);
    }
    let Some((found, expected)) = message
        .strip_prefix("invalid type: ")
        .or(message.strip_prefix("invalid value: "))
        .and_then(|m| m.split_once(", expected "))
    else {
        return Error::usage(message);
    };
    let expected = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" if found.contains("`-") => "an integer of at least 0",
        "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" => "an integer",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a string" | "path string" => "a string",
        "a sequence" => "a list",
        other => other,
    };
    let kinds = [
        ("string", "a string"),
        ("integer", "an integer"),
        ("floating point", "a float"),
        ("boolean", "a boolean"),
        ("sequence", "a list"),
        ("map", "a table"),
    ];
    let found = kinds.iter().find_map(|(kind, words)| found.strip_prefix(kind).map(|rest| format!("{words}{rest}")));
    let found = found.unwrap_or_else(|| value.to_string());
    Error::usage(format!("{key} must be {expected} (got {found})"))
}

/// The error for a name that is not among the `known` ones.
fn unknown_word(key: &str, value: &Value, is_key: bool, wrong: &str, known: &[&str]) -> Error {
    let error = Error::usage(format!("{key}: unknown {} `{wrong}`", if is_key { "key" } else { "value" }));
    // Other systems have a kind of job for each estimator or loss.
    for [table, of] in [["ppo", "advantage"], ["ppo", "loss"], ["dpo", "loss"]] {
        if key == "job.kind" && refusal(&[table, of], value.clone()).is_none() {
            return error.hint(format!("set job.kind = \"{table}\" and {table}.{of} = \"{wrong}\""));
        }
    }
    if let Some(hint) = values::meant(key, wrong) {
        return error.hint(hint);
    }
    match nearest(wrong, known) {
        Some(near) => error.hint(format!("did you mean `{near}`?")),
        None => error.hint(format!("use one of {}", known.join(", "))),
    }
}
