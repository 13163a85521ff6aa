//! From a TOML file and `key.path=value` overrides to a `Config`, with errors that say what was meant.

use super::Config;
use super::job::KINDS_TO_COME;
use crate::error::{Error, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Reads `path`, applies the overrides in order, checks every key, and makes paths absolute to the job file's folder.
pub fn load(path: &Path, overrides: &[String]) -> Result<Config> {
    // Opening a FIFO would block until a writer opens it.
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return Err(Error::usage(format!("job file {} is no regular file", path.display())));
    }
    let text = std::fs::read_to_string(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::usage(format!("job file {} does not exist", path.display()))
            .hint("give the path of a TOML job, e.g. `rlhf-hpc ppo.toml`; `rlhf-hpc --help` lists the verbs"),
        _ => Error::io("read", path, &e),
    })?;
    let mut config = parse(&text, overrides).map_err(|e| e.within(path.display()))?;
    let base =
        path.parent().filter(|p| !p.as_os_str().is_empty()).map_or_else(|| PathBuf::from("."), Path::to_path_buf);
    config.resolve_paths(&base);
    Ok(config)
}

/// `load` without a file: paths stay as they are.
pub fn parse(text: &str, overrides: &[String]) -> Result<Config> {
    let mut table: Table = text.parse().map_err(|e: toml::de::Error| Error::usage(one_line(&e, text)))?;
    refuse_kinds_to_come(&table)?;
    // The file is parsed alone first: its errors can name a line.
    let mut config: Config = toml::from_str(text).map_err(|e| explain(&e, text))?;
    for item in overrides {
        apply(&mut table, item)?;
        refuse_kinds_to_come(&table)?;
        // One at a time, so that an error names the override that brought it.
        config = Config::deserialize(Value::Table(table.clone()))
            .map_err(|e| explain(&e, "").within(format!("override `{item}`")))?;
    }
    for key in ["job.kind", "model.actor", "data.prompts"] {
        if lookup(&table, key).is_none() {
            return Err(Error::usage(format!("{key} is missing"))
                .hint("job.kind, model.actor and data.prompts have no default; jobs/reference.toml has every key"));
        }
    }
    config.settle();
    Ok(config)
}

fn lookup<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    let (first, rest) = path.split_once('.').map_or((path, None), |(a, b)| (a, Some(b)));
    let value = table.get(first)?;
    rest.map_or(Some(value), |rest| lookup(value.as_table()?, rest))
}

fn refuse_kinds_to_come(table: &Table) -> Result<()> {
    let kind = lookup(table, "job.kind").and_then(Value::as_str).unwrap_or("");
    if KINDS_TO_COME.contains(&kind) {
        return Err(Error::usage(format!("job.kind = \"{kind}\" is not in this release"))
            .hint("this release runs \"sft\" and \"ppo\""));
    }
    Ok(())
}

/// Sets `a.b.c=value`; the value is TOML, or a plain string where it does not parse as TOML.
fn apply(table: &mut Table, item: &str) -> Result<()> {
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

fn one_line(e: &toml::de::Error, text: &str) -> String {
    let position = e.span().filter(|_| !text.is_empty()).map(|span| {
        let line = text[..span.start.min(text.len())].matches('\n').count();
        let source = text.lines().nth(line).unwrap_or("").trim();
        format!("line {}: `{source}`: ", line + 1)
    });
    format!("{}{}", position.unwrap_or_default(), e.message().replace('\n', " "))
}

/// Rewrites serde's "unknown field `x`, expected one of ..." as an unknown key with the nearest known one.
fn explain(e: &toml::de::Error, text: &str) -> Error {
    let message = one_line(e, text);
    let unknown = message.find("unknown field").or_else(|| message.find("unknown variant"));
    let Some(at) = unknown else { return Error::usage(message) };
    let names: Vec<&str> = message[at..].split('`').skip(1).step_by(2).collect();
    let Some((wrong, known)) = names.split_first() else { return Error::usage(message) };
    let what = if message[at..].starts_with("unknown field") { "unknown key" } else { "unknown value" };
    let error = Error::usage(format!("{}{what} `{wrong}`", &message[..at]));
    match nearest(wrong, known) {
        Some(near) => error.hint(format!("did you mean `{near}`?")),
        None => error.hint(format!("known here: {}", known.join(", "))),
    }
}

/// The known name within edit distance 1 + a third of its length, if any.
pub fn nearest<'a>(wrong: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|name| (edit_distance(wrong, name), *name))
        .min()
        .filter(|(distance, name)| *distance <= 1 + name.len() / 3)
        .map(|(_, name)| name)
}

/// Levenshtein distance by one row of the dynamic programme.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
