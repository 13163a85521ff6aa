//! Every number of a job has a range next to its default. A value outside it is rejected by name before anything is
//! allocated or timed with it.
//!
//! Upper bounds are far beyond any use. They keep products of a few of these numbers, and the resulting bytes, within
//! the machine's integers, and seconds within the range of a clock.

use crate::error::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::ops::RangeInclusive;

/// The most steps, rows and other counts of a whole job.
pub(super) const COUNT: f64 = 1e9;
pub(super) const TOKENS: f64 = TOKENS_MAX as f64;
/// The most rows of a step, and the most responses.
pub const SAMPLES_MAX: usize = 1 << 24;
pub(super) const SAMPLES: f64 = SAMPLES_MAX as f64;
/// The most ranks, more than any cluster has.
pub const RANKS_MAX: usize = 1 << 16;
/// The most threads of a rank.
pub const THREADS_MAX: usize = 4096;
/// The most tokens of a row, of a forward, or of a response.
pub const TOKENS_MAX: usize = 1 << 27;
/// The largest vocabulary of a model.
pub const VOCABULARY_MAX: usize = 1 << 24;
/// The most bytes: a pebibyte.
pub(super) const BYTES: f64 = 1_125_899_906_842_624.0;
pub(super) const YEAR_S: f64 = 31_536_000.0;
pub(super) const FINITE: f64 = f32::MAX as f64;
/// The smallest normal f32 above 0, for ranges that exclude 0.
pub(super) const ABOVE_0: f64 = f32::MIN_POSITIVE as f64;

/// Numbers of a table, each with its range.
pub type Ranges = &'static [(&'static str, RangeInclusive<f64>)];

/// A table of a job, with the range of each of its numbers.
pub trait Ranged: Serialize {
    const RANGES: Ranges;
}

/// Rejects numbers of the table `table` with the values `settings` that are outside their ranges.
pub fn check<T: Ranged>(table: &str, settings: &T) -> Result<()> {
    let values = serde_json::to_value(settings).map_err(|e| Error::fault(format!("[{table}]: {e}")))?;
    check_values(table, &values, T::RANGES)
}

/// The same check for settings as JSON.
pub(super) fn check_values(table: &str, values: &Value, ranges: Ranges) -> Result<()> {
    // A float that is not finite is null here.
    let outside = |(key, range): &(&str, _)| refuse_outside(&format!("{table}.{key}"), &values[key], range).err();
    Error::all(ranges.iter().filter_map(outside).collect())
}

/// The same check for a number of the command line: `option` must be at least `low` and at most `high`.
pub fn check_option(option: &str, value: usize, low: usize, high: usize) -> Result<()> {
    refuse_outside(option, &value.into(), &(low as f64..=high as f64))
}

/// Rejects weights of `key` unless there is one for each of the `entries` of `of`, and all are positive.
pub(super) fn check_weights(key: &str, weights: &[f64], of: &str, entries: usize) -> Result<()> {
    let n = weights.len();
    Error::need(
        n == 0 || n == entries,
        format!("{key} must have one number for each entry of {of} (got {n} for {entries})"),
    )?;
    let are_positive = weights.iter().all(|weight| weight.is_finite() && *weight > 0.0);
    Error::need(are_positive, format!("{key} must be positive numbers"))
}

fn refuse_outside(key: &str, value: &Value, range: &RangeInclusive<f64>) -> Result<()> {
    // "auto" is replaced by a number later.
    if value == "auto" || value.as_f64().is_some_and(|x| range.contains(&x)) {
        return Ok(());
    }
    // Shows an f32 as it was written: 0.1, not 0.10000000149.
    let text = value.as_f64().filter(|_| value.is_f64()).map(|x| match x as f32 {
        short if f64::from(short) == x => short.to_string(),
        _ => x.to_string(),
    });
    let text =
        text.unwrap_or_else(|| if value.is_null() { "a value that is not finite".into() } else { value.to_string() });
    let needed = match (*range.start(), *range.end()) {
        (low, high) if low == -FINITE && high == FINITE => "a finite number".to_string(),
        (low, high) if low == -FINITE => format!("at most {high}"),
        (low, high) if low > 0.0 && low <= ABOVE_0 && high == FINITE => "above 0".to_string(),
        (low, high) if low > 0.0 && low <= ABOVE_0 => format!("above 0 and at most {high}"),
        (low, high) if high == FINITE => format!("at least {low}"),
        (1.0, high) => format!("at least 1 and at most {high}"),
        (low, high) => format!("between {low} and {high}"),
    };
    Err(Error::usage(format!("{key} must be {needed} (got {text})")))
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, TABLES};

    #[test]
    fn every_number_of_a_job_has_a_range_that_contains_its_default() {
        let config = Config::default();
        config.check_ranges().expect("defaults are within their ranges");
        let values = serde_json::to_value(&config).expect("a job is JSON");
        let mut without = Vec::new();
        for (table, ranges) in TABLES {
            let settings = table.split('.').fold(&values, |values, name| &values[name]);
            let is_ranged = |key: &String| ranges.iter().any(|(ranged, _)| ranged == key);
            let numbers = settings.as_object().expect("a table").iter().filter(|(_, value)| value.is_number());
            without.extend(numbers.filter(|(key, _)| !is_ranged(key)).map(|(key, _)| format!("{table}.{key}")));
        }
        // Those depend on the ranks that there are.
        assert_eq!(without, ["mesh.pipeline", "mesh.sequence"]);
    }
}
