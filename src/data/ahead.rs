//! The lengths of the first rows of a job, before it runs.

use std::fs::{self, File};
use std::io::{BufReader, Seek, SeekFrom, Write};
use std::path::Path;

use super::cut::{Entry, RowTokens};
use super::hashes::Hashes;
use super::images;
use super::input::{InputFile, RowReader, is_rows};
use super::json::read_line;
use super::rows::Reading;
use super::sources::{Prepared, Rows, eval_files, files_of, prepare};
use crate::comm::Group;
use crate::config::data::{DataConfig, SplitBy};
use crate::error::{Error, Result};
use crate::sys::files;
use serde_json::Value;

/// Maximum size of files that are encoded completely: a second or two on one core.
const WHOLE_BYTES_MAX: u64 = 2 << 20;
/// The number of rows sampled from a larger file.
const SAMPLED_ROWS: u64 = 512;

/// Rows that a job will use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ahead {
    pub rows: Vec<RowTokens>,
    /// The rows of the eval split, in order. Empty without such a split, or if only some rows were read.
    pub eval: Vec<RowTokens>,
    /// Whether these are some of the job's rows, spread over its files, instead of its first rows.
    pub is_sample: bool,
    /// The number of images in all rows; an estimate, if these are a sample.
    pub images: usize,
}

/// The lengths of the first `n` rows of a run with the same keys. Files of rows that are not encoded in `cache` yet are
/// encoded into a temporary directory. For a large file, only a sample is encoded.
pub fn look_ahead(reading: Reading<'_>, cache: &Path, seed: u64, n: usize) -> Result<Ahead> {
    let (alone, config) = (Group::one(), reading.config);
    let there = || Rows::open(reading, &Prepared::find(reading, cache, &mut Hashes::default(), &alone)?, seed);
    let mut of_rows: Vec<&String> = config.all_prompts().chain(eval_files(config)).collect();
    of_rows.retain(|name| is_rows(Path::new(name)));
    if of_rows.is_empty() {
        return there()?.into_ahead(n, false);
    }
    if cache.is_dir()
        && let Ok(rows) = there()
    {
        return rows.into_ahead(n, false);
    }
    let mut bytes = 0;
    for name in &of_rows {
        bytes += bytes_of(name)?;
    }
    let made = tempfile::Builder::new().prefix("rlhf-hpc-").tempdir();
    let temp = made.map_err(|e| Error::io("create a directory in", std::env::temp_dir(), &e))?;
    let mut config = DataConfig { pretrain: Vec::new(), ..config.clone() };
    let (is_sample, mut sampled) = (bytes > WHOLE_BYTES_MAX, 0);
    if is_sample {
        // For lengths, the rows of evaluation sets count like training rows.
        config.prompts.extend(std::mem::take(&mut config.eval_sets).into_iter().flat_map(|set| set.prompts));
        let most = WHOLE_BYTES_MAX / of_rows.len() as u64;
        let mut is_in_split = false;
        for (i, name) in config.prompts.iter_mut().chain(&mut config.split.eval_files).enumerate() {
            if is_rows(Path::new(name)) && bytes_of(name)? > most {
                let few = temp.path().join(format!("{i}.jsonl"));
                let mut files = files_of(name)?;
                if config.split.by == SplitBy::Source && files.iter().any(|file| file.split.is_some()) {
                    let split = &config.prompt_split;
                    files.retain(|file| split.is_empty() || file.split.as_ref() == Some(split));
                    is_in_split = true;
                }
                sample(&files, &few)?;
                *name = few.display().to_string();
            }
            sampled += if is_rows(Path::new(name)) { bytes_of(name)? } else { 0 };
        }
        // A small sample may hold no row of the eval split, and lengths do not need one.
        config.eval_split = String::new();
        if is_in_split {
            config.prompt_split = String::new();
        }
    }
    let reading = Reading { config: &config, ..reading };
    let prepared = prepare(reading, temp.path(), &mut Hashes::default(), &alone)?;
    let mut ahead = Rows::open(reading, &prepared, seed)?.into_ahead(n, is_sample)?;
    if sampled > 0 {
        ahead.images = (ahead.images as f64 * bytes as f64 / sampled as f64) as usize;
    }
    Ok(ahead)
}

impl Rows {
    fn into_ahead(mut self, n: usize, is_sample: bool) -> Result<Ahead> {
        Ok(Ahead { rows: self.ahead(n)?, eval: self.eval_tokens()?, is_sample, images: self.count_images() })
    }

