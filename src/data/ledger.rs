//! The ledger of all input rows.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::sys::files::write_atomic;

/// Rows that were learned from after a cut, and the number of tokens removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Truncated {
    pub rows: u64,
    pub tokens: u64,
}

/// Rows that were cut into overlapping pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Windowed {
    pub rows: u64,
    pub pieces: u64,
}

/// The rules that filter rows which a job could train or evaluate on, and what to change.
const REMEDIES: &[(&str, &str)] = &[
    ("prompt_tokens_max", "raise data.prompt_tokens_max, or cut long prompts with data.long_prompts"),
    ("row_tokens_max", "raise data.row_tokens_max, or cut long rows with data.long_prompts"),
    (
        "eval_split_too_long",
        "these held-out rows are too long: raise data.prompt_tokens_max and data.row_tokens_max, or set data.long_prompts",
    ),
    (
        "pair_equal_when_cut",
        "the two responses of these rows differ only in tokens that are cut off: raise data.row_tokens_max",
    ),
    (
        "image_cut",
        "to fit, these rows would be cut within an image: raise data.prompt_tokens_max and data.row_tokens_max, or make images smaller",
    ),
    ("empty_document", "these documents have no tokens, so nothing can be learned from them"),
    (
        "same_prompt_in_eval_split",
        "these rows have the prompt of a held-out row, which never trains: name a held-out file only in \
         data.split.eval_files or data.eval_sets, and remove repeated prompts",
    ),
];

/// The rules for rows that the job leaves out on purpose, so that there is no remedy: those of splits that it does not
/// name, and those after data.rows_max.
const ON_PURPOSE: [&str; 2] = ["other_split", "rows_max"];

/// The use of all rows: `rows = trained + truncated.rows + held_out + filtered + deferred`, always.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ledger {
    pub rows: u64,
    /// Rows handed out without a cut, in any number of pieces and epochs.
    pub trained: u64,
    /// Rows handed out after a cut.
    pub truncated: Truncated,
    /// Held-out rows, which are never used for training.
    pub held_out: u64,
    /// Rows that are never handed out, by the rule that filtered them.
    pub filtered: BTreeMap<String, u64>,
    /// Rows not handed out yet.
    pub deferred: u64,
    /// Rows among those above that were cut into pieces.
    pub windowed: Windowed,
    /// Prompts or demonstrations handed out, repeats of later epochs included.
    pub handed_out: u64,
    /// Samples of rows handed out that were dropped, because a reward failed on them or on a sample of their group.
    #[serde(default)]
    pub samples_dropped: u64,
    /// Prompts handed out whose samples were dropped by rollout.dynamic_sampling.
    #[serde(default)]
    pub groups_dropped: u64,
}

fn remedy(rule: &str) -> Option<&'static str> {
    REMEDIES.iter().find(|(known, _)| *known == rule).map(|(_, remedy)| *remedy)
}

impl Ledger {
    pub(crate) fn filter(&mut self, rule: &str, rows: u64) {
        debug_assert!(ON_PURPOSE.contains(&rule) || remedy(rule).is_some(), "the rule {rule} has no remedy");
        if rows > 0 {
            *self.filtered.entry(rule.to_owned()).or_default() += rows;
        }
    }

    /// Adds the rows of an evaluation set, none of which are used for training.
    pub(super) fn add(&mut self, evaluated: &Self) {
        self.rows += evaluated.rows;
        self.held_out += evaluated.held_out;
        evaluated.filtered.iter().for_each(|(rule, rows)| self.filter(rule, *rows));
    }

    /// The rows that rules filtered, without those left out on purpose, and each rule with its rows and its remedy.
    pub fn losses(&self) -> (u64, Vec<String>) {
        let lost = || self.filtered.iter().filter(|(rule, _)| !ON_PURPOSE.contains(&rule.as_str()));
        let describe = |(rule, rows): (&String, &u64)| match remedy(rule) {
            Some(remedy) => format!("{rule} {rows}: {remedy}"),
            None => format!("{rule} {rows}"),
        };
        (lost().map(|(_, rows)| rows).sum(), lost().map(describe).collect())
    }

    pub fn accounted(&self) -> u64 {
        self.trained + self.truncated.rows + self.held_out + self.filtered.values().sum::<u64>() + self.deferred
    }

    pub fn check(&self) -> Result<()> {
        if self.accounted() == self.rows {
            return Ok(());
        }
        Err(Error::fault(format!("ledger: {} rows were read, but {} are accounted for", self.rows, self.accounted())))
    }

    /// Replaces `path` (`ledger.json` of the run directory).
    pub fn write(&self, path: &Path) -> Result<()> {
        self.check()?;
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::fault(format!("ledger: {e}")))?;
        write_atomic(path, format!("{text}\n").as_bytes())
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |n: u64| if n == 1 { "" } else { "s" };
        write!(f, "{} row{}: {} trained", self.rows, plural(self.rows), self.trained)?;
        write!(f, ", {} truncated by {} tokens", self.truncated.rows, self.truncated.tokens)?;
        write!(f, ", {} held out", self.held_out)?;
        write!(f, ", {} filtered", self.filtered.values().sum::<u64>())?;
        if !self.filtered.is_empty() {
            let rules: Vec<String> = self.filtered.iter().map(|(rule, rows)| format!("{rule} {rows}")).collect();
            write!(f, " ({})", rules.join(", "))?;
        }
        write!(f, ", {} deferred", self.deferred)?;
        if self.windowed.rows > 0 {
            let (rows, pieces) = (self.windowed.rows, self.windowed.pieces);
            write!(f, "; {rows} row{} in {pieces} window{}", plural(rows), plural(pieces))?;
        }
        Ok(())
    }
}
