//! Options in YAML files, and the overrides of Hydra.

use super::given::Given;
use super::table::System;
use crate::error::{Error, Result};
use crate::sys::files;
use serde_json::{Map, Value};
use std::path::Path;

/// The options of a YAML file: flat for TRL and OpenRLHF, and paths of nested tables for verl.
///
/// # Errors
/// `Usage`, with the line of a mistake.
pub fn read(path: &Path, system: System) -> Result<Vec<Given>> {
    let text = files::read_to_string(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::usage(format!("{} does not exist", path.display())),
        _ => Error::io("read", path, &e),
    })?;
    flat(&parse(&text).map_err(|e| e.within(path.display()))?, system).map_err(|e| e.within(path.display()))
}

/// Parses YAML with a mapping at its top.
pub fn parse(text: &str) -> Result<Map<String, Value>> {
    let wrong = |e: serde_saphyr::Error| {
        let message = e.without_snippet().to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        let place = e.location().map_or_else(String::new, |at| format!("line {}: ", at.line()));
        // The message repeats the place at its end.
        Error::usage(format!("{place}{}", message.split(" at line ").next().unwrap_or_default()))
    };
    match serde_saphyr::from_str::<Value>(text).map_err(wrong)? {
        Value::Object(all) => Ok(all),
        Value::Null => Ok(Map::new()),
        other => Err(Error::usage(format!("the file must hold a mapping of options (got {other})"))),
    }
}

/// The options of a parsed file.
pub fn flat(all: &Map<String, Value>, system: System) -> Result<Vec<Given>> {
    let mut given = Vec::new();
    for (key, value) in
        all.iter().filter(|(key, _)| system != System::Verl || !["defaults", "hydra"].contains(&key.as_str()))
    {
        below(key, value, system, &mut given)?;
    }
    Ok(given)
}

fn below(path: &str, value: &Value, system: System, given: &mut Vec<Given>) -> Result<()> {
    match value {
        Value::Object(inner) if system == System::Verl && !inner.is_empty() && !is_free(path) => {
            inner.iter().try_for_each(|(key, value)| below(&format!("{path}.{key}"), value, system, given))
        }
        value => {
            given.push(Given { name: path.to_owned(), values: texts(value) });
            Ok(())
        }
    }
}

/// Whether the table at `path` has keys of any name.
fn is_free(path: &str) -> bool {
    path.ends_with("_kwargs") && !path.ends_with("val_kwargs") && path != "ray_kwargs"
        || path.ends_with("override_config")
}

/// The texts of a value, as a command line would have them.
fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::String(text) => vec![text.clone()],
        Value::Array(all) => all.iter().flat_map(texts).collect(),
        other => vec![other.to_string()],
    }
}

/// The overrides of Hydra among the words of a command line: `a.b=1`, `+a.b=1`, `++a.b=1`, `~a.b`.
///
/// # Errors
/// `Usage`, if a word is neither an override nor an option of Hydra.
pub fn overrides(words: &[&str]) -> Result<Vec<Given>> {
    let mut given: Vec<Given> = Vec::new();
    let mut skips_value = false;
    for word in words {
        if std::mem::take(&mut skips_value) && !word.contains('=') {
            continue;
        }
        if word.starts_with('-') {
            skips_value = !word.contains('=');
            if word.starts_with("--config") || word.starts_with("-c") {
                let (name, value) = word.split_once('=').unwrap_or((word, ""));
                given.push(Given { name: name.trim_start_matches('-').to_owned(), values: vec![value.to_owned()] });
            }
            continue;
        }
        if let Some(removed) = word.strip_prefix('~') {
            given.push(Given { name: removed.to_owned(), values: vec!["null".to_owned()] });
            continue;
        }
        let Some((path, value)) = word.split_once('=') else {
            return Err(Error::usage(format!("`{word}` is not an override of Hydra"))
                .hint("write key.path=value; a text with spaces needs quotes"));
        };
        let name = path.trim_start_matches('+').to_owned();
        given.retain(|one| one.name != name);
        given.push(Given { values: values(value)?, name });
    }
    Ok(given)
}

/// The texts of a value in Hydra's grammar: a word, a quoted text, a list or a mapping.
fn values(text: &str) -> Result<Vec<String>> {
    let text = text.trim();
    let unquoted = |text: &str| {
        let text = text.trim();
        let inner = ['"', '\''].into_iter().find_map(|q| text.strip_prefix(q)?.strip_suffix(q));
        inner.unwrap_or(text).to_owned()
    };
    if text.starts_with('{') {
        let value = serde_saphyr::from_str::<Value>(&text.replace(':', ": "));
        let value = value.map_err(|_| Error::usage(format!("the value {text} is not a mapping")))?;
        return Ok(vec![value.to_string()]);
    }
    let Some(inside) = text.strip_prefix('[') else { return Ok(vec![unquoted(text)]) };
    let inside = inside.strip_suffix(']').ok_or_else(|| Error::usage(format!("the list {text} is not closed")))?;
    let (mut parts, mut quote, mut part) = (Vec::new(), None, String::new());
    for c in inside.chars() {
        match (quote, c) {
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            (None, ',') => {
                parts.push(std::mem::take(&mut part));
                continue;
            }
            _ => {}
        }
        part.push(c);
    }
    if quote.is_some() {
        return Err(Error::usage(format!("a quote in {text} is not closed")));
    }
    parts.push(part);
    Ok(parts.iter().map(|part| unquoted(part)).filter(|part| !part.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_hydra_are_words_texts_lists_and_mappings() {
        assert_eq!(values("['a b',\"c,d\", e]").unwrap(), ["a b", "c,d", "e"]);
        assert_eq!(values("'x=y'").unwrap(), ["x=y"]);
        assert_eq!(values("{enable_thinking:false}").unwrap(), ["{\"enable_thinking\":false}"]);
        assert!(values("[a").is_err());
    }

    #[test]
    fn a_mistake_in_yaml_is_named_with_its_line() {
        let error = parse("a: 1\nb: [1, 2\nc: 3\n").unwrap_err();
        assert!(error.message.starts_with("line "), "{error:?}");
        assert!(parse("- a\n- b\n").unwrap_err().message.contains("mapping"));
    }
}
