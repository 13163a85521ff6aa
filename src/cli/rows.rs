//! Rows of the offline verbs: every row is checked before the work starts, and an error names it.

use crate::data::input::{RowReader, input_files};
use crate::data::rows::{required, token_ids};
use crate::error::{Error, Result};
use crate::model::Arch;
use crate::sys::environment;
use crate::text::{Tokenizer, kind_of};
use serde_json::{Map, Value};
use std::io::BufReader;
use std::path::Path;

pub type Row = Map<String, Value>;

/// Reads the file or folder (`-`: standard input) and makes a `T` of each row.
pub fn read<T>(path: &Path, mut make: impl FnMut(&Row) -> Result<T>) -> Result<Vec<T>> {
    let mut rows = Vec::new();
    let mut add = |path: &Path, mut reader: RowReader| -> Result<()> {
        let mut number = 0;
        loop {
            let raw = reader.next_rows()?;
            if raw.is_empty() {
                return Ok(());
            }
            for row in raw {
                number += 1;
                let made = row.parse().and_then(|row| make(&row));
                rows.push(made.map_err(|e| e.within(format!("{} line {number}", path.display())))?);
            }
        }
    };
    if path.as_os_str() == "-" {
        add(path, RowReader::lines(path, BufReader::new(std::io::stdin())))?;
    } else {
        input_files(path)?.iter().try_for_each(|file| add(&file.path, RowReader::open(&file.path)?))?;
    }
    if rows.is_empty() {
        return Err(Error::data(format!("{} holds no rows", path.display())));
    }
    Ok(rows)
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
