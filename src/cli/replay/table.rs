//! Tables and numbers of a replay.

use crate::metrics::number;
use std::fmt::Write;

/// A number in its shortest exact form, up to nine digits.
pub fn shown(x: f64) -> String {
    let nine: f64 = format!("{x:.8e}").parse().unwrap_or(x);
    if x == 0.0 || (1e-4..1e9).contains(&x.abs()) { nine.to_string() } else { format!("{nine:e}") }
}

pub fn short(x: f64) -> String {
    if x != 0.0 && x.abs() < 1e-3 { format!("{x:.1e}") } else { number(x) }
}

/// Appends a table whose columns are aligned.
pub fn table(out: &mut String, titles: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let rows: Vec<Vec<String>> =
        std::iter::once(titles.iter().map(ToString::to_string).collect()).chain(rows).collect();
    let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(out, "{}", cells.join("  ").trim_end());
    }
}
