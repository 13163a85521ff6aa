//! Conversion of a launch to a job: option by option as the table describes, then options that belong together.

use super::draft::{Draft, is_null, is_true};
use super::launch::Launch;
use super::paths;
use super::shared::{numbers, rounded};
use super::table::{Kind, Row, System};
use super::{openrlhf, trl, verl};
use crate::config;
use crate::error::{Error, Result};
use toml::{Table, Value};

/// What a value of an option becomes.
enum Made {
    Value(Value),
    Nothing,
    /// The value has no counterpart.
    Unknown,
}

/// The job of a launch.
///
/// # Errors
/// `Usage`, if the launch names no model or no rows, or an option has a value of a wrong type.
pub fn convert(launch: &Launch, rows: Option<usize>) -> Result<Draft<'_>> {
    let mut draft = Draft::new(launch, rows);
    let kind = draft.kind;
    draft.imply("job.kind", kind, &launch.dialect.to_string());
    let mut options: Vec<(&'static str, &'static Row)> = draft.known.iter().map(|(name, row)| (*name, *row)).collect();
    // Rows of the table are in order: a later one replaces an earlier one.
    options.sort_by_key(|(_, row)| std::ptr::from_ref(*row));
    for (name, row) in options {
        one(&mut draft, name, row)?;
    }
    match draft.system() {
        System::OpenRlhf => openrlhf::combine(&mut draft)?,
        System::Trl => trl::combine(&mut draft)?,
        System::Verl => verl::combine(&mut draft)?,
    }
    if draft.value("model.actor").is_none() {
        return Err(Error::usage(format!("the launch of {} names no model", launch.dialect)));
    }
    if draft.value("data.prompts").is_none() {
        return Err(Error::usage(format!("the launch of {} names no rows to train on", launch.dialect)));
    }
    prune(&mut draft)?;
    Ok(draft)
}

fn one(draft: &mut Draft, name: &'static str, row: &'static Row) -> Result<()> {
    let given = draft.given(name);
    let values = match given {
        Some(given) => given.values.clone(),
        None if row.default.is_empty() => return Ok(()),
        None => row.default.split(' ').map(str::to_owned).collect(),
    };
    let wrong = || {
        let option = draft.system().written(name);
        Error::usage(format!("{option} has the value {:?}, which {} does not take", values.join(" "), row.key))
    };
    let (word, rest) = row.how.split_once(' ').unwrap_or((row.how, ""));
    let made = match word {
        "@" => return Ok(()),
        "-" => Made::Nothing,
        "given" if given.is_none() => return Ok(()),
        "model" | "models" => return models(draft, name, row, &values),
        _ => made(word, rest, &values, draft.ours(&draft.key(row.key))).ok_or_else(wrong)?,
    };
    match made {
        Made::Value(value) if word == "add" => {
            let mut all = draft.value(row.key).and_then(Value::as_array).cloned().unwrap_or_default();
            if !all.contains(&value) {
                all.push(value);
            }
            draft.set(row.key, all, &[name]);
        }
        Made::Value(value) => draft.set(row.key, value, &[name]),
        Made::Nothing if given.is_some() && row.kind == Kind::Missing => {
            // A value that changes nothing there needs no counterpart.
            let text = values.join(" ");
            let is_off = is_null(&text) || text.eq_ignore_ascii_case("false") || is_same(&text, row.default);
            if word == "only" || !values.is_empty() && is_off {
                draft.note(name, Kind::Needless, "this value needs no counterpart");
            }
        }
        Made::Nothing => {}
        Made::Unknown => {
            let why = if row.kind == Kind::Missing { row.note } else { "this value has no counterpart" };
            if given.is_some() {
                draft.note(name, Kind::Missing, why);
            }
        }
    }
    Ok(())
}

fn is_same(one: &str, other: &str) -> bool {
    one == other || one.parse::<f64>().ok().zip(other.parse::<f64>().ok()).is_some_and(|(a, b)| a == b)
}

/// Model directories.
fn models(draft: &mut Draft, name: &'static str, row: &'static Row, values: &[String]) -> Result<()> {
    let all: Vec<&str> = values.iter().flat_map(|value| value.split(',')).filter(|value| !is_null(value)).collect();
    let dirs: Vec<Value> = all.iter().map(|model| paths::model(draft, model).into()).collect();
    match dirs.as_slice() {
        [] => {}
        [one] if row.how == "model" => draft.set(row.key, one.clone(), &[name]),
        _ if row.how == "model" => return Err(Error::usage(format!("{name} has several values"))),
        _ => draft.set(row.key, dirs, &[name]),
    }
    Ok(())
}

