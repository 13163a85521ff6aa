//! `ledger.jsonl`: the rows that are not learned from, one JSON line each.

use super::eval_sets::document_of;
use super::sources::{Filtered, Rows};
use crate::error::{Error, Result};
use crate::sys::files;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Its name in a run directory.
pub const LEDGER_LINES: &str = "ledger.jsonl";

impl Rows {
    /// Writes the filtered rows to `path`, one JSON line each: the file and line of the row, and the rule that filtered
    /// it. Lines that `write_dropped` added for steps up to `step` stay.
    pub fn write_filtered(&self, path: &Path, step: u64) -> Result<()> {
        let before = if path.exists() {
            files::read_to_string(path).map_err(|e| Error::io("read", path, &e))?
        } else {
            String::new()
        };
        let of_step = |line: &&str| {
            let line: Option<Value> = serde_json::from_str(line).ok();
            line.and_then(|line| line["step"].as_u64()).is_some_and(|of| of <= step)
        };
        files::replace_with(path, |out| {
            let all = self.with_sets().flat_map(|rows| rows.filtered.iter().map(move |filtered| (rows, filtered)));
            for (rows, Filtered { source, document, rule }) in all {
                let source = rows.sources[*source].document(*document).meta()?.source;
                writeln!(out, "{}", json!({"source": source, "rule": rule}))
                    .map_err(|e| Error::io("write", path, &e))?;
            }
            before
                .lines()
                .filter(of_step)
                .try_for_each(|line| writeln!(out, "{line}"))
                .map_err(|e| Error::io("write", path, &e))
        })
    }

    /// Appends to the file of `write_filtered` the prompts of a step whose samples were not learned from: `Prompt::id`,
    /// and the mean score.
    pub fn write_dropped(&self, path: &Path, step: u64, dropped: impl Iterator<Item = (u64, f64)>) -> Result<()> {
        let mut lines = String::new();
        for (id, score_mean) in dropped {
            let source = match document_of(&self.sources, id) {
                Some(document) => document.meta()?.source,
                None => String::new(),
            };
            let line = json!({"source": source, "rule": "dynamic_sampling", "step": step, "score_mean": score_mean});
            lines += &line.to_string();
            lines.push('\n');
        }
        let file = File::options().append(true).create(true).open(path);
        file.and_then(|mut file| file.write_all(lines.as_bytes())).map_err(|e| Error::io("write", path, &e))
    }
}