    pub fn eval_tokens(&self) -> Result<Vec<RowTokens>> {
        self.with_sets().flat_map(|rows| rows.eval.iter().map(|entry| rows.tokens_of(entry))).collect()
    }

    /// The lengths of the next `n` rows, without handing them out.
    pub fn ahead(&mut self, n: usize) -> Result<Vec<RowTokens>> {
        let n = if self.epoch_rows() > 0 { n } else { 0 };
        self.feed.ahead(n).iter().map(|entry| self.tokens_of(entry)).collect()
    }

    fn tokens_of(&self, entry: &Entry) -> Result<RowTokens> {
        let response = self.kind.spec().response_tokens(entry, self.document(entry))?;
        let images = entry.sizes_of_images(self.document(entry))?;
        Ok(RowTokens { prompt: entry.tokens() - response, response, images })
    }
}

fn bytes_of(name: &str) -> Result<u64> {
    files_of(name)?.iter().map(|file| bytes_of_file(&file.path)).sum()
}

fn bytes_of_file(path: &Path) -> Result<u64> {
    fs::metadata(path).map(|meta| meta.len()).map_err(|e| Error::io("read", path, &e))
}

/// Copies some rows of each file to `to`, as JSONL.
fn sample(from: &[InputFile], to: &Path) -> Result<()> {
    let mut rows = Vec::new();
    for InputFile { path, .. } in from {
        let reader = RowReader::open(path)?;
        let folder = std::path::absolute(files::parent(path)).map_err(|e| Error::io("find", path, &e))?;
        let is_seekable = reader.is_seekable();
        if is_seekable { sample_lines(path, &folder, &mut rows)? } else { sample_all(reader, &folder, &mut rows)? }
    }
    File::create(to).and_then(|mut file| file.write_all(&rows)).map_err(|e| Error::io("write", to, &e))
}

/// Samples rows at equal distances, which double whenever there are too many.
fn sample_all(mut from: RowReader, folder: &Path, rows: &mut Vec<u8>) -> Result<()> {
    let (mut kept, mut distance, mut next) = (Vec::new(), 1, 0);
    loop {
        let batch = from.next_rows()?;
        if batch.is_empty() {
            break;
        }
        for row in batch {
            if next % distance == 0 {
                kept.push(row.parse()?);
            }
            next += 1;
            if kept.len() as u64 > 2 * SAMPLED_ROWS {
                kept = kept.into_iter().step_by(2).collect();
                distance *= 2;
            }
        }
    }
    for mut row in kept {
        images::anchor(&mut row, folder);
        rows.extend(format!("{}\n", Value::Object(row)).into_bytes());
    }
    Ok(())
}

/// Samples the next line at offsets spread evenly over the bytes of a file.
fn sample_lines(from: &Path, folder: &Path, rows: &mut Vec<u8>) -> Result<()> {
    let read = |e: &std::io::Error| Error::io("read", from, e);
    let bytes = bytes_of_file(from)?;
    let mut file = BufReader::new(files::open(from).map_err(|e| read(&e))?);
    let (mut line, mut end) = (Vec::new(), 0);
    for i in 0..SAMPLED_ROWS {
        let offset = (bytes / SAMPLED_ROWS * i).max(end);
        // From the byte before: if a row begins exactly here, only the end of the previous line is skipped.
        file.seek(SeekFrom::Start(offset.saturating_sub(1))).map_err(|e| read(&e))?;
        line.clear();
        let mut after_cr = false;
        if offset > 0 {
            read_line(&mut file, &mut after_cr, &mut line).map_err(|e| read(&e))?;
        }
        line.clear();
        read_line(&mut file, &mut after_cr, &mut line).map_err(|e| read(&e))?;
        end = file.stream_position().map_err(|e| read(&e))?;
        if !line.trim_ascii().is_empty() {
            // The copy is in another folder, which paths of images must not start from.
            let parsed = line.windows(6).any(|word| word == b"\"image").then(|| serde_json::from_slice(&line).ok());
            if let Some(Some(Value::Object(mut row))) = parsed {
                images::anchor(&mut row, folder);
                line = Value::Object(row).to_string().into_bytes();
            }
            rows.extend_from_slice(line.trim_ascii());
            rows.push(b'\n');
        }
    }
    Ok(())
}
