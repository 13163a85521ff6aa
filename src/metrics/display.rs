//! Numbers and foreign text in a fixed number of columns.

use console::{measure_text_width, truncate_str};

use crate::sys::terminal::visible;

/// `x` in at most 7 columns with 4 significant digits: `0.4123`, `12.41`, `-3.1e-5`, `1.2e9`.
pub fn number(x: f64) -> String {
    let size = x.abs();
    if !x.is_finite() {
        return if x.is_nan() { "NaN".into() } else { x.to_string() };
    }
    match size {
        0.0 => "0".into(),
        _ if !(1e-3..99999.5).contains(&size) => format!("{x:.1e}"),
        _ if size < 9.9995 => format!("{x:.4}"),
        _ if size < 99.995 => format!("{x:.2}"),
        _ if size < 999.95 => format!("{x:.1}"),
        _ => format!("{x:.0}"),
    }
}

/// A ratio as a percentage: `3.1%`.
pub fn percent(x: f64) -> String {
    if x.is_finite() { format!("{:.1}%", x * 100.0) } else { number(x) }
}

/// A count with a decimal suffix: `950`, `12.3k`, `5.24M`, `7.62B`.
pub fn count(x: f64) -> String {
    let scaled = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")].into_iter().find(|&(unit, _)| x >= unit * 0.9995);
    match scaled {
        Some((unit, suffix)) if x / unit < 9.995 => format!("{:.2}{suffix}", x / unit),
        Some((unit, suffix)) if x / unit < 99.95 => format!("{:.1}{suffix}", x / unit),
        Some((unit, suffix)) => format!("{:.0}{suffix}", x / unit),
        None => format!("{x:.0}"),
    }
}

/// A whole number with groups of three digits: `12,345`.
pub fn grouped(n: u64) -> String {
    indicatif::HumanCount(n).to_string()
}

/// A number of things: `1 row`, `2 rows`, `1,200 rows`.
pub fn counted(n: usize, what: &str) -> String {
    format!("{} {what}{}", grouped(n as u64), if n == 1 { "" } else { "s" })
}

/// A duration for readers: `0.42 s`, `12.3 s`, `4 min 05 s`, `3 h 12 min`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match seconds {
        s if s < 9.995 => format!("{s:.2} s"),
        s if s < 99.95 => format!("{s:.1} s"),
        _ if whole < 3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

/// Makes foreign text safe for one line of a terminal, as `visible` does. Line breaks become `⏎`, tabs a space.
/// Characters without a width are removed.
pub fn one_line(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let text = visible(&text);
    let shown = text.chars().filter_map(|c| match c {
        '\n' | '\u{2028}' | '\u{2029}' => Some('⏎'),
        '\t' => Some(' '),
        c if has_no_width(c) => None,
        c => Some(c),
    });
    shown.collect()
}

/// Invisible characters: zero-width marks, tags.
fn has_no_width(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{180e}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// The words of `text` in lines of at most `columns` columns. A longer word gets its own line.
pub fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if measure_text_width(line) + 1 + measure_text_width(word) <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The end of `text` in at most `columns` columns. `…` replaces the text before it.
pub fn limit_to_end(text: &str, columns: usize) -> String {
    let reversed: String = text.chars().rev().collect();
    truncate_str(&reversed, columns, "…").chars().rev().collect()
}

const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// `values` as at most `columns` blocks between their minimum and maximum, each the mean of its share of the values. A
/// share without a finite value is `·`. Equal values are a low line.
pub fn sparkline(values: &[f64], columns: usize) -> String {
    let n = values.len().min(columns);
    let means: Vec<Option<f64>> = (0..n)
        .map(|i| {
            let share = &values[i * values.len() / n..(i + 1) * values.len() / n];
            let finite: Vec<f64> = share.iter().copied().filter(|v| v.is_finite()).collect();
            (!finite.is_empty()).then(|| finite.iter().map(|v| v / finite.len() as f64).sum())
        })
        .collect();
    let least = means.iter().flatten().copied().fold(f64::INFINITY, f64::min);
    let range = means.iter().flatten().copied().fold(f64::NEG_INFINITY, f64::max) - least;
    let block = |mean: f64| {
        let level = if range > 0.0 { (mean - least) / range * BLOCKS.len() as f64 } else { 0.0 };
        BLOCKS[(level as usize).min(BLOCKS.len() - 1)]
    };
    means.into_iter().map(|mean| mean.map_or('·', block)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_to_seven_columns() {
        let numbers = "0 0.41234 9.99949 9.9996 12.414 123.45 1234.5 99999 1e6 -3.14e-5 -0.5 NaN inf";
        let shown: Vec<String> = numbers.split(' ').map(|x| number(x.parse().expect("a number"))).collect();
        assert_eq!(shown.join(" "), "0 0.4123 9.9995 10.00 12.41 123.5 1234 99999 1.0e6 -3.1e-5 -0.5000 NaN inf");
        for power in -9..10 {
            for x in [9.9996, -9.9996, 1.0, -5.55555] {
                let shown = number(x * 10f64.powi(power));
                assert!(shown.len() <= 7, "{shown}");
            }
        }
    }

    #[test]
    fn counts_and_durations_read_naturally() {
        assert_eq!([950.0, 999.7, 12345.0, 5.24e6, 7.62e9].map(count), ["950", "1.00k", "12.3k", "5.24M", "7.62B"]);
        assert_eq!([0.424, 12.34, 245.0, 11_520.0].map(duration), ["0.42 s", "12.3 s", "4 min 05 s", "3 h 12 min"]);
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn sparklines_rise_with_their_values() {
        assert_eq!(sparkline(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 40), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[1.0, 1.0, f64::NAN, 1.0], 40), "▁▁·▁");
        assert_eq!(sparkline(&[], 40), "");
        let long: Vec<f64> = (0..1000).map(f64::from).collect();
        assert_eq!(sparkline(&long, 8), "▁▂▃▄▅▆▇█");
    }
}
