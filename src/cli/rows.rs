//! Rows of the offline verbs: every row of a file is checked before the work starts, and an error names it.

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

/// A row that is not parsed yet, its file and its number there.
type Numbered = (PathBuf, usize, RawRow);

/// Gives each row of the file or folder (`-`: standard input) to `take`, until that has enough.
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
    if count == 0 { Err(Error::data(format!("{} holds no rows", path.display()))) } else { Ok(()) }
}

/// What `make` makes of a row; its error names the row.
fn made<T>((path, number, raw): &Numbered, make: impl FnOnce(&Row) -> Result<T>) -> Result<T> {
    let made = raw.parse().and_then(|row| make(&row));
    made.map_err(|e| e.within(format!("{} line {number}", path.display())))
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

/// Rows that wait for those that are answered, at most.
pub const AHEAD: usize = 4096;

/// Rows that a thread reads ahead while others are answered.
pub struct Stream {
    rows: Receiver<Result<Numbered>>,
    /// Rows of standard input are answered as they come.
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
                // Whoever has stopped reading has an error of its own.
                drop(give.send(Err(error)));
            }
        });
        Self { rows, is_live: path.as_os_str() == "-", taken: 0 }
    }

    /// What `make` makes of the next `most` rows and their numbers, from 0; of standard input, of those that have come, one at least. Fewer
    /// at the end.
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

    /// Leaves out the next `count` rows.
    pub fn skip(&mut self, count: usize) -> Result<()> {
        for next in self.rows.iter().take(count) {
            next?;
            self.taken += 1;
        }
        Ok(())
    }
}

/// Of an option: an object of JSON.
pub fn object(text: &str) -> std::result::Result<Row, String> {
    serde_json::from_str(text).map_err(|e| format!("no object of JSON: {e}"))
}

pub fn text<'a>(row: &'a Row, key: &str) -> Result<&'a str> {
    let value = required(row, key)?;
    let other = || Error::data(format!("field {key:?} is {}, needed a text", kind_of(value)));
    value.as_str().ok_or_else(other)
}

pub fn tokens(row: &Row, key: &str) -> Result<Vec<u32>> {
    match required(row, key)? {
        Value::Array(items) => token_ids(key, items),
        other => Err(Error::data(format!("field {key:?} is {}, needed a list of token ids", kind_of(other)))),
    }
}

/// The tokenizer, which a row needs for its texts.
pub fn needed<'a>(tokenizer: Option<&'a Tokenizer>, key: &str) -> Result<&'a Tokenizer> {
    let none = || Error::data(format!("the row has {key}, and the model directory no tokenizer.json"));
    tokenizer.ok_or_else(|| none().hint("give tokens"))
}

/// Refuses rows that the model cannot read: no tokens, tokens outside the vocabulary, more than its context.
pub fn check(tokens: &[u32], arch: &Arch) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::data("the row has no tokens, at least 1 is needed"));
    }
    if let Some((i, token)) = tokens.iter().enumerate().find(|(_, t)| **t as usize >= arch.vocabulary) {
        let v = arch.vocabulary;
        return Err(Error::data(format!("token {token} (at {i}) is outside the vocabulary of {v}"))
            .hint("the row was made with the tokenizer of another model"));
    }
    if tokens.len() > arch.context {
        let (n, context) = (tokens.len(), arch.context);
        return Err(Error::data(format!("the row has {n} tokens, the model's max_position_embeddings is {context}")));
    }
    Ok(())
}

/// Items of equal `key` together, in the order in which the keys come first.
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

/// Contiguous ranges of rows whose tokens fit `budget` together (a longer row stands alone).
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

/// Whether this process does the work of an offline verb: under a launcher, rank 0 alone does.
pub fn is_worker() -> bool {
    environment::launched_rank().is_none_or(|rank| rank == 0)
}
