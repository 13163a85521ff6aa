//! `json.dumps` of Python, which `transformers` provides to chat templates as `tojson`: no HTML escapes, separators `",
//! "` and `": "`, non-ASCII kept.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value as Jinja};
use minijinja::{Error, ErrorKind};
use serde_json::Value;

/// `value | tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
#[allow(clippy::needless_pass_by_value, reason = "the signature that a filter has")]
pub(super) fn tojson(value: &Jinja, options: Kwargs) -> Result<Jinja, Error> {
    let refused = |e: serde_json::Error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}"));
    let value = serde_json::to_value(value).map_err(refused)?;
    let indent: Option<Jinja> = options.get("indent")?;
    let indent = match indent {
        Some(width) if !width.is_none() => Some(match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(width)?.min(64)),
        }),
        _ => None,
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let [item, key] = match separators.as_deref() {
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings")),
        None => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
    };
    let style = Style {
        indent,
        item,
        key,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut text = String::new();
    style.write(&value, 0, &mut text);
    Ok(Jinja::from_safe_string(text))
}

struct Style {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) {
        match value {
            Value::String(text) => self.string(text, out),
            Value::Array(items) if !items.is_empty() => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.between(i, depth + 1, out);
                    self.write(item, depth + 1, out);
                }
                self.line(depth, out);
                out.push(']');
            }
            Value::Object(fields) if !fields.is_empty() => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.sort {
                    fields.sort_by_key(|(name, _)| *name);
                }
                out.push('{');
                for (i, (name, field)) in fields.into_iter().enumerate() {
                    self.between(i, depth + 1, out);
                    self.string(name, out);
                    out.push_str(&self.key);
                    self.write(field, depth + 1, out);
                }
                self.line(depth, out);
                out.push('}');
            }
            other => out.push_str(&other.to_string()),
        }
    }

    fn between(&self, i: usize, depth: usize, out: &mut String) {
        if i > 0 {
            out.push_str(&self.item);
        }
        self.line(depth, out);
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
        for c in Value::from(text).to_string().chars() {
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

/// The kind of a value, for messages.
pub fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
