//! The metrics of an evaluation as a table, for a terminal and a page.

use super::display::{grouped, number, percent};
use super::keys::{self, Unit};
use std::collections::BTreeSet;

/// The name of the rows of `data.eval_split`.
pub const EVAL_SPLIT: &str = "eval split";

/// The name of the rows of an evaluation that are in no set of their own, for a job with this `data.eval_split`.
pub fn name_of_rows(eval_split: &str) -> &'static str {
    if eval_split.is_empty() { "data.prompts" } else { EVAL_SPLIT }
}

/// A row of names, then one row of values for each set in order. The first set is the eval split, or the rows called
/// `split`.
pub fn eval_table(values: &[(String, f64)], split: &str) -> Vec<Vec<String>> {
    // The set of a metric, and its name there.
    let place = |key: &'_ (String, f64)| -> Option<(String, String)> {
        let of_split = || Some(("", key.0.strip_prefix("eval_")?));
        keys::of_set(&key.0).or_else(of_split).map(|(set, name)| (set.to_string(), name.to_string()))
    };
    let places: Vec<_> = values.iter().map(place).collect();
    let found = || places.iter().flatten().filter(|(_, name)| name != "time_s");
    let mut sets: Vec<&str> = Vec::new();
    for (set, _) in found() {
        if !sets.contains(&&**set) {
            sets.push(set);
        }
    }
    sets.sort_by_key(|set| !set.is_empty());
    // Sorts 16 after 8.
    let order = |name: &str| (keys::rank(&format!("eval_{name}")), name.len());
    let columns: BTreeSet<_> = found().map(|(_, name)| (order(name), name.as_str())).collect();
    let cell = |set: &str, name: &str| {
        let at = places.iter().position(|place| place.as_ref().is_some_and(|(of, called)| of == set && called == name));
        match (at.map(|at| values[at].1), keys::find(&format!("eval_{name}")).map(|key| key.unit)) {
            (None, _) => String::new(),
            (Some(value), Some(Unit::Ratio)) => percent(value),
            (Some(value), Some(Unit::Count)) => grouped(value as u64),
            (Some(value), _) => number(value),
        }
    };
    let title = |name: &str| match name {
        "samples" => "prompts".to_string(),
        _ => name.replace("_at_", "@").replace("accuracy_", "").replace("response_", "").replace("_mean", ""),
    };
    let row = |set: &&str| {
        let name = if set.is_empty() { split } else { set };
        std::iter::once(name.to_string()).chain(columns.iter().map(|(_, name)| cell(set, name))).collect()
    };
    let head = std::iter::once("set".to_string()).chain(columns.iter().map(|(_, name)| title(name))).collect();
    std::iter::once(head).chain(sets.iter().map(row)).collect()
}

/// The same as lines of text.
pub fn eval_lines(values: &[(String, f64)], split: &str) -> String {
    let rows = eval_table(values, split);
    let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
    let line = |row: &Vec<String>| {
        let numbers = row.iter().enumerate().skip(1).map(|(i, cell)| format!("  {cell:>0$}", width(i)));
        format!("  {:<1$}{2}", row[0], width(0), numbers.collect::<String>())
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_an_evaluation_has_a_row_for_each_set_and_numbers_in_the_order_of_metrics() {
        let values = [
            ("eval/b/accuracy_greedy", 0.5),
            ("eval/b/pass_at_16", 1.0),
            ("eval/b/pass_at_4", 0.75),
            ("eval/b/reward/style", 2.0),
            ("eval_accuracy_greedy", 0.25),
            ("eval_samples", 1200.0),
            ("eval_time_s", 3.0),
        ];
        let values = values.map(|(key, value)| (key.to_string(), value));
        let lines = [
            "  set         greedy  pass@4  pass@16  prompts  reward/style",
            "  eval split   25.0%                     1,200              ",
            "  b            50.0%   75.0%   100.0%                 2.0000",
        ];
        assert_eq!(eval_lines(&values, EVAL_SPLIT).lines().collect::<Vec<_>>(), lines);
    }
}
