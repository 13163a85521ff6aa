//! Filters and tests of Jinja 2 that the engine lacks or defines in another way.

use std::cmp::Ordering;

use minijinja::value::{Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State};
use regex::Regex;

use super::generators::is_generator;
use super::methods::{call, iterable, replaced};
use super::python::{bind, error, integer, lines, order, pairs, str, text_or_none, type_name};

/// The arguments of a filter after its value.
type More = Rest<ValueOrKwargs>;

pub fn add_to(environment: &mut Environment) {
    for name in ["length", "count"] {
        environment.add_filter(name, length);
    }
    for name in ["default", "d"] {
        environment.add_filter(name, default);
    }
    for name in ["escape", "e"] {
        environment.add_filter(name, escape);
    }
    environment.add_filter("list", |value: &Value| Ok::<_, Error>(iterable(value)?.try_iter()?.collect::<Value>()));
    environment
        .add_filter("string", |value: &Value| if value.is_safe() { value.clone() } else { Value::from(str(value)) });
    environment.add_filter("join", join);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("replace", replace);
    environment.add_filter("sort", sort);
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("indent", indent);
    environment.add_filter("truncate", truncate);
    environment.add_filter("center", |state: &mut State, value: &Value, width: Option<Value>| {
        call(state, &Value::from(str(value)), "center", &[width.unwrap_or_else(|| Value::from(80))])
    });
    environment.add_filter("wordcount", |value: &Value| {
        Regex::new(r"\w+").map_or(0, |word| word.find_iter(&str(value)).count())
    });
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
        ) && !is_generator(value)
    });
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("callable", |value: &Value| {
        value.kind() == ValueKind::Plain || value.as_object().is_some() && value.to_string().starts_with("<macro ")
    });
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| error(format!("{} has no length", type_name(value))))
}

