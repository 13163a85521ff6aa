//! JSONL files to a token shard, with all cores.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::rows::{Encoder, RowFormat};
use super::shard::{ShardWriter, Sidecar};
use super::split::SplitRule;
use crate::error::{Error, Result};
use crate::sys::files;
use crate::text::Tokenizer;

/// Rows that are encoded at once: enough for the threads, little enough for the memory.
const ROWS_AT_ONCE: usize = 8192;

/// A JSONL file, and the split of all its rows where files are splits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    pub path: PathBuf,
    pub split: Option<String>,
}

/// Refuses a format of a later release by its name.
pub(super) fn refuse_parquet(path: &Path) -> Result<()> {
    if path.extension().is_some_and(|e| e == "parquet") {
        return Err(
            Error::usage(format!("{}: Parquet is not in this release", path.display())).hint("write the rows as JSONL")
        );
    }
    Ok(())
}

/// Writes the rows of `inputs` as the shard `prefix`, for a model of `vocabulary` tokens.
pub fn shard_jsonl(
    inputs: &[Input],
    prefix: &Path,
    tokenizer: &Tokenizer,
    vocabulary: usize,
    format: &RowFormat,
    rule: &SplitRule,
) -> Result<Sidecar> {
    inputs.iter().try_for_each(|input| refuse_parquet(&input.path))?;
    let encoder = Encoder { tokenizer, vocabulary, format, rule };
    let mut writer = ShardWriter::create(prefix, vocabulary)?;
    for input in inputs {
        shard_file(input, &encoder, &mut writer)?;
    }
    let known = Sidecar {
        tokenizer_sha256: tokenizer.sha256().to_owned(),
        split_rule: rule.describe(),
        inputs: inputs.iter().map(|input| input.path.display().to_string()).collect(),
        ..Sidecar::default()
    };
    writer.commit(known)
}

fn shard_file(input: &Input, encoder: &Encoder<'_>, writer: &mut ShardWriter) -> Result<()> {
    let Input { path, split } = input;
    let (name, read) = (path.display().to_string(), |e: std::io::Error| Error::io("read", path, &e));
    let mut file = BufReader::with_capacity(1 << 20, files::open_input(path).map_err(read)?);
    // Blank lines count only if another line follows.
    let (mut line, mut blank, mut first) = (Vec::new(), 0, 0);
    loop {
        let mut rows: Vec<Vec<u8>> = Vec::new();
        while rows.len() < ROWS_AT_ONCE && file.read_until(b'\n', &mut line).map_err(read)? > 0 {
            if line.trim_ascii().is_empty() {
                blank += 1;
                line.clear();
                continue;
            }
            rows.extend(std::iter::repeat_n(Vec::new(), std::mem::take(&mut blank)));
            rows.push(std::mem::take(&mut line));
        }
        if rows.is_empty() {
            return if first == 0 { Err(Error::data(format!("{name} has no rows"))) } else { Ok(()) };
        }
        let encode = |(i, line): (usize, &Vec<u8>)| {
            let source = format!("{name}:{}", first + i + 1);
            encoder.encode(line, source.clone(), split.as_deref()).map_err(|e| e.within(source))
        };
        let encoded: Vec<Result<_>> = rows.par_iter().enumerate().map(encode).collect();
        for row in encoded {
            let row = row?;
            let source = &row.meta.source;
            writer.push(row.split.as_deref(), &row.sequences, &row.meta).map_err(|e| e.within(source))?;
        }
        first += rows.len();
    }
}
