//! Files of rows: JSONL, JSON, Parquet, and the Arrow streams of Hugging Face's `save_to_disk`, alone or in folders.

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use serde_json::{Map, Value};

use super::arrow::{self, Batches};
pub use super::folder::InputFile;
use super::folder::{self, is_file_of_rows};
use super::foreign;
use super::json::{JsonRows, ROW_BYTES_MAX, without_bom, without_nan};
use super::shard;
use crate::error::{Error, Result};
use crate::hub::{self, Kind};
use crate::text::kind_of;

/// Lines handed out at once: enough for the parsing threads, and not too many for the memory.
const LINES_AT_ONCE: usize = 8192;

/// Whether a path, such as an entry of `data.prompts`, is a file or folder of rows. Otherwise it is the prefix of a
/// shard.
pub fn is_rows(path: &Path) -> bool {
    let is_shard = || Path::new(&format!("{}.idx", path.display())).is_file();
    is_file_of_rows(path) || (path.is_dir() && !is_shard())
}

/// The files of a path: the path itself, or the files in a folder. A folder of `save_to_disk` has a dataset, or several
/// with their splits. A folder of Parquet or JSON files may name splits by files or folders:
/// `train-00000-of-00002.parquet`, `test/rows.jsonl`.
pub fn input_files(path: &Path) -> Result<Vec<InputFile>> {
    if path.is_dir() { folder::files_in(path) } else { Ok(vec![InputFile { path: path.to_owned(), split: None }]) }
}

/// Rejects an entry that is neither a shard nor a file of rows.
pub(super) fn check_entry(name: &str) -> Result<()> {
    let path = Path::new(name);
    if name.starts_with(hub::SCHEME) {
        let rule = format!("{name} is not in the Hugging Face cache");
        let form = "write a data set of the Hub as hf://ORG/NAME[@REVISION][/FOLDER]";
        return Err(hub::explain(path, Kind::Dataset, Error::data(rule).hint(form)));
    }
    if is_rows(path) && !path.exists() {
        return Err(foreign::missing(path, Error::data(format!("{name} does not exist")).hint("check data.prompts")));
    }
    if is_rows(path) || shard::files(path).any(|(_, file)| file.exists()) {
        return Ok(());
    }
    foreign::check_name(path)?;
    let error = Error::data(format!("{name} must be a file of rows, a folder, or the prefix of a shard (none exists)"));
    Err(foreign::missing(
        path,
        error.hint("give a .jsonl, .json or .parquet file, or the PREFIX of PREFIX.bin and PREFIX.idx"),
    ))
}

/// A row before parsing.
pub enum RawRow {
    Line(Vec<u8>),
    Cells(Arc<RecordBatch>, usize),
}

impl RawRow {
    /// The fields of the row. A null is a missing field, and so is NaN or an infinity, which JSON cannot hold.
    pub fn parse(&self) -> Result<Map<String, Value>> {
        let line = match self {
            Self::Cells(batch, i) => return arrow::row(batch, *i),
            Self::Line(line) => without_bom(line),
        };
        if line.trim_ascii().is_empty() {
            return Err(Error::data("the line must be a JSON object (got an empty line)"));
        }
        let parsed = serde_json::from_slice(line);
        let parsed = parsed.or_else(|e| without_nan(line).ok_or(e).and_then(|line| serde_json::from_slice(&line)));
        match parsed {
            Ok(Value::Object(mut row)) => {
                row.retain(|_, value| !value.is_null());
                Ok(row)
            }
            Ok(other) => Err(Error::data(format!("the line must be a JSON object (got {})", kind_of(&other)))),
            Err(_) if std::str::from_utf8(line).is_err() => Err(Error::data("the line is not UTF-8 text")
                .hint("convert the file: iconv -f ENCODING -t UTF-8 FILE > rows.jsonl (ENCODING is often CP1252)")),
            Err(e) => Err(Error::data(format!("not JSON: {e}"))),
        }
    }

    /// Adds to the error of a row that it has NaN or an infinity, if it does.
    pub fn explain(&self, error: Error) -> Error {
        let has_nan = match self {
            Self::Line(line) => without_nan(line).is_some_and(|line| serde_json::from_slice::<Value>(&line).is_ok()),
            Self::Cells(batch, i) => arrow::has_nan(batch, *i),
        };
        if !has_nan {
            return error;
        }
        let message = format!("{}; the row has NaN or Infinity, which counts as a missing value", error.message);
        Error { message, ..error }
    }
}

/// Reads the rows of a file, some at a time.
pub enum RowReader {
    Json {
        name: PathBuf,
        from: JsonRows,
        /// The number of rows that were read.
        count: usize,
        /// Blank lines count only if another line follows.
        blank: usize,
        at_once: usize,
    },
    Batches {
        name: PathBuf,
        from: Batches,
    },
}

impl RowReader {
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.to_owned();
        foreign::check_name(path)?;
        let from = match path.extension().and_then(|e| e.to_str()) {
            Some("parquet") => Batches::parquet(path),
            Some("arrow") => Batches::arrow(path),
            _ => {
                let from = JsonRows::open(path)?;
                return Ok(Self::Json { name, from, count: 0, blank: 0, at_once: LINES_AT_ONCE });
            }
        };
        Ok(Self::Batches { from: from.map_err(|e| e.within(path.display()))?, name })
    }

    /// Reads each line as soon as it arrives.
    pub fn lines(name: &Path, from: impl BufRead + 'static) -> Self {
        Self::Json { name: name.to_owned(), from: JsonRows::lines(from), count: 0, blank: 0, at_once: 1 }
    }

    /// Whether reading can start at any byte of the file.
    pub fn is_seekable(&self) -> bool {
        matches!(self, Self::Json { from, .. } if from.is_seekable())
    }

    /// The next rows. Empty after the last one.
    pub fn next_rows(&mut self) -> Result<Vec<RawRow>> {
        match self {
            Self::Batches { name, from } => {
                let batch = from.next_batch().map_err(|e| e.within(name.display()))?;
                let rows = |batch: Arc<RecordBatch>| {
                    (0..batch.num_rows()).map(|i| RawRow::Cells(Arc::clone(&batch), i)).collect()
                };
                Ok(batch.map_or(Vec::new(), rows))
            }
            Self::Json { name, from, count, blank, at_once } => {
                let (mut rows, mut line, mut bytes) = (Vec::new(), Vec::new(), 0);
                while rows.len() < *at_once && bytes < ROW_BYTES_MAX {
                    let number = *count + *blank + rows.len() + 1;
                    let place = |e: Error| e.within(format!("{}:{number}", name.display()));
                    if !from.next(&mut line).map_err(place)? {
                        break;
                    }
                    if line.trim_ascii().is_empty() {
                        *blank += 1;
                        continue;
                    }
                    rows.extend((0..std::mem::take(blank)).map(|_| RawRow::Line(Vec::new())));
                    bytes += line.len();
                    rows.push(RawRow::Line(std::mem::take(&mut line)));
                }
                *count += rows.len();
                Ok(rows)
            }
        }
    }
}