fn default(value: &Value, more: More) -> Result<Value, Error> {
    let [other, or_false] = bind(&more.into_values(), ["default_value", "boolean"])?;
    let is_used = value.is_undefined() || (or_false.is_some_and(|flag| flag.is_true()) && !value.is_true());
    Ok(if is_used { other.unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

pub fn escape(value: &Value) -> Value {
    if value.is_safe() {
        return value.clone();
    }
    let mut text = str(value).replace('&', "&amp;");
    for (c, name) in [('<', "&lt;"), ('>', "&gt;"), ('\'', "&#39;"), ('"', "&#34;")] {
        text = text.replace(c, name);
    }
    Value::from_safe_string(text)
}

fn join(value: &Value, more: More) -> Result<String, Error> {
    let [between, attribute] = bind(&more.into_values(), ["d", "attribute"])?;
    let attribute = attribute.filter(|path| !path.is_none());
    let items = iterable(value)?.try_iter()?.map(|item| match &attribute {
        Some(path) => at_path(&item, &str(path)),
        None => Ok(item),
    });
    let texts: Result<Vec<String>, Error> = items.map(|item| item.map(|item| str(&item))).collect();
    Ok(texts?.join(&between.map_or_else(String::new, |between| str(&between))))
}

/// The value at a path such as `function.name`.
fn at_path(value: &Value, path: &str) -> Result<Value, Error> {
    path.split('.').try_fold(value.clone(), |value, part| match part.parse::<i64>() {
        Ok(index) => value.get_item(&Value::from(index)),
        Err(_) => value.get_item(&Value::from(part)),
    })
}

fn int(value: &Value, more: More) -> Result<Value, Error> {
    let [other, base] = bind(&more.into_values(), ["default", "base"])?;
    let base = integer(base.as_ref())?.unwrap_or(10) as u32;
    let number = match (value.kind(), value.as_str()) {
        (ValueKind::Undefined, _) => return Err(error("an undefined value cannot be a number")),
        (_, Some(text)) => parsed(text, base).map(Value::from).or_else(|| whole(parsed_float(text)?)),
        (ValueKind::Bool, _) => Some(Value::from(i64::from(value.is_true()))),
        (ValueKind::Number, _) if value.is_integer() => Some(value.clone()),
        _ => f64::try_from(value.clone()).ok().and_then(whole),
    };
    Ok(number.or(other).unwrap_or_else(|| Value::from(0)))
}

fn whole(number: f64) -> Option<Value> {
    number.is_finite().then(|| Value::from(number.trunc() as i128))
}

/// `int(text, base)`.
fn parsed(text: &str, base: u32) -> Option<i128> {
    let text = text.trim();
    let (sign, digits) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefixes = [(16, "0x"), (8, "0o"), (2, "0b")];
    let lower = digits.to_lowercase();
    let found = prefixes.iter().find(|(of, prefix)| (base == *of || base == 0) && lower.starts_with(prefix));
    let (base, digits) = found.map_or((if base == 0 { 10 } else { base }, digits), |(of, _)| (*of, &digits[2..]));
    (2..=36).contains(&base).then_some(())?;
    i128::from_str_radix(&without_underscores(digits)?, base).ok().map(|number| sign * number)
}

fn without_underscores(digits: &str) -> Option<String> {
    let is_valid = !digits.starts_with(['_', '+', '-']) && !digits.ends_with('_') && !digits.contains("__");
    is_valid.then(|| digits.replace('_', ""))
}

/// `float(text)`.
fn parsed_float(text: &str) -> Option<f64> {
    let text = text.trim();
    let (sign, digits) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    without_underscores(digits)?.parse::<f64>().ok().map(|number| sign * number)
}

fn float(value: &Value, more: More) -> Result<Value, Error> {
    let [other] = bind(&more.into_values(), ["default"])?;
    let number = match (value.kind(), value.as_str()) {
        (ValueKind::Undefined, _) => return Err(error("an undefined value cannot be a number")),
        (_, Some(text)) => parsed_float(text),
        (ValueKind::Bool, _) => Some(f64::from(value.is_true())),
        _ => f64::try_from(value.clone()).ok(),
    };
    Ok(number.map(Value::from).or(other).unwrap_or_else(|| Value::from(0.0)))
}

fn replace(value: &Value, more: More) -> Result<String, Error> {
    let [old, new, count] = bind(&more.into_values(), ["old", "new", "count"])?;
    let [old, new] = [old, new].map(|part| part.map(|part| Value::from(str(&part))));
    replaced(&str(value), [old.as_ref(), new.as_ref()], count.as_ref())
}

fn sort(value: &Value, more: More) -> Result<Value, Error> {
    let [reverse, case_sensitive, attribute] = bind(&more.into_values(), ["reverse", "case_sensitive", "attribute"])?;
    let paths = attribute.filter(|path| !path.is_none()).map(|path| str(&path));
    let mut items = Vec::new();
    for item in iterable(value)?.try_iter()? {
        let key: Vec<Value> = match &paths {
            Some(paths) => paths.split(',').map(|path| at_path(&item, path)).collect::<Result<_, _>>()?,
            None => vec![item.clone()],
        };
        items.push((Value::from(key.iter().map(|key| folded(key, case_sensitive.as_ref())).collect::<Vec<_>>()), item));
    }
    sorted(items, reverse.is_some_and(|flag| flag.is_true()))
}

/// A text in lower case, unless the case counts.
fn folded(key: &Value, case_sensitive: Option<&Value>) -> Value {
    match key.as_str() {
        Some(text) if !case_sensitive.is_some_and(Value::is_true) => Value::from(text.to_lowercase()),
        _ => key.clone(),
    }
}

/// The second values, by the order of the first ones.
fn sorted(mut items: Vec<(Value, Value)>, is_reversed: bool) -> Result<Value, Error> {
    let mut failed = Ok(());
    items.sort_by(|(a, _), (b, _)| {
        let ordering = if is_reversed { order(b, a) } else { order(a, b) };
        ordering.unwrap_or_else(|e| {
            failed = Err(e);
            Ordering::Equal
        })
    });
    failed.map(|()| items.into_iter().map(|(_, item)| item).collect())
}

fn dictsort(value: &Value, more: More) -> Result<Value, Error> {
    let [case_sensitive, by, reverse] = bind(&more.into_values(), ["case_sensitive", "by", "reverse"])?;
    if value.kind() != ValueKind::Map {
        return Err(error(format!("dictsort needs a dict (got {})", type_name(value))));
    }
    let by_value = match by.as_ref().map(str).as_deref() {
        None | Some("key") => false,
        Some("value") => true,
        Some(other) => return Err(error(format!("by must be key or value (got {other})"))),
    };
    let keyed = |(key, item): (Value, Value)| {
        let of = folded(if by_value { &item } else { &key }, case_sensitive.as_ref());
        (of, Value::from(Tuple::from([key, item])))
    };
    sorted(pairs(value).into_iter().map(keyed).collect(), reverse.is_some_and(|flag| flag.is_true()))
}

fn indent(value: &Value, more: More) -> Result<String, Error> {
    let [width, first, blank] = bind(&more.into_values(), ["width", "first", "blank"])?;
    let indention = match width.as_ref().map(|width| (width.as_str(), width)) {
        None => " ".repeat(4),
        Some((Some(text), _)) => text.to_owned(),
        Some((None, width)) => " ".repeat(usize::try_from(width.clone())?),
    };
    let [first, blank] = [first, blank].map(|flag| flag.is_some_and(|flag| flag.is_true()));
    let text = str(value) + "\n";
    let indented = |(i, (line, _)): (usize, (&str, &str))| {
        let is_indented = if i == 0 { first } else { blank || !line.is_empty() };
        format!("{}{line}", if is_indented { &indention } else { "" })
    };
    Ok(lines(&text).into_iter().enumerate().map(indented).collect::<Vec<_>>().join("\n"))
}

fn truncate(value: &Value, more: More) -> Result<String, Error> {
    let [length, cut_words, end, leeway] = bind(&more.into_values(), ["length", "killwords", "end", "leeway"])?;
    let text = str(value);
    let length = integer(length.as_ref())?.unwrap_or(255).max(0) as usize;
    let leeway = integer(leeway.as_ref())?.unwrap_or(5).max(0) as usize;
    let end = text_or_none(end.as_ref())?.unwrap_or("...");
    if text.chars().count() <= length + leeway {
        return Ok(text);
    }
    let cut: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let is_cut = cut_words.is_some_and(|flag| flag.is_true());
    let kept = if is_cut { &cut[..] } else { cut.rsplit_once(' ').map_or(&cut[..], |(kept, _)| kept) };
    Ok(format!("{kept}{end}"))
}
