//! `json.dumps` of Python, which `transformers` provides to chat templates as `tojson`: no HTML escapes, separators `",
//! "` and `": "`, non-ASCII kept.

use std::io::{self, Write};

use minijinja::Error;
use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use serde::ser::{self, Serialize, SerializeMap, Serializer};
use serde_json::ser::Formatter;

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
    let style = Style { indent, item, key, ascii, depth: 0, is_empty: false };
    let mut text = Vec::new();
    let mut writer = serde_json::Serializer::with_formatter(&mut text, style);
    Json { value, sort }.serialize(&mut writer).map_err(|e| error(format!("tojson: {e}")))?;
    Ok(Value::from_safe_string(String::from_utf8(text).expect("JSON is text")))
}

/// How lists and dicts are written.
struct Style {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    depth: usize,
    is_empty: bool,
}

impl Style {
    fn begin<W: Write + ?Sized>(&mut self, out: &mut W, mark: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        if self.depth > DEPTH_MAX {
            return Err(io::Error::other(format!("at most {DEPTH_MAX} levels")));
        }
        out.write_all(mark)
    }

    fn end<W: Write + ?Sized>(&mut self, out: &mut W, mark: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.line(out)?;
        }
        self.is_empty = false;
        out.write_all(mark)
    }

    fn item<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.is_empty = false;
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.line(out)
    }

    fn line<W: Write + ?Sized>(&self, out: &mut W) -> io::Result<()> {
        self.indent.as_ref().map_or(Ok(()), |indent| write!(out, "\n{}", indent.repeat(self.depth)))
    }
}

impl Formatter for Style {
    fn begin_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }

    fn begin_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }

    fn write_string_fragment<W: Write + ?Sized>(&mut self, out: &mut W, fragment: &str) -> io::Result<()> {
        if !self.ascii {
            return out.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            if (' '..='~').contains(&c) {
                write!(out, "{c}")?;
            } else {
                c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))?;
            }
        }
        Ok(())
    }

    /// Writes the text of a scalar as it is. `serde_json` itself writes NaN as null, and no other value here is bytes.
    fn write_byte_array<W: Write + ?Sized>(&mut self, out: &mut W, text: &[u8]) -> io::Result<()> {
        out.write_all(text)
    }
}

struct Json<'a> {
    value: &'a Value,
    /// Whether dicts are sorted by key.
    sort: bool,
}

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self { value, sort } = *self;
        match value.kind() {
            ValueKind::String => to.serialize_str(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable if !is_generator(value) => {
                let items: Vec<Value> = value.try_iter().map_err(|e| failed(&e))?.collect();
                to.collect_seq(items.iter().map(|value| Json { value, sort }))
            }
            ValueKind::Map => {
                let mut fields = pairs(value);
                if sort {
                    sort_by_key(&mut fields).map_err(|e| failed(&e))?;
                }
                let mut map = to.serialize_map(None)?;
                for (name, value) in &fields {
                    let text = name.as_str().map_or_else(|| scalar(name), |text| Ok(text.to_owned()));
                    map.serialize_entry(&text.map_err(|e| failed(&e))?, &Json { value, sort })?;
                }
                map.end()
            }
            _ => to.serialize_bytes(scalar(value).map_err(|e| failed(&e))?.as_bytes()),
        }
    }
}

fn failed<E: ser::Error>(error: &Error) -> E {
    E::custom(error.detail().unwrap_or_default())
}

fn sort_by_key(fields: &mut [(Value, Value)]) -> Result<(), Error> {
    let mut done = Ok(());
    fields.sort_by(|(a, _), (b, _)| {
        order(a, b).unwrap_or_else(|e| {
            done = Err(e);
            std::cmp::Ordering::Equal
        })
    });
    done
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
        _ => Err(error(format!("{} is no JSON value", type_name(value)))),
    }
}
