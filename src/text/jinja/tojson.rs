//! `json.dumps` of Python, which `transformers` provides to chat templates as `tojson`: no HTML escapes, separators `",
//! "` and `": "`, non-ASCII kept.

use std::fmt::Write;

use minijinja::Error;
use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};

use super::generators::is_generator;
use super::python::{bind, error, float, order, pairs, type_name};

/// Levels of nested lists and dicts.
const DEPTH_MAX: usize = 200;

/// `value | tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
pub fn tojson(value: &Value, more: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort] = bind(&more.into_values(), names)?.map(|v| v.filter(|v| !v.is_none()));
    let indent = match indent {
        Some(width) => Some(match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(i64::try_from(width)?.max(0) as usize),
        }),
        None => None,
    };
    let separators =
        separators.map(|pair| pair.try_iter().map(|pair| pair.map(|part| part.to_string()).collect::<Vec<_>>()));
    let [item, key] = match separators.transpose()?.as_deref() {
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(error("tojson: separators must be two strings")),
        None => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
    };
    let [ascii, sort] = [ascii, sort].map(|flag| flag.is_some_and(|flag| flag.is_true()));
    let style = Style { indent, item, key, ascii, sort };
    let mut text = String::new();
    style.write(value, 0, &mut text)?;
    Ok(Value::from_safe_string(text))
}

struct Style {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(error(format!("tojson: at most {DEPTH_MAX} levels")));
        }
        match value.kind() {
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable if !is_generator(value) => {
                let items = value.try_iter()?.map(|item| (None, item));
                self.group(['[', ']'], items, depth, out)?;
            }
            ValueKind::Map => {
                let mut fields = pairs(value);
                if self.sort {
                    let mut failed = Ok(());
                    fields.sort_by(|(a, _), (b, _)| {
                        order(a, b).unwrap_or_else(|e| {
                            failed = Err(e);
                            std::cmp::Ordering::Equal
                        })
                    });
                    failed?;
                }
                self.group(['{', '}'], fields.into_iter().map(|(name, item)| (Some(name), item)), depth, out)?;
            }
            _ => out.push_str(&scalar(value)?),
        }
        Ok(())
    }

    fn group(
        &self,
        marks: [char; 2],
        items: impl Iterator<Item = (Option<Value>, Value)>,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        out.push(marks[0]);
        let mut is_empty = true;
        for (name, item) in items {
            if !is_empty {
                out.push_str(&self.item);
            }
            is_empty = false;
            self.line(depth + 1, out);
            if let Some(name) = name {
                let text = name.as_str().map_or_else(|| scalar(&name), |text| Ok(text.to_owned()))?;
                self.string(&text, out);
                out.push_str(&self.key);
            }
            self.write(&item, depth + 1, out)?;
        }
        if !is_empty {
            self.line(depth, out);
        }
        out.push(marks[1]);
        Ok(())
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        // Escapes as in Python: short ones, and `\u001f` in lower case.
        for c in serde_json::Value::from(text).to_string().chars() {
            if self.ascii && !(' '..='~').contains(&c) {
                let mut units = [0u16; 2];
                for unit in c.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            } else {
                out.push(c);
            }
        }
    }
}

/// A value that is neither a text nor a list nor a dict.
fn scalar(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(value.is_true().to_string()),
        ValueKind::Number if value.is_integer() => Ok(value.to_string()),
        ValueKind::Number => Ok(match f64::try_from(value.clone())? {
            number if number.is_nan() => "NaN".to_owned(),
            number if number.is_infinite() => if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
            number => float(number),
        }),
        _ => Err(error(format!("tojson: {} is no JSON value", type_name(value)))),
    }
}
