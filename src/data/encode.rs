//! Encoding of files of rows into a token shard, with all cores.

use std::path::Path;

use rayon::prelude::*;

use super::input::{InputFile, RawRow, RowReader, input_files};
use super::rows::{Encoder, Reading};
use super::shard::{ShardWriter, Sidecar};
use super::split::describe;
use crate::config::data::SplitBy;
use crate::error::{Error, Result};

/// Writes the rows of files and folders as the shard `prefix`. Each input has the split of all its rows, if files are
/// splits. Keeps the fields of the rows that `kept` names.
pub fn shard_rows(
    reading: Reading<'_>,
    inputs: &[(&Path, Option<&str>)],
    kept: &[String],
    prefix: &Path,
) -> Result<Sidecar> {
    let encoder = Encoder { reading, kept };
    let of_folders = reading.config.split.by == SplitBy::Source;
    let mut all = Vec::new();
    for (path, split) in inputs {
        all.extend(input_files(path)?.into_iter().map(|file| InputFile {
            split: split.map(str::to_owned).or(file.split.filter(|_| of_folders)),
            path: file.path,
        }));
    }
    // All files are opened before any row is read, so that a truncated one is rejected at once.
    let readers = all.iter().map(|file| RowReader::open(&file.path)).collect::<Result<Vec<_>>>()?;
    let mut writer = ShardWriter::create(prefix, reading.vocabulary)?;
    for (file, reader) in all.iter().zip(readers) {
        let rows = shard_file(file, reader, &encoder, &mut writer)?;
        // A split of a folder may be empty.
        if rows == 0 && inputs.iter().any(|(path, _)| *path == file.path) {
            return Err(Error::data(format!("{} has no rows", file.path.display())));
        }
    }
    let known = Sidecar {
        tokenizer_sha256: reading.tokenizer.sha256().to_owned(),
        split_rule: describe(&reading.config.split),
        inputs: inputs.iter().map(|(path, _)| path.display().to_string()).collect(),
        ..Sidecar::default()
    };
    writer.commit(known)
}

/// Returns the number of rows.
fn shard_file(
    InputFile { path, split }: &InputFile,
    mut reader: RowReader,
    encoder: &Encoder<'_>,
    writer: &mut ShardWriter,
) -> Result<usize> {
    let name = path.display().to_string();
    let mut first = 0;
    loop {
        let rows = reader.next_rows()?;
        if rows.is_empty() {
            return Ok(first);
        }
        let encode = |(i, row): (usize, &RawRow)| {
            let source = format!("{name}:{}", first + i + 1);
            let encoded = row.parse().and_then(|row| encoder.encode(row, source.clone(), split.as_deref()));
            encoded.map_err(|e| row.explain(e).within(source))
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
