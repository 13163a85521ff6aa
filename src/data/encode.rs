//! Encoding of a row into a document of tokens, and of files of rows into a token shard, with all cores.

use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value};

use super::fields::required;
use super::images;
use super::input::{InputFile, RawRow, RowReader, input_files};
use super::rows::Reading;
use super::shape::{self, Fields};
use super::shard::{Meta, ShardWriter, Sidecar};
use super::split::{TEST, TRAIN, describe, is_test};
use crate::config::data::SplitBy;
use crate::config::method::RowKind;
use crate::error::{Error, Result};
use crate::images::Images;
use crate::sys::files;
use crate::text::images::Placed;

/// Used instead of field names for a shard that keeps all fields.
pub const ALL_FIELDS: &str = "all";

/// The number of rows that are encoded at once if they may have images.
const ROWS_WITH_IMAGES: usize = 64;

/// The token sequences of a row of the kind `reading.kind`: a prompt, or a prompt and its response, alternating for
/// several turns. Also its images, whose paths start from `folder`.
///
/// # Errors
/// `Data` if the row lacks a field, or has one that cannot be read.
pub fn sequences(row: &Map<String, Value>, reading: Reading, folder: &Path) -> Result<Placed> {
    let spec = reading.kind.spec();
    if spec.fields() != Fields::Text {
        shape::warn_of_unread(row, reading.config, spec.unread());
    }
    let placed = spec.encode(row, reading)?.place(reading.tokenizer, folder)?;
    // Both responses of a pair follow the prompt.
    if reading.kind == RowKind::Pair && placed.images.iter().any(|image| image.at >= placed.tokens[0].len()) {
        return Err(Error::data("only the prompt of a pair may have images"));
    }
    Ok(placed)
}

/// A row for the shard.
struct Encoded {
    row: Placed,
    meta: Meta,
    split: Option<String>,
}

/// Turns rows into tokens. Shared by the encoding threads.
struct Encoder<'a> {
    reading: Reading<'a>,
    /// Fields kept in the shard's meta lines. `ALL_FIELDS` alone keeps all.
    kept: &'a [String],
}

impl Encoder<'_> {
    /// The document of one row. `source` is its file and line. `split` is the input's own split, if it has one.
    fn encode(&self, row: Map<String, Value>, (path, source): (&Path, String), split: Option<&str>) -> Result<Encoded> {
        let Reading { config, kind, .. } = self.reading;
        let placed = sequences(&row, self.reading, files::parent(path))?;
        let field = &config.split.field;
        let split = match config.split.by {
            SplitBy::Source | SplitBy::File => split.map(str::to_owned),
            SplitBy::Ratio => Some(
                if is_test(&images::identity(&placed.tokens[0], &placed.images), &config.split) { TEST } else { TRAIN }
                    .to_owned(),
            ),
            SplitBy::Field => Some(split_name(field, required(&row, field)?)?),
        };
        let label = kind.spec().label(&row, config)?;
        let fields = if self.kept == [ALL_FIELDS] {
            images::without_images(row)
        } else {
            let kept = self.kept.iter().map(|field| Ok((field.clone(), required(&row, field)?.clone())));
            kept.collect::<Result<_>>()?
        };
        Ok(Encoded { row: placed, meta: Meta { label, source, fields, images: Vec::new() }, split })
    }
}

fn split_name(key: &str, value: &Value) -> Result<String> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(flag) => Ok(flag.to_string()),
        other => Err(Error::data(format!("field {key:?} must be the name of a split (got {other})"))),
    }
}

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
        image_recipe: reading.tokenizer.images().map_or(String::new(), Images::recipe),
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
            let encoded = row.parse().and_then(|row| encoder.encode(row, (path, source.clone()), split.as_deref()));
            encoded.map_err(|e| row.explain(e).within(source))
        };
        // The images of many rows would fill the memory.
        let at_once = if encoder.reading.tokenizer.images().is_ok() { ROWS_WITH_IMAGES } else { rows.len() };
        for (part, rows) in rows.chunks(at_once).enumerate() {
            let numbered = rows.par_iter().enumerate().map(|(i, row)| (part * at_once + i, row));
            let encoded: Vec<Result<_>> = numbered.map(encode).collect();
            for row in encoded {
                let Encoded { row, mut meta, split } = row?;
                meta.images = writer.add_images(&row.images)?;
                writer.push(split.as_deref(), &row.tokens, &meta).map_err(|e| e.within(&meta.source))?;
            }
        }
        first += rows.len();
    }
}
