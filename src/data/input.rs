//! Files of rows: JSONL, Parquet, and the Arrow streams of Hugging Face's `save_to_disk`, alone or in folders.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use serde_json::{Map, Value};

use super::arrow::{self, Batches};
use crate::error::{Error, Result};
use crate::sys::files;
use crate::text::kind_of;

/// Lines handed out at once: enough for the parsing threads, and not too many for the memory.
const LINES_AT_ONCE: usize = 8192;

/// A file of rows, and the split given by its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputFile {
    pub path: PathBuf,
    pub split: Option<String>,
}

fn has_extension(path: &Path, of: &[&str]) -> bool {
    path.extension().and_then(|e| e.to_str()).is_some_and(|e| of.contains(&e))
}

/// Whether a path, such as an entry of `data.prompts`, is a file or folder of rows. Otherwise it is the prefix of a
/// shard.
pub fn is_rows(path: &Path) -> bool {
    let is_shard = || Path::new(&format!("{}.idx", path.display())).is_file();
    has_extension(path, &["jsonl", "json", "ndjson", "parquet", "arrow"]) || (path.is_dir() && !is_shard())
}

/// The files of a path: the path itself, or the files in a folder. A folder is either a folder of `save_to_disk` (a
/// dataset, or several with their splits), or a folder of Parquet files, whose names may begin with their split:
/// `train-00000-of-00002.parquet`.
pub fn input_files(path: &Path) -> Result<Vec<InputFile>> {
    if !path.is_dir() {
        return Ok(vec![InputFile { path: path.to_owned(), split: None }]);
    }
    let within = |name: &str| {
        let is_plain = Path::new(name).file_name().is_some_and(|file| file == name);
        if is_plain {
            Ok(path.join(name))
        } else {
            Err(Error::data(format!("{name:?} is not the name of a file in this folder")))
        }
    };
    let list = |file: &str, of: &dyn Fn(&Value) -> Option<Vec<String>>| -> Result<Option<Vec<String>>> {
        let text = match files::read(&path.join(file)) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|e| Error::io("read", path.join(file), &e))?,
        };
        let names = serde_json::from_slice(&text).ok().as_ref().and_then(of);
        names.map(Some).ok_or_else(|| Error::data(format!("{file} was not written by save_to_disk")))
    };
    let texts = |list: &Value, of: fn(&Value) -> Option<&Value>| -> Option<Vec<String>> {
        list.as_array()?.iter().map(|item| of(item)?.as_str().map(str::to_owned)).collect()
    };
    let read = || -> Result<Vec<InputFile>> {
        let mut all = Vec::new();
        if let Some(splits) = list("dataset_dict.json", &|dict| texts(&dict["splits"], |name| Some(name)))? {
            for split in splits {
                let folder = within(&split)?;
                if !folder.join("state.json").is_file() {
                    return Err(Error::data(format!(
                        "dataset_dict.json names the split {split:?}, whose folder has no state.json"
                    )));
                }
                let files = input_files(&folder)?;
                all.extend(files.into_iter().map(|file| InputFile { split: Some(split.clone()), ..file }));
            }
        } else if let Some(names) = list("state.json", &|state| texts(&state["_data_files"], |f| f.get("filename")))? {
            for name in names {
                all.push(InputFile { path: within(&name)?, split: None });
            }
        } else {
            let mut found = files::entries(path)?;
            found.retain(|path| has_extension(path, &["parquet"]));
            found.sort();
            all.extend(found.into_iter().map(|path| InputFile { split: split_of(&path), path }));
        }
        if all.is_empty() {
            return Err(Error::data("the folder has no dataset_dict.json, state.json or Parquet files")
                .hint("give a folder of save_to_disk, a folder of Parquet files, or files of rows"));
        }
        Ok(all)
    };
    read().map_err(|e| e.within(path.display()))
}

/// The split before the numbers: `train` of `train-00000-of-00002.parquet`.
fn split_of(path: &Path) -> Option<String> {
    let (name, count) = path.file_stem()?.to_str()?.rsplit_once("-of-")?;
    let (split, number) = name.rsplit_once('-')?;
    let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (are_digits(number) && are_digits(count) && !split.is_empty()).then(|| split.to_owned())
}

/// A row before parsing.
pub enum RawRow {
    Line(Vec<u8>),
    Cells(Arc<RecordBatch>, usize),
}

impl RawRow {
    pub fn parse(&self) -> Result<Map<String, Value>> {
        let line = match self {
            Self::Cells(batch, i) => return arrow::row(batch, *i),
            Self::Line(line) => line,
        };
        if line.trim_ascii().is_empty() {
            return Err(Error::data("the line must be a JSON object (got an empty line)"));
        }
        match serde_json::from_slice(line) {
            Ok(Value::Object(row)) => Ok(row),
            Ok(other) => Err(Error::data(format!("the line must be a JSON object (got {})", kind_of(&other)))),
            Err(e) => Err(Error::data(format!("not JSON: {e}"))),
        }
    }
}

/// Reads the rows of a file, some at a time.
pub enum RowReader {
    Lines {
        name: PathBuf,
        from: Box<dyn BufRead>,
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
        let from = match path.extension().and_then(|e| e.to_str()) {
            Some("parquet") => Batches::parquet(path),
            Some("arrow") => Batches::arrow(path),
            _ => {
                let file = files::open_input(path).map_err(|e| Error::io("read", path, &e))?;
                let from = Box::new(BufReader::with_capacity(1 << 20, file));
                return Ok(Self::Lines { name, from, blank: 0, at_once: LINES_AT_ONCE });
            }
        };
        Ok(Self::Batches { from: from.map_err(|e| e.within(path.display()))?, name })
    }

    /// Reads each line as soon as it arrives.
    pub fn lines(name: &Path, from: impl BufRead + 'static) -> Self {
        Self::Lines { name: name.to_owned(), from: Box::new(from), blank: 0, at_once: 1 }
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
            Self::Lines { name, from, blank, at_once } => {
                let (mut rows, mut line) = (Vec::new(), Vec::new());
                while rows.len() < *at_once
                    && from.read_until(b'\n', &mut line).map_err(|e| Error::io("read", &*name, &e))? > 0
                {
                    if line.trim_ascii().is_empty() {
                        *blank += 1;
                        line.clear();
                        continue;
                    }
                    rows.extend((0..std::mem::take(blank)).map(|_| RawRow::Line(Vec::new())));
                    rows.push(RawRow::Line(std::mem::take(&mut line)));
                }
                Ok(rows)
            }
        }
    }
}
