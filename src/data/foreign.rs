//! Files that are not rows, named for their format, with the command that helps.

use std::path::Path;

use crate::error::{Error, Result};
use crate::hub::{self, Kind};

/// Formats by the ends of names.
const NAMES: [(&str, &str); 13] = [
    (".csv", "CSV"),
    (".tsv", "TSV"),
    (".txt", "plain text"),
    (".xlsx", "an Excel file"),
    (".pkl", "a pickle"),
    (".avro", "Avro"),
    (".orc", "ORC"),
    (".tfrecord", "TFRecord"),
    (".zst", "compressed with zstd"),
    (".bz2", "compressed with bzip2"),
    (".xz", "compressed with xz"),
    (".zip", "a zip archive"),
    (".tar", "a tar archive"),
];

/// Formats by their first bytes.
const HEADS: [(&[u8], &str); 11] = [
    (&[0x28, 0xb5, 0x2f, 0xfd], "compressed with zstd"),
    (b"BZh", "compressed with bzip2"),
    (&[0xfd, b'7', b'z', b'X', b'Z'], "compressed with xz"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "Parquet"),
    (b"ARROW1", "an Arrow file"),
    (&[0xff, 0xff, 0xff, 0xff], "an Arrow stream"),
    (b"MMIDIDX", "the index of a shard"),
    (&[0xff, 0xfe], "UTF-16 text"),
    (&[0xfe, 0xff], "UTF-16 text"),
    (b"version https://git-lfs", "a pointer of git-lfs"),
];

/// Rejects a file whose name shows that it has no rows of JSON, Parquet or Arrow.
pub(super) fn check_name(path: &Path) -> Result<()> {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let inner = name.strip_suffix(".gz").unwrap_or(&name);
    match NAMES.iter().find(|(end, _)| inner.ends_with(end)) {
        Some((_, what)) => Err(named(path, what)),
        None => Ok(()),
    }
}

/// Rejects a file of JSON whose first bytes show another format.
pub(super) fn check_head(path: &Path, head: &[u8]) -> Result<()> {
    match HEADS.iter().find(|(magic, _)| head.starts_with(magic)) {
        Some((_, what)) => Err(named(path, what)),
        None => Ok(()),
    }
}

fn named(path: &Path, what: &str) -> Error {
    let file = path.display();
    let error = Error::data(format!("{file} must be a file of rows (JSONL, JSON, Parquet or Arrow), but it is {what}"));
    error.hint(match what {
        "CSV" | "TSV" => format!(
            "convert it: python -c \"import pandas; pandas.read_csv('{file}', sep={}).to_json('rows.jsonl', \
             orient='records', lines=True)\"",
            if what == "CSV" { "','" } else { "'\\t'" }
        ),
        "compressed with zstd" => format!("unpack it: zstd -d {file}"),
        "compressed with bzip2" => format!("unpack it: bunzip2 {file}"),
        "compressed with xz" => format!("unpack it: unxz {file}"),
        "a zip archive" => format!("unpack it: unzip {file}"),
        "a tar archive" => format!("unpack it: tar -xf {file}"),
        "UTF-16 text" => format!("convert it: iconv -f UTF-16 -t UTF-8 {file} > rows.jsonl"),
        "a pointer of git-lfs" => "fetch the file itself: git lfs pull".to_owned(),
        "Parquet" => "rename it to end with .parquet".to_owned(),
        "an Arrow stream" => "rename it to end with .arrow".to_owned(),
        "the index of a shard" => "give the PREFIX of PREFIX.bin and PREFIX.idx".to_owned(),
        _ => "write one JSON object per line, such as {\"prompt\": \"...\"}".to_owned(),
    })
}

/// Whether a name ends like a JSON document instead of JSON lines.
pub(super) fn is_json(path: &Path) -> bool {
    let name = path.to_string_lossy();
    Path::new(name.trim_end_matches(".gz")).extension().is_some_and(|end| end == "json")
}

/// Adds the command that downloads a data set to the error for a file that does not exist.
pub(super) fn missing(path: &Path, error: Error) -> Error {
    if path.exists() { error } else { hub::explain(path, Kind::Dataset, error) }
}
