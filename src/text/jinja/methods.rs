//! Methods of Python's strings, lists and dicts. Methods that change a list or a dict do not exist: the sandbox of
//! `transformers` rejects them.

use std::sync::Arc;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use regex::Regex;

use super::python::{bind, bounds, error, integer, is_printable, is_space, lines, pairs, str, text, text_or_none};

/// Methods of dicts.
pub const OF_DICTS: [&str; 10] =
    ["clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// Calls a method of Python that the engine does not have.
pub fn call(_: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => of_string(text, method, arguments),
        (ValueKind::Seq, _) => of_list(value, method, arguments),
        (ValueKind::Map, _) => of_dict(value, method, arguments),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// A method of a dict that is not called yet.
#[derive(Debug)]
pub struct Bound {
    pub dict: Value,
    pub method: String,
}

impl Object for Bound {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::NonEnumerable
    }

    fn call(self: &Arc<Self>, state: &mut State, arguments: &[Value]) -> Result<Value, Error> {
        self.dict.call_method(state, &self.method, arguments)
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "<built-in method {} of dict object>", self.method)
    }
}

fn of_dict(dict: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "get" => {
            let [key, default] = bind(arguments, ["key", "default"])?;
            let key = key.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let found = dict.as_object().and_then(|dict| dict.get_value(&key));
            return Ok(found.or(default).unwrap_or(Value::from(())));
        }
        "keys" | "values" | "items" | "copy" => {}
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    }
    let [] = bind(arguments, [])?;
    let pairs = pairs(dict).into_iter();
    Ok(match method {
        "keys" => pairs.map(|(key, _)| key).collect(),
        "values" => pairs.map(|(_, value)| value).collect(),
        "items" => pairs.map(|(key, value)| Value::from(Tuple::from([key, value]))).collect(),
        _ => Value::from_pairs(pairs),
    })
}

