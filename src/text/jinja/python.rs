//! Values as Python prints, compares and slices them.

use std::cmp::Ordering;
use std::fmt::Write;

use minijinja::value::{DynObject, Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind};

/// Levels of nested lists that are printed.
const DEPTH_MAX: usize = 200;

pub fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// The name of a value's type, for messages.
pub fn type_name(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        kind => format!("a value of type {kind}"),
    }
}

/// `str(value)`.
pub fn str(value: &Value) -> String {
    if let Some(text) = value.as_str() {
        return text.to_owned();
    }
    if value.is_undefined() {
        return String::new();
    }
    repr(value)
}

/// `repr(value)`.
pub fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(value, DEPTH_MAX, &mut out);
    out
}

/// `repr` of a float: the shortest digits, and an exponent from 1e16 and below 1e-4.
pub fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "nan"
        } else if value > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    let text = format!("{value:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => format!("{digits}e{:+03}", exponent.parse::<i32>().unwrap_or(0)),
        None => text,
    }
}

fn write_repr(value: &Value, depth: usize, out: &mut String) {
    if depth == 0 {
        out.push_str("...");
        return;
    }
    let list = |out: &mut String, marks: [&str; 2]| {
        out.push_str(marks[0]);
        for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
            out.push_str(if i > 0 { ", " } else { "" });
            write_repr(&item, depth - 1, out);
        }
        out.push_str(marks[1]);
    };
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::String => write_quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => {
            out.push_str(&f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float));
        }
        ValueKind::Seq if value.is_tuple() => list(out, ["(", if value.len() == Some(1) { ",)" } else { ")" }]),
        ValueKind::Seq | ValueKind::Iterable => list(out, ["[", "]"]),
        ValueKind::Map => {
            out.push('{');
            for (i, (key, item)) in pairs(value).into_iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(&key, depth - 1, out);
                out.push_str(": ");
                write_repr(&item, depth - 1, out);
            }
            out.push('}');
        }
        _ => _ = write!(out, "{value}"),
    }
}

/// The keys and values of a dict.
pub fn pairs(dict: &Value) -> Vec<(Value, Value)> {
    dict.as_object().and_then(DynObject::try_iter_pairs).into_iter().flatten().collect()
}

fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        _ = match c {
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            '\\' => write!(out, "\\\\"),
            _ if c == quote => write!(out, "\\{c}"),
            _ if is_printable(c) => write!(out, "{c}"),
            '\0'..='\u{ff}' => write!(out, "\\x{:02x}", c as u32),
            '\0'..='\u{ffff}' => write!(out, "\\u{:04x}", c as u32),
            _ => write!(out, "\\U{:08x}", c as u32),
        };
    }
    out.push(quote);
}

pub fn is_printable(c: char) -> bool {
    // Rust escapes the same categories of characters. A combining character is not escaped after a letter.
    matches!(c, '\'' | '"' | '\\') || String::from_iter(['a', c]).escape_debug().count() == 2
}

pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// The order of two values. Values of different kinds have none.
pub fn order(a: &Value, b: &Value) -> Result<Ordering, Error> {
    let is_number = |v: &Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool);
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(a.cmp(b));
    }
    if is_number(a) && is_number(b) {
        return Ok(a.cmp(b));
    }
    if a.kind() == ValueKind::Seq && b.kind() == ValueKind::Seq && a.is_tuple() == b.is_tuple() {
        for (a, b) in a.try_iter()?.zip(b.try_iter()?) {
            if a != b {
                return order(&a, &b);
            }
        }
        return Ok(a.len().cmp(&b.len()));
    }
    Err(error(format!("{} and {} have no order", type_name(a), type_name(b))))
}

/// The bounds of `[start:stop]` in a sequence of `length` items.
pub fn bounds(length: usize, start: Option<i64>, stop: Option<i64>) -> (usize, usize) {
    let bound = |at: i64| if at < 0 { (length as i64).saturating_add(at).max(0) as usize } else { at as usize };
    (start.map_or(0, bound), stop.map_or(length, bound).min(length))
}

/// `value[start:stop:step]`.
pub fn slice(value: &Value, [start, stop, step]: [Option<i64>; 3]) -> Result<Value, Error> {
    let items: Vec<Value> = match value.kind() {
        ValueKind::String | ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.collect(),
        ValueKind::Undefined => return Ok(Value::UNDEFINED),
        _ => return Err(error(format!("{} has no slices", type_name(value)))),
    };
    let (length, step) = (items.len() as i64, step.unwrap_or(1));
    let bound =
        |at: i64, least: i64, most: i64| if at < 0 { (length.saturating_add(at)).max(least) } else { at.min(most) };
    let mut picked = Vec::new();
    if step == 0 {
        return Err(error("the step of a slice must not be 0"));
    }
    if step > 0 {
        let (mut at, stop) =
            (start.map_or(0, |at| bound(at, 0, length)), stop.map_or(length, |at| bound(at, 0, length)));
        while at < stop {
            picked.push(items[at as usize].clone());
            at = at.saturating_add(step);
        }
    } else {
        let mut at = start.map_or(length - 1, |at| bound(at, -1, length - 1));
        let stop = stop.map_or(-1, |at| bound(at, -1, length - 1));
        while at > stop {
            picked.push(items[at as usize].clone());
            at = at.saturating_add(step);
        }
    }
    Ok(match value.kind() {
        ValueKind::String => Value::from(picked.iter().filter_map(Value::as_str).collect::<String>()),
        _ if value.is_tuple() => Value::from(Tuple::from(picked)),
        _ => Value::from(picked),
    })
}

/// The arguments of a call by their names, as Python binds them.
pub fn bind<const N: usize>(arguments: &[Value], names: [&str; N]) -> Result<[Option<Value>; N], Error> {
    let (given, named): (&[Value], Kwargs) = from_args(arguments)?;
    if given.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut bound = std::array::from_fn(|i| given.get(i).cloned());
    for (name, value) in names.iter().zip(&mut bound) {
        if named.has(name) {
            if value.is_some() {
                return Err(Error::from(ErrorKind::TooManyArguments));
            }
            *value = Some(named.get(name)?);
        }
    }
    named.assert_all_used()?;
    Ok(bound)
}

/// An argument that must be an integer. None counts as absent.
pub fn integer(value: Option<&Value>) -> Result<Option<i64>, Error> {
    value.filter(|value| !value.is_none()).map(|value| value.clone().try_into()).transpose()
}

/// An argument that must be a text.
pub fn text(value: Option<&Value>) -> Result<&str, Error> {
    let value = value.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    value.as_str().ok_or_else(|| error(format!("the argument must be a string (got {})", type_name(value))))
}

/// A text that is None or absent by default.
pub fn text_or_none(value: Option<&Value>) -> Result<Option<&str>, Error> {
    value.filter(|value| !value.is_none()).map(|value| text(Some(value))).transpose()
}

/// `text.splitlines()`: each line with its end.
pub fn lines(text: &str) -> Vec<(&str, &str)> {
    let is_end =
        |c: char| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut rest, mut found) = (text, Vec::new());
    while let Some(at) = rest.find(is_end) {
        let length =
            if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        found.push((&rest[..at], &rest[at..at + length]));
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        found.push((rest, ""));
    }
    found
}
