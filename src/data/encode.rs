//! JSONL files to a token shard, with all cores.

use std::fs::File;
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
    let name = input.path.display().to_string();
    let mut lines = Lines::open(&input.path)?;
    let mut first = 0;
    loop {
        let rows = lines.take(ROWS_AT_ONCE)?;
        if rows.is_empty() && first == 0 {
            return Err(Error::data(format!("{name} has no rows")));
        }
        if rows.is_empty() {
            return Ok(());
        }
        let encoded: Vec<Result<_>> = rows
            .par_iter()
            .enumerate()
            .map(|(i, line)| {
                let source = format!("{name}:{}", first + i + 1);
                encoder.encode(line, source.clone(), input.split.as_deref()).map_err(|e| e.within(source))
            })
            .collect();
        for row in encoded {
            let row = row?;
            let source = &row.meta.source;
            writer.push(row.split.as_deref(), &row.sequences, &row.meta).map_err(|e| e.within(source))?;
        }
        first += rows.len();
    }
}

/// The lines of a file, without those at its end that are blank.
struct Lines<'a> {
    path: &'a Path,
    file: BufReader<File>,
    // Blank lines that count only if another line follows.
    blank: usize,
}

impl<'a> Lines<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        let file = files::open_input(path).map_err(|e| Error::io("read", path, &e))?;
        Ok(Self { path, file: BufReader::with_capacity(1 << 20, file), blank: 0 })
    }

    /// The next lines, about `n`; none at the end.
    fn take(&mut self, n: usize) -> Result<Vec<Vec<u8>>> {
        let mut lines = Vec::new();
        while lines.len() < n {
            let mut line = Vec::new();
            let read = self.file.read_until(b'\n', &mut line).map_err(|e| Error::io("read", self.path, &e))?;
            if read == 0 {
                break;
            }
            if line.trim_ascii().is_empty() {
                self.blank += 1;
                continue;
            }
            lines.extend(std::iter::repeat_n(Vec::new(), std::mem::take(&mut self.blank)));
            lines.push(line);
        }
        Ok(lines)
    }
}
