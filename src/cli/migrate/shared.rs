//! Conversions of options that several systems have.

use super::draft::{Draft, is_null};
use super::table::Kind;
use toml::{Table, Value};

/// Sets a list of names; one name `all-linear` is a word.
pub fn words(draft: &mut Draft, name: &'static str, key: &str) {
    let brackets = ['[', ']', '"', '\'', ' '];
    let all: Vec<String> = draft.list(&[name]);
    let parts = all.iter().flat_map(|value| value.split(','));
    let all: Vec<String> =
        parts.map(|part| part.trim_matches(brackets).to_owned()).filter(|part| !is_null(part)).collect();
    match all.as_slice() {
        [] => {}
        [one] if one == "all-linear" || one == "all_linear" => draft.set(key, "all-linear", &[name]),
        all => draft.set(key, all.iter().map(|word| word.as_str().into()).collect::<Vec<Value>>(), &[name]),
    }
}

/// Sets the schedule of a role by its name in transformers. `least` is the floor of a cosine that has one, and its option.
pub fn set_schedule(draft: &mut Draft, role: &str, name: &'static str, least: Option<(f64, &'static str)>) {
    let Some(schedule) = draft.text(&[name]) else { return };
    let floor = format!("optim.{role}.floor_ratio");
    let (ours, falls_to) = match schedule.to_lowercase().as_str() {
        "cosine_with_min_lr" => ("cosine", least.map(|(least, _)| least)),
        "cosine" => ("cosine", Some(0.0)),
        "linear" => ("linear", Some(0.0)),
        "constant" | "constant_with_warmup" => ("constant", None),
        other => {
            draft.note(name, Kind::Missing, format!("no schedule {other:?}: constant, linear or cosine"));
            return;
        }
    };
    draft.set(&format!("optim.{role}.schedule"), ours, &[name]);
    if let Some(ratio) = falls_to {
        let option = least.filter(|_| schedule == "cosine_with_min_lr").map_or(name, |(_, option)| option);
        draft.set(&floor, ratio, &[option]);
    }
}

/// Names a reward that the user has to add.
pub fn missing_reward(draft: &mut Draft, name: &'static str) {
    let file = Value::from(Table::from_iter([("file".to_owned(), Value::from("reward.py"))]));
    draft.imply("reward.python", vec![file], "FILL IN: a file with reward_func (`rlhf-hpc help rewards`)");
    draft.note(name, Kind::Missing, "the launch names no reward: write reward.py");
}

/// The numbers in values, which spaces or commas separate.
pub fn numbers(values: &[String]) -> impl Iterator<Item = Option<f64>> + use<'_> {
    let brackets = ['[', ']', '(', ')', ' '];
    let parts = values.iter().flat_map(move |value| value.trim_matches(brackets).split([',', ' ']));
    parts.map(str::trim).filter(|part| !part.is_empty()).map(|part| part.parse().ok())
}

/// Rounds away the error of a subtraction.
pub fn rounded(value: f64) -> f64 {
    (value * 1e9).round() / 1e9
}
