//! Units, axes and short numbers.

use crate::metrics::count;
use crate::metrics::keys::{self, Unit};

/// The unit of a key of the table; for other keys, the unit that the end of the name suggests.
pub fn unit_of(key: &str) -> Unit {
    let ends = |ending: &str| key.ends_with(ending);
    match keys::find(key) {
        Some(key) => key.unit,
        None if ends("_ratio") || ends("accuracy") => Unit::Ratio,
        None if ends("_bytes") => Unit::Bytes,
        None if ends("tokens_per_s") => Unit::TokensPerSecond,
        None if ends("_s") && !ends("_per_s") => Unit::Seconds,
        None => Unit::One,
    }
}

/// The factor and the unit that show numbers of `unit` up to `most`.
pub fn scale(unit: Unit, most: f64) -> (f64, &'static str) {
    match unit {
        Unit::Ratio => (100.0, "%"),
        Unit::Nats => (1.0, "nats"),
        Unit::Tokens => (1.0, "tokens"),
        Unit::TokensPerSecond => (1.0, "tokens/s"),
        Unit::Seconds => (1.0, "s"),
        Unit::Bytes if most >= (1u64 << 30) as f64 => (1.0 / (1u64 << 30) as f64, "GiB"),
        Unit::Bytes => (1.0 / (1u64 << 20) as f64, "MiB"),
        _ => (1.0, ""),
    }
}

/// Round numbers from `low` to `high`, about `wanted` of them, and the distance between two.
pub fn ticks(low: f64, high: f64, wanted: usize) -> (Vec<f64>, f64) {
    let rough = (high - low) / wanted as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough * 0.999).unwrap_or(rough);
    let (first, last) = ((low / step - 1e-6).ceil() as i64, (high / step + 1e-6).floor() as i64);
    ((first..=last).map(|i| i as f64 * step).collect(), step)
}

/// The label of the tick at `x` on an axis with ticks `step` apart.
pub fn tick_label(x: f64, step: f64) -> String {
    if x == 0.0 {
        return "0".into();
    }
    if x.abs() >= 1e4 {
        let text = count(x.abs());
        let (digits, suffix) = text.split_at(text.trim_end_matches(char::is_alphabetic).len());
        let digits = if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits };
        return format!("{}{digits}{suffix}", if x < 0.0 { "-" } else { "" });
    }
    if step < 0.9e-4 {
        return format!("{x:.1e}").replace(".0e", "e");
    }
    let decimals = (-(step * 1.001).log10().floor()).max(0.0) as usize;
    format!("{x:.decimals$}")
}

/// `x` with `digits` significant digits, as short as it can be written without an exponent.
pub fn short(x: f64, digits: usize) -> String {
    let rounded: f64 = format!("{x:.*e}", digits.saturating_sub(1)).parse().unwrap_or(x);
    let text = rounded.to_string();
    text.strip_prefix("0.").map_or_else(|| text.replacen("-0.", "-.", 1), |rest| format!(".{rest}"))
}

/// Thins out `points` to at most `most`. The least and the greatest of each stretch stay, so no peak is lost.
pub fn thin(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    if points.len() <= most.max(2) {
        return points.to_vec();
    }
    let stretches = (most / 2).max(1);
    let bounds = |i: usize| i * points.len() / stretches;
    let both = (0..stretches).flat_map(|i| {
        let stretch = &points[bounds(i)..bounds(i + 1)];
        let by = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let mut both: Vec<(f64, f64)> =
            [stretch.iter().min_by(by), stretch.iter().max_by(by)].into_iter().flatten().copied().collect();
        both.sort_by(|a, b| a.0.total_cmp(&b.0));
        both
    });
    both.collect()
}

/// `most` of `n` indices, including the first and the last.
pub fn spread(n: usize, most: usize) -> Vec<usize> {
    if n <= most {
        return (0..n).collect();
    }
    let last = (most - 1).max(1);
    (0..most).map(|i| (i * (n - 1) + last / 2) / last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers() {
        for (low, high, expected) in [
            (0.0, 1.0, "0 0.2 0.4 0.6 0.8 1.0"),
            (0.48, 0.93, "0.5 0.6 0.7 0.8 0.9"),
            (0.0, 150.0, "0 50 100 150"),
            (-3.0, 21000.0, "0 5000 10k 15k 20k"),
            (0.0, 3.1e-6, "0 1e-6 2e-6 3e-6"),
        ] {
            let (ticks, step) = ticks(low, high, 5);
            assert_eq!(ticks.iter().map(|x| tick_label(*x, step)).collect::<Vec<_>>().join(" "), expected);
        }
    }

    #[test]
    fn numbers_are_short_and_thinned_curves_keep_their_peaks() {
        let shown = [0.51234567, -0.00012345678, 1.0, 12345.678, -2.5, 0.0].map(|x| short(x, 4));
        assert_eq!(shown, [".5123", "-.0001235", "1", "12350", "-2.5", "0"]);
        let mut points: Vec<(f64, f64)> = (0..10_000).map(|i| (f64::from(i), 0.0)).collect();
        (points[777].1, points[7777].1) = (9.0, -9.0);
        let thinned = thin(&points, 100);
        assert!(thinned.len() <= 100 && thinned.contains(&(777.0, 9.0)) && thinned.contains(&(7777.0, -9.0)));
        assert!(thinned.is_sorted_by(|a, b| a.0 <= b.0));
        assert_eq!(spread(150, 4), [0, 50, 99, 149]);
        assert_eq!((spread(3, 4), spread(0, 4), spread(9, 1)), (vec![0, 1, 2], vec![], vec![0]));
    }
}