fn of_list(list: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let mut items = list.try_iter()?;
    match method {
        "copy" => Ok(items.collect()),
        "count" | "index" => {
            let [wanted] = bind(arguments, ["value"])?;
            let wanted = wanted.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            if method == "count" {
                return Ok(Value::from(items.filter(|item| *item == wanted).count()));
            }
            let at = items.position(|item| item == wanted);
            at.map(Value::from).ok_or_else(|| error("the value is not in the list"))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn of_string(s: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    if method.starts_with("is") {
        let [] = bind(arguments, [])?;
        return is(s, method).map(Value::from).ok_or_else(|| Error::from(ErrorKind::UnknownMethod));
    }
    match method {
        "upper" | "lower" | "casefold" | "capitalize" | "title" | "swapcase" => {
            let [] = bind(arguments, [])?;
            Ok(Value::from(cased(s, method)))
        }
        "strip" | "lstrip" | "rstrip" => stripped(s, method, arguments),
        "removeprefix" | "removesuffix" => {
            let [part] = bind(arguments, ["part"])?;
            let part = text(part.as_ref())?;
            let rest = if method == "removeprefix" { s.strip_prefix(part) } else { s.strip_suffix(part) };
            Ok(Value::from(rest.unwrap_or(s)))
        }
        "replace" => {
            let [old, new, count] = bind(arguments, ["old", "new", "count"])?;
            replaced(s, [old.as_ref(), new.as_ref()], count.as_ref()).map(Value::from)
        }
        "split" | "rsplit" => {
            let [separator, most] = bind(arguments, ["sep", "maxsplit"])?;
            let most = integer(most.as_ref())?.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            Ok(split(s, text_or_none(separator.as_ref())?, most, method == "rsplit")?.into_iter().collect())
        }
        "splitlines" => {
            let [keep] = bind(arguments, ["keepends"])?;
            let keep = keep.is_some_and(|keep| keep.is_true());
            Ok(lines(s)
                .into_iter()
                .map(|(line, end)| if keep { format!("{line}{end}") } else { line.to_owned() })
                .collect())
        }
        "partition" | "rpartition" => {
            let [separator] = bind(arguments, ["sep"])?;
            let separator = text(separator.as_ref())?;
            if separator.is_empty() {
                return Err(error("empty separator"));
            }
            let is_last = method == "rpartition";
            let found = if is_last { s.rsplit_once(separator) } else { s.split_once(separator) };
            Ok(Value::from(match found {
                Some((before, after)) => Tuple::from([before, separator, after].map(Value::from)),
                None => Tuple::from(if is_last { ["", "", s] } else { [s, "", ""] }.map(Value::from)),
            }))
        }
        "find" | "rfind" | "index" | "rindex" | "count" => found(s, method, arguments),
        "startswith" | "endswith" => begins_or_ends(s, method, arguments),
        "zfill" | "ljust" | "rjust" | "center" => padded(s, method, arguments),
        "expandtabs" => {
            let [size] = bind(arguments, ["tabsize"])?;
            let size = integer(size.as_ref())?.unwrap_or(8).max(0) as usize;
            Ok(Value::from(with_tabs_expanded(s, size)))
        }
        "join" => {
            let [items] = bind(arguments, ["iterable"])?;
            let items = items.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let items: Vec<Value> = iterable(&items)?.try_iter()?.collect();
            let texts: Result<Vec<&str>, Error> = items.iter().map(|item| text(Some(item))).collect();
            Ok(Value::from(texts?.join(s)))
        }
        "format" => format(FormatStyle::StrFormat, s, arguments).map(Value::from),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// The value, unless Python cannot iterate over it.
pub fn iterable(value: &Value) -> Result<&Value, Error> {
    if value.is_none() { Err(error("None is not iterable")) } else { Ok(value) }
}

fn is(s: &str, method: &str) -> Option<bool> {
    let all = |is: &dyn Fn(char) -> bool| !s.is_empty() && s.chars().all(is);
    let matches = |pattern: &str| Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(s));
    let has_cased = s.chars().any(is_cased);
    Some(match method {
        "isalnum" => all(&char::is_alphanumeric),
        "isalpha" => all(&|c| c.is_alphabetic()),
        "isascii" => s.is_ascii(),
        "isdecimal" => matches(r"^\p{Nd}+$"),
        "isdigit" => matches(r"^[\p{Nd}²³¹⁰⁴-⁹₀-₉①-⑨]+$"),
        "isnumeric" => all(&char::is_numeric),
        "isidentifier" => matches(r"^[\p{XID_Start}_]\p{XID_Continue}*$"),
        "islower" => has_cased && s.to_lowercase() == s,
        "isupper" => has_cased && s.to_uppercase() == s,
        "istitle" => has_cased && cased(s, "title") == s,
        "isprintable" => s.chars().all(is_printable),
        "isspace" => all(&is_space),
        _ => return None,
    })
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase()
}

fn cased(s: &str, method: &str) -> String {
    match method {
        "upper" => s.to_uppercase(),
        "lower" => s.to_lowercase(),
        "casefold" => s.to_lowercase().replace('ß', "ss").replace('ς', "σ"),
        "swapcase" => {
            let swapped =
                |c: char| if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() };
            s.chars().map(swapped).collect::<Vec<String>>().concat()
        }
        // A capital is the first letter of the text, or of each run of letters.
        _ => {
            let (mut out, mut is_inside) = (String::with_capacity(s.len()), false);
            for (i, c) in s.chars().enumerate() {
                if is_inside || (method == "capitalize" && i > 0) {
                    out.extend(c.to_lowercase());
                } else {
                    out.extend(c.to_uppercase());
                }
                is_inside = is_cased(c);
            }
            out
        }
    }
}

fn stripped(s: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [chars] = bind(arguments, ["chars"])?;
    let chars = text_or_none(chars.as_ref())?;
    let is_outside = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let s = if method == "rstrip" { s } else { s.trim_start_matches(is_outside) };
    Ok(Value::from(if method == "lstrip" { s } else { s.trim_end_matches(is_outside) }))
}

/// `s.replace(old, new, count)`.
pub fn replaced(s: &str, [old, new]: [Option<&Value>; 2], count: Option<&Value>) -> Result<String, Error> {
    let (old, new, count) = (text(old)?, text(new)?, integer(count)?.unwrap_or(-1));
    Ok(usize::try_from(count).map_or_else(|_| s.replace(old, new), |count| s.replacen(old, new, count)))
}

fn split<'a>(s: &'a str, separator: Option<&str>, most: usize, from_end: bool) -> Result<Vec<&'a str>, Error> {
    let most = most.saturating_add(1);
    Ok(match (separator, from_end) {
        (Some(""), _) => return Err(error("empty separator")),
        (Some(separator), false) => s.splitn(most, separator).collect(),
        (Some(separator), true) => {
            let mut parts: Vec<&str> = s.rsplitn(most, separator).collect();
            parts.reverse();
            parts
        }
        (None, false) => {
            let (mut rest, mut parts) = (s.trim_start_matches(is_space), Vec::new());
            while !rest.is_empty() {
                let end = if parts.len() + 1 == most { rest.len() } else { rest.find(is_space).unwrap_or(rest.len()) };
                parts.push(&rest[..end]);
                rest = rest[end..].trim_start_matches(is_space);
            }
            parts
        }
        (None, true) => {
            let (mut rest, mut parts) = (s.trim_end_matches(is_space), Vec::new());
            while !rest.is_empty() {
                let word = rest.rsplit(is_space).next().map_or(0, str::len);
                let start = if parts.len() + 1 == most { 0 } else { rest.len() - word };
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end_matches(is_space);
            }
            parts.reverse();
            parts
        }
    })
}

/// The part of `s` between two indices of characters, and the index of its first one.
fn window<'a>(s: &'a str, start: Option<&Value>, stop: Option<&Value>) -> Result<Option<(&'a str, usize)>, Error> {
    let length = s.chars().count();
    let (start, stop) = bounds(length, integer(start)?, integer(stop)?);
    if start > stop {
        return Ok(None);
    }
    let byte = |at: usize| s.char_indices().nth(at).map_or(s.len(), |(byte, _)| byte);
    Ok(Some((&s[byte(start)..byte(stop)], start)))
}

