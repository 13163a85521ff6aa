//! JSONL files to a token shard, with all cores.

use std::io::{BufRead, BufReader};
use std::path::Path;

use rayon::prelude::*;

use super::rows::{Encoder, Reading};
use super::shard::{ShardWriter, Sidecar};
use super::split::describe;
use crate::error::{Error, Result};
use crate::sys::files;

/// Rows that are encoded at once: enough for the threads, little enough for the memory.
const ROWS_AT_ONCE: usize = 8192;

/// Refuses a format of a later release by its name.
pub(super) fn refuse_parquet(path: &Path) -> Result<()> {
    if path.extension().is_some_and(|e| e == "parquet") {
        return Err(
            Error::usage(format!("{}: Parquet is not in this release", path.display())).hint("write the rows as JSONL")
        );
    }
    Ok(())
}

/// Writes the rows of JSONL files, each with the split of all its rows where files are splits, as the shard `prefix`; of fields of
/// the rows it keeps those that `kept` names.
pub fn shard_jsonl(
    reading: Reading<'_>,
    inputs: &[(&Path, Option<&str>)],
    kept: &[String],
    prefix: &Path,
) -> Result<Sidecar> {
    inputs.iter().try_for_each(|(path, _)| refuse_parquet(path))?;
    let encoder = Encoder { reading, kept };
    let mut writer = ShardWriter::create(prefix, reading.vocabulary)?;
    for (path, split) in inputs {
        shard_file(path, *split, &encoder, &mut writer)?;
    }
    let known = Sidecar {
        tokenizer_sha256: reading.tokenizer.sha256().to_owned(),
        split_rule: describe(&reading.config.split),
        inputs: inputs.iter().map(|(path, _)| path.display().to_string()).collect(),
        ..Sidecar::default()
    };
    writer.commit(known)
}

fn shard_file(path: &Path, split: Option<&str>, encoder: &Encoder<'_>, writer: &mut ShardWriter) -> Result<()> {
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
            encoder.encode(line, source.clone(), split).map_err(|e| e.within(source))
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
