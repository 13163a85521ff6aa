//! Rows of the offline verbs. Every row of a file is checked before the work starts, and an error names the row.

use crate::data::input::{RawRow, RowReader, input_files};
use crate::data::rows::{required, token_ids};
use crate::error::{Error, Result};
use crate::model::Arch;
use crate::sys::environment;
use crate::text::{Tokenizer, kind_of};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::hash::Hash;
use std::io::BufReader;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};

pub type Row = Map<String, Value>;

/// An unparsed row, with its file and its line number.
type Numbered = (PathBuf, usize, RawRow);

/// Passes each row of the file or folder (`-`: standard input) to `take`, until that returns `Break`.
fn each_raw(path: &Path, mut take: impl FnMut(Numbered) -> Result<ControlFlow<()>>) -> Result<()> {
    let mut count = 0;
    let mut add = |path: &Path, mut reader: RowReader| -> Result<ControlFlow<()>> {
        let mut number = 0;
        loop {
            let rows = reader.next_rows()?;
            if rows.is_empty() {
                return Ok(ControlFlow::Continue(()));
            }
            for row in rows {
                number += 1;
                count += 1;
                if take((path.to_owned(), number, row))?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
    };
    if path.as_os_str() == "-" {
        _ = add(path, RowReader::lines(path, BufReader::new(std::io::stdin())))?;
    } else {
        for file in input_files(path)? {
            if add(&file.path, RowReader::open(&file.path)?)?.is_break() {
                break;
            }
        }
    }
    if count == 0 { Err(Error::data(format!("{} has no rows", path.display()))) } else { Ok(()) }
}

/// Applies `make` to a row; an error names the row.
fn made<T>((path, number, raw): &Numbered, make: impl FnOnce(&Row) -> Result<T>) -> Result<T> {
    let made = raw.parse().and_then(|row| make(&row));
    made.map_err(|e| raw.explain(e).within(format!("{} line {number}", path.display())))
}

/// Makes a `T` of each row of the file or folder (`-`: standard input).
pub fn read<T>(path: &Path, mut make: impl FnMut(&Row) -> Result<T>) -> Result<Vec<T>> {
    let mut rows = Vec::new();
    each_raw(path, |row| {
        rows.push(made(&row, &mut make)?);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(rows)
}

/// The maximum number of rows that are read ahead.
pub const AHEAD: usize = 4096;

/// Rows that a thread reads ahead while others are processed.
pub struct Stream {
    rows: Receiver<Result<Numbered>>,
    /// Whether the rows come from standard input and are processed as they arrive.
    is_live: bool,
    taken: u64,
}

impl Stream {
    pub fn open(path: &Path) -> Self {
        let (give, rows) = mpsc::sync_channel(AHEAD);
        let from = path.to_owned();
        std::thread::spawn(move || {
            let given =
                |row| if give.send(Ok(row)).is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
            if let Err(error) = each_raw(&from, |row| Ok(given(row))) {
                // A reader that stopped has an error of its own.
                drop(give.send(Err(error)));
            }
        });
        Self { rows, is_live: path.as_os_str() == "-", taken: 0 }
    }

    /// Applies `make` to the next `most` rows and their numbers, from 0; at the end there are fewer. From standard
    /// input it takes the rows that have arrived, at least one.
    pub fn next<T>(&mut self, most: usize, mut make: impl FnMut(u64, &Row) -> Result<T>) -> Result<Vec<T>> {
        let mut rows = Vec::new();
        while rows.len() < most {
            let wait = !self.is_live || rows.is_empty();
            let next = if wait { self.rows.recv().ok() } else { self.rows.try_recv().ok() };
            let Some(next) = next else { break };
            rows.push(made(&next?, |row| make(self.taken, row))?);
            self.taken += 1;
        }
        Ok(rows)
    }

    /// Skips the next `count` rows.
    pub fn skip(&mut self, count: usize) -> Result<()> {
        for next in self.rows.iter().take(count) {
            next?;
            self.taken += 1;
        }
        Ok(())
    }
}

/// Parses an option that is a JSON object.
pub fn object(text: &str) -> std::result::Result<Row, String> {
    serde_json::from_str(text).map_err(|e| format!("must be a JSON object: {e}"))
}

pub fn text<'a>(row: &'a Row, key: &str) -> Result<&'a str> {
    let value = required(row, key)?;
    let other = || Error::data(format!("field {key:?} must be a string (got {})", kind_of(value)));
    value.as_str().ok_or_else(other)
}

pub fn tokens(row: &Row, key: &str) -> Result<Vec<u32>> {
    match required(row, key)? {
        Value::Array(items) => token_ids(key, items),
        other => Err(Error::data(format!("field {key:?} must be a list of token ids (got {})", kind_of(other)))),
    }
}

/// The tokenizer, which a row needs for its texts.
pub fn needed<'a>(tokenizer: Option<&'a Tokenizer>, key: &str) -> Result<&'a Tokenizer> {
    let none = || Error::data(format!("{key} needs a tokenizer.json in the model directory"));
    tokenizer.ok_or_else(|| none().hint("use token ids instead, or add the tokenizer"))
}

/// Rejects rows that the model cannot process: no tokens, tokens outside the vocabulary, or more than its context.
pub fn check(tokens: &[u32], arch: &Arch) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::data("a row must have at least 1 token (got 0)"));
    }
    if let Some((i, token)) = tokens.iter().enumerate().find(|(_, t)| **t as usize >= arch.vocabulary) {
        let v = arch.vocabulary;
        return Err(Error::data(format!("token {token} (index {i}) is outside the vocabulary of {v}"))
            .hint("encode the row with the tokenizer of this model"));
    }
    if tokens.len() > arch.context {
        let (n, context) = (tokens.len(), arch.context);
        let error = |key| Error::data(format!("a row must have at most {key} = {context} tokens (got {n})"));
        return Err(if context < arch.positions {
            error("original_max_position_embeddings").hint("`rlhf-hpc help families` explains the limit of LongRoPE")
        } else {
            error("max_position_embeddings")
        });
    }
    Ok(())
}

/// Groups items of equal `key`, in the order in which the keys first occur.
pub fn groups<T, K: Eq + Hash>(all: Vec<T>, key: impl Fn(&T) -> K) -> Vec<Vec<T>> {
    let (mut places, mut groups) = (HashMap::new(), Vec::<Vec<T>>::new());
    for one in all {
        let place = *places.entry(key(&one)).or_insert(groups.len());
        if place == groups.len() {
            groups.push(Vec::new());
        }
        groups[place].push(one);
    }
    groups
}

/// Contiguous ranges of rows whose tokens fit `budget` together; a longer row is a range of its own.
pub fn batches(lengths: impl IntoIterator<Item = usize>, budget: usize) -> Vec<std::ops::Range<usize>> {
    let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
    let mut filled = 0;
    for (i, length) in lengths.into_iter().enumerate() {
        match ranges.last_mut() {
            Some(range) if filled + length <= budget => {
                range.end = i + 1;
                filled += length;
            }
            _ => {
                ranges.push(i..i + 1);
                filled = length;
            }
        }
    }
    ranges
}

/// Whether this process does the work of an offline verb; under a launcher, only rank 0 does.
pub fn is_worker() -> bool {
    environment::launched_rank().is_none_or(|rank| rank == 0)
}