/// Converts values as the column `how` of the table describes. `None` if they have a wrong type.
fn made(how: &str, rest: &str, values: &[String], ours: Option<&Value>) -> Option<Made> {
    let text = values.join(" ");
    let is_on = values.first().is_none_or(|value| is_true(value));
    let value = |literal: &str| Some(Made::Value(literal_of(literal)?));
    if is_null(&text) && !values.is_empty() && ["=", "given", "pos0", "nums", "words", "json"].contains(&how) {
        return Some(Made::Nothing);
    }
    match how {
        "=" | "given" if !rest.is_empty() => value(rest),
        "null0" if is_null(&text) && !values.is_empty() => value("0"),
        "=" | "given" | "null0" => Some(Made::Value(typed(values, ours)?)),
        "pos0" => {
            let number: f64 = text.parse().ok()?;
            Some(Made::Value(if number < 0.0 { 0.into() } else { typed(values, ours)? }))
        }
        "below" => {
            let (number, most): (f64, f64) = (text.parse().ok()?, rest.parse().ok()?);
            Some(Made::Value(if number >= most || number < 0.0 { 0.into() } else { (number as i64).into() }))
        }
        "flag" if is_on || (!values.is_empty() && !is_false(&text) && !is_null(&text)) => value(rest),
        "flag" => Some(Made::Nothing),
        "not" => Some(Made::Value((!is_on).into())),
        "add" => {
            if is_on {
                value(rest)
            } else {
                Some(Made::Nothing)
            }
        }
        "const" => value(rest),
        "one_minus" => Some(Made::Value(rounded(1.0 - text.parse::<f64>().ok()?).into())),
        "map" => {
            let key = if values.is_empty() { "true".to_owned() } else { text.to_lowercase() };
            let pairs = rest.split(' ').filter_map(|pair| pair.split_once('='));
            let found = pairs.clone().find(|(from, _)| from.to_lowercase() == key);
            let literal = found.or_else(|| pairs.clone().find(|(from, _)| *from == "*"));
            literal.map_or(Some(Made::Unknown), |(_, literal)| value(literal))
        }
        "only" => {
            let is_known = rest.split(' ').any(|known| is_same(&known.to_lowercase(), &text.to_lowercase()));
            Some(if is_known || is_null(&text) { Made::Nothing } else { Made::Unknown })
        }
        "nums" => {
            let numbers: Option<Vec<f64>> = numbers(values).collect();
            Some(Made::Value(Value::Array(numbers?.into_iter().map(Value::from).collect())))
        }
        "words" => Some(Made::Value(Value::Array(values.iter().map(|word| word.as_str().into()).collect()))),
        "json" => {
            let json: serde_json::Value = serde_json::from_str(&text).ok()?;
            Some(if json.as_object()?.is_empty() { Made::Nothing } else { Made::Value(Value::try_from(json).ok()?) })
        }
        _ => None,
    }
}

fn is_false(text: &str) -> bool {
    ["false", "0", "no", "off"].contains(&text.to_lowercase().as_str())
}

fn literal_of(text: &str) -> Option<Value> {
    format!("v = {text}").parse::<Table>().ok()?.remove("v")
}

/// The values with the type of our default.
fn typed(values: &[String], ours: Option<&Value>) -> Option<Value> {
    let text = values.join(" ");
    let number = || text.parse::<f64>().ok().filter(|number| number.is_finite());
    let whole = || number().filter(|number| number.fract() == 0.0).map(|number| Value::Integer(number as i64));
    match ours {
        Some(Value::Boolean(_)) if values.is_empty() => Some(true.into()),
        Some(Value::Boolean(_)) if is_true(&text) || is_false(&text) => Some(is_true(&text).into()),
        Some(Value::Boolean(_)) => None,
        Some(Value::Float(_)) => number().map(Value::Float),
        Some(Value::Integer(_)) => whole(),
        _ if values.is_empty() => Some(true.into()),
        _ => Some(whole().or_else(|| number().map(Value::Float)).unwrap_or_else(|| text.clone().into())),
    }
}

/// Removes keys with our own defaults, and keys that this job does not use.
fn prune(draft: &mut Draft) -> Result<()> {
    let defaults: Vec<String> = draft
        .items
        .iter()
        .filter(|(key, item)| !item.is_given && draft.ours(key).is_some_and(|ours| is_equal(ours, &item.value)))
        .map(|(key, _)| key.clone())
        .filter(|key| !["job.kind", "model.actor", "data.prompts"].contains(&key.as_str()))
        .collect();
    draft.items.retain(|key, _| !defaults.contains(key));
    loop {
        let config = config::parse(&super::write::tables(draft), &[])?;
        let unused = config.unused_keys();
        if unused.is_empty() {
            return Ok(());
        }
        let before = draft.items.len();
        for (why, keys) in unused {
            for key in keys {
                drop_unused(draft, &key, why);
            }
        }
        if draft.items.len() == before {
            return Ok(());
        }
    }
}

/// Removes a key without effect. The options that it came from are not needed.
fn drop_unused(draft: &mut Draft, key: &str, why: &str) {
    let within = |item: &String| item == key || item.starts_with(&format!("{key}."));
    let keys: Vec<String> = draft.items.keys().filter(|item| within(item)).cloned().collect();
    for key in keys {
        draft.items.remove(&key);
        let options = draft.launch.given.iter().map(|given| given.name.clone());
        let own = |name: &String| draft.known.get(name.as_str()).is_some_and(|row| draft.key(row.key) == key);
        for name in options.filter(own).collect::<Vec<_>>() {
            if !draft.special.contains_key(&name) {
                draft.note(&name, Kind::Needless, format!("no effect in this job: it needs {why}"));
            }
        }
    }
}

fn is_equal(one: &Value, other: &Value) -> bool {
    let number = |value: &Value| value.as_float().or_else(|| value.as_integer().map(|number| number as f64));
    match (one, other) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_equal(a, b)),
        _ => one == other || number(one).zip(number(other)).is_some_and(|(a, b)| a as f32 == b as f32),
    }
}
