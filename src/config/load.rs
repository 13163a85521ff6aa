//! Loading of a `Config` from a TOML file and `key.path=value` overrides. All mistakes are reported together, each with
//! its line or override and with a suggestion.

use super::aliases::{elsewhere, nearest};
use super::effect::is_within;
use super::{Config, flat, values, verl};
use crate::error::{Error, Result};
use crate::hub;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

/// Keys without a default.
pub(super) const REQUIRED: [&str; 3] = ["job.kind", "model.actor", "data.prompts"];

/// Reads `path`, applies the overrides in order, and checks every key. Paths in the file are relative to its folder,
/// paths in overrides to the current one.
pub fn load(path: &Path, overrides: &[String]) -> Result<Config> {
    // Opening a FIFO would block until a writer opens it.
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return Err(Error::usage(format!("job file {} is not a regular file", path.display())));
    }
    let text = std::fs::read_to_string(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::usage(format!("job file {} does not exist", path.display()))
            .hint("pass the path of a TOML job, e.g. `rlhf-hpc ppo.toml`, or run `rlhf-hpc --help` for the verbs"),
        _ => Error::io("read", path, &e),
    })?;
    let here = std::env::current_dir().map_err(|e| Error::io("find", Path::new("."), &e))?;
    let mut config =
        check_format(&text).and_then(|()| read(&text, overrides, &here)).map_err(|e| e.within(path.display()))?;
    let base =
        path.parent().filter(|p| !p.as_os_str().is_empty()).map_or_else(|| PathBuf::from("."), Path::to_path_buf);
    config.resolve_paths(&base);
    if config.job.name.is_empty() {
        let dir = std::path::absolute(&config.job.dir).unwrap_or_else(|_| config.job.dir.clone());
        config.job.name = dir.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    }
    Ok(config)
}

/// Rejects a job in YAML or JSON. In YAML, the first line with text is `KEY:` or `KEY: VALUE`, or `---`.
fn check_format(text: &str) -> Result<()> {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or_default();
    let is_key = |key: &str| key.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c));
    let is_yaml = first == "---" || first.split_once(':').is_some_and(|(key, _)| is_key(key) && !key.is_empty());
    let what = if is_yaml {
        "YAML"
    } else if first.starts_with('{') {
        "JSON"
    } else {
        return Ok(());
    };
    Err(Error::usage(format!("a job is a TOML file (got {what})")).hint(
        "write tables as [job] and values as kind = \"ppo\"; `rlhf-hpc jobs` lists recipes, and `rlhf-hpc help KEY` \
         explains a key, also by its name in verl, TRL and OpenRLHF",
    ))
}

/// Parses the text of a job, like `load`, but does not change its paths.
pub fn parse(text: &str, overrides: &[String]) -> Result<Config> {
    read(text, overrides, Path::new(""))
}

fn read(text: &str, overrides: &[String], here: &Path) -> Result<Config> {
    let known = Table::try_from(Config::default()).expect("a configuration is TOML");
    let as_one_line = |e: toml::de::Error| {
        let mistake = Error::usage(e.message().replace('\n', " "));
        e.span().map_or(mistake.clone(), |span| mistake.within(line_at(text, span.start)))
    };
    let places = DeTable::parse(text).map_err(as_one_line)?;
    let mut table: Table = text.parse().map_err(as_one_line)?;
    let mut keys_given = given_keys(&table, "");
    let is_listing = flat(&known).keys().all(|key| keys_given.iter().any(|given| is_within(given, key)));
    if is_listing {
        // A run wrote this file and listed all keys, so nothing shows which ones the user set.
        keys_given.clear();
    }
    let (mut mistakes, mut notes) = (Vec::new(), Vec::new());
    let place = |path: &[&str]| place_of(places.get_ref(), path).unwrap_or(0);
    check(&mut table, &known, &mut Vec::new(), &mut |path, mistake| mistakes.push((place(path), mistake)));
    mistakes.sort_by_key(|(place, _)| *place);
    let mut mistakes: Vec<Error> =
        mistakes.into_iter().map(|(place, mistake)| mistake.within(line_at(text, place))).collect();
    for item in overrides {
        let mut given = Table::new();
        let mut apply = |table: &mut Table| apply(table, item, here, &mut notes);
        if let Err(mistake) = apply(&mut given).and_then(|()| apply(&mut table)) {
            mistakes.push(mistake);
            continue;
        }
        let wrong = &mut |_: &[&str], mistake: Error| mistakes.push(mistake.within(format_args!("override `{item}`")));
        check(&mut given, &known, &mut Vec::new(), wrong);
        keys_given.extend(given_keys(&given, ""));
    }
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
    keys_given.sort_unstable();
    keys_given.dedup();
    (config.given, config.notes) = (keys_given, notes);
    Ok(config)
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
                let hint = elsewhere(&path[..path.len() - 1], key, &names);
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
                if let Some(message) = refusal(path, value.clone()) {
                    wrong(path, explain(&path.join("."), value, &message));
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

/// The error of serde for a job with only `value` at `path`; none if serde accepts it.
fn refusal(path: &[&str], value: Value) -> Option<String> {
    let within = |value, key: &&str| Value::Table(Table::from_iter([((*key).to_string(), value)]));
    Config::deserialize(path.iter().rev().fold(value, within)).err().map(|e| e.message().to_string())
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

/// Formats the line at a position: ``line 7: `steps = 2` ``.
fn line_at(text: &str, at: usize) -> String {
    let line = text[..at.min(text.len())].matches('\n').count();
    format!("line {}: `{}`", line + 1, text.lines().nth(line).unwrap_or("").trim())
}

/// Keys whose values are paths.
const PATHS: [&str; 17] = [
    "job.dir",
    "model.actor",
    "model.adapter",
    "model.reference_adapter",
    "model.reference",
    "model.critic",
    "model.teachers",
    "data.prompts",
    "data.pretrain",
    "data.eval_sets",
    "data.split.eval_files",
    "reward.python",
    "reward.python.file",
    "reward.models",
    "reward.models.dir",
    "reward.judge",
    "reward.judge.dir",
];

/// The value of `key` with paths relative to `here`; in tables only the paths in `file`, `dir` and `prompts`. Names of
/// the Hub become directories of the cache.
fn from_here(key: &str, value: Value, here: &Path, notes: &mut Vec<String>) -> Value {
    match value {
        Value::String(path) if !path.is_empty() => {
            let full = match key.split('.').next() {
                Some("data") => hub::rows_path(here, &path),
                Some("model") => hub::model_dir(here, Path::new(&path), notes),
                _ if key.starts_with("reward.models") || key.starts_with("reward.judge") => {
                    hub::model_dir(here, Path::new(&path), notes)
                }
                _ => here.join(path),
            };
            Value::String(full.display().to_string())
        }
        Value::Array(all) => Value::Array(all.into_iter().map(|one| from_here(key, one, here, notes)).collect()),
        Value::Table(table) => {
            let of = |(name, value): (String, Value)| match name.as_str() {
                "file" | "dir" | "prompts" => (name, from_here(key, value, here, notes)),
                _ => (name, value),
            };
            Value::Table(table.into_iter().map(of).collect())
        }
        other => other,
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
    let value = if PATHS.contains(&path.trim()) { from_here(path.trim(), value, here, notes) } else { value };
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