fn found(s: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [part, start, stop] = bind(arguments, ["sub", "start", "end"])?;
    let part = text(part.as_ref())?;
    let window = window(s, start.as_ref(), stop.as_ref())?;
    if method == "count" {
        return Ok(Value::from(window.map_or(0, |(s, _)| s.matches(part).count())));
    }
    let at = window.and_then(|(s, start)| {
        let at = if method.starts_with('r') { s.rfind(part) } else { s.find(part) };
        at.map(|at| (start + s[..at].chars().count()) as i64)
    });
    match at {
        None if method.ends_with("index") => Err(error("substring not found")),
        at => Ok(Value::from(at.unwrap_or(-1))),
    }
}

fn begins_or_ends(s: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [parts, start, stop] = bind(arguments, ["part", "start", "end"])?;
    let parts = parts.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    let parts: Vec<Value> = if parts.is_tuple() { parts.try_iter()?.collect() } else { vec![parts] };
    let Some((s, _)) = window(s, start.as_ref(), stop.as_ref())? else { return Ok(Value::from(false)) };
    for part in &parts {
        let part = text(Some(part))?;
        if if method == "startswith" { s.starts_with(part) } else { s.ends_with(part) } {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

fn padded(s: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [width, fill] = bind(arguments, ["width", "fillchar"])?;
    let width = integer(width.as_ref())?.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    let width = width.max(0) as usize;
    let missing = width.saturating_sub(s.chars().count());
    if method == "zfill" {
        let sign = usize::from(s.starts_with(['-', '+']));
        return Ok(Value::from(format!("{}{}{}", &s[..sign], "0".repeat(missing), &s[sign..])));
    }
    let fill = fill.map_or_else(|| " ".to_owned(), |fill| str(&fill));
    if fill.chars().count() != 1 {
        return Err(error("the fill character must be exactly one character long"));
    }
    let left = match method {
        "ljust" => 0,
        "rjust" => missing,
        _ => missing / 2 + (missing & width & 1),
    };
    Ok(Value::from(format!("{}{s}{}", fill.repeat(left), fill.repeat(missing - left))))
}

fn with_tabs_expanded(s: &str, size: usize) -> String {
    let (mut out, mut column) = (String::with_capacity(s.len()), 0);
    for c in s.chars() {
        if c == '\t' {
            let width = if size == 0 { 0 } else { size - column % size };
            out.push_str(&" ".repeat(width));
            column += width;
        } else {
            out.push(c);
            column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
        }
    }
    out
}
