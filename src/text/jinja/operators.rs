//! Operators of Python. `source` writes them as filters.

use std::cmp::Ordering;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{Environment, Error};
use regex::Regex;

use super::generators::is_generator;
use super::methods::{Bound, OF_DICTS, iterable};
use super::python::{error, integer, order, repr, slice, str, type_name};

pub fn add_to(environment: &mut Environment) {
    environment.add_filter("_cat", |left: &Value, more: Rest<Value>| {
        more.iter().fold(str(left), |text, value| text + &str(value))
    });
    environment.add_filter("_mod", remainder);
    environment.add_filter("_lt", |a: &Value, b: &Value| order(a, b).map(Ordering::is_lt));
    environment.add_filter("_le", |a: &Value, b: &Value| order(a, b).map(Ordering::is_le));
    environment.add_filter("_gt", |a: &Value, b: &Value| order(a, b).map(Ordering::is_gt));
    environment.add_filter("_ge", |a: &Value, b: &Value| order(a, b).map(Ordering::is_ge));
    environment.add_filter("_in", |item: &Value, container: &Value| contains(container, item));
    environment.add_filter("_notin", |item: &Value, container: &Value| contains(container, item).map(|found| !found));
    environment.add_filter("_each", |value: &Value| {
        // A loop has the length of a generator.
        if is_generator(value) { Ok(value.try_iter()?.collect()) } else { iterable(value).cloned() }
    });
    environment.add_filter("_slice", |value: &Value, start: &Value, stop: &Value, step: Option<Value>| {
        slice(value, [integer(Some(start))?, integer(Some(stop))?, integer(step.as_ref())?])
    });
    environment.add_filter("_attr", |value: &Value, name: &str| {
        if value.kind() == ValueKind::Map
            && value.as_object().is_some_and(|o| !o.is::<Bound>())
            && OF_DICTS.contains(&name)
        {
            return Ok(Value::from_object(Bound { dict: value.clone(), method: name.to_owned() }));
        }
        value.get_attr(name)
    });
}

/// `left % right`: a remainder, or a text with values in it.
fn remainder(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        return printf(text, right).map(Value::from);
    }
    let is_number = |value: &&Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    let is_float = |value: &Value| value.kind() == ValueKind::Number && !value.is_integer();
    if ![left, right].iter().all(is_number) {
        return Err(error(format!("% needs two numbers (got {} and {})", type_name(left), type_name(right))));
    }
    if !is_float(left) && !is_float(right) {
        let (a, b) = (i128::try_from(left.clone())?, i128::try_from(right.clone())?);
        let rest = a.checked_rem(b).ok_or_else(|| error("modulo by zero"))?;
        return Ok(Value::from(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }));
    }
    let (a, b) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
    let rest = a % b;
    match b {
        0.0 => Err(error("modulo by zero")),
        _ if rest == 0.0 => Ok(Value::from(0.0_f64.copysign(b))),
        _ => Ok(Value::from(if (rest < 0.0) == (b < 0.0) { rest } else { rest + b })),
    }
}

/// A text with values at its conversions (`%s`, `%(name)5d`).
fn printf(text: &str, right: &Value) -> Result<String, Error> {
    let conversions = Regex::new(r"%(?:\((?<name>[^)]*)\))?(?<flags>[-+ #0]*\d*(?:\.\d+)?)(?<kind>.)");
    let conversions = conversions.map_err(|e| error(e.to_string()))?;
    let mut values = if right.is_tuple() { right.try_iter()?.collect() } else { vec![right.clone()] }.into_iter();
    let (mut out, mut at, mut is_named) = (String::new(), 0, right.kind() == ValueKind::Map);
    for found in conversions.captures_iter(text) {
        let (whole, kind) = (found.get_match(), &found["kind"]);
        out.push_str(&text[at..whole.start()]);
        at = whole.end();
        if kind == "%" {
            out.push('%');
            continue;
        }
        let value = if let Some(name) = found.name("name") {
            right.get_item(&Value::from(name.as_str()))?
        } else {
            is_named = false;
            values.next().ok_or_else(|| error("not enough arguments for the format string"))?
        };
        let (kind, value) = match kind {
            "s" => ("s", Value::from(str(&value))),
            "r" => ("s", Value::from(repr(&value))),
            "d" | "i" | "u" if value.kind() == ValueKind::Number && !value.is_integer() => {
                ("d", Value::from(f64::try_from(value)?.trunc() as i128))
            }
            kind => (kind, value),
        };
        out.push_str(&format(FormatStyle::Printf, &format!("%{}{kind}", &found["flags"]), &[value])?);
    }
    if values.next().is_some() && !is_named {
        return Err(error("not all arguments were converted by the format string"));
    }
    Ok(out + &text[at..])
}

fn contains(container: &Value, item: &Value) -> Result<bool, Error> {
    match container.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::String => match (container.as_str(), item.as_str()) {
            (Some(text), Some(part)) => Ok(text.contains(part)),
            _ => Err(error(format!("`in` a string needs a string (got {})", type_name(item)))),
        },
        ValueKind::Map => Ok(container.as_object().is_some_and(|map| map.get_value(item).is_some())),
        _ => Ok(iterable(container)?.try_iter()?.any(|one| one == *item)),
    }
}
