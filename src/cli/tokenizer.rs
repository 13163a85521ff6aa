//! `rlhf-hpc tokenizer`: trains a byte-level BPE tokenizer.

use super::out::{self, note};
use std::path::{Path, PathBuf};

use argh::{ArgsInfo, FromArgs};

use super::rows::{self, Row};
use crate::config::limits::{self, VOCABULARY_MAX};
use crate::data::input::is_rows;
use crate::error::{Error, Result};
use crate::model::other_kind;
use crate::model::small_files::TOKENIZER_FILES;
use crate::sys::files;
use crate::text::{Tokenizer, train_bpe};

/// Train a byte-level BPE tokenizer on files of rows or text.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "tokenizer")]
pub struct Args {
    /// JSONL, Parquet or Arrow (the string fields that --field names), or text files (each line)
    #[argh(positional)]
    pub input: Vec<PathBuf>,

    /// maximum vocabulary size, including special tokens and 256 bytes
    #[argh(option)]
    pub vocabulary: usize,

    /// output directory for tokenizer.json and tokenizer_config.json
    #[argh(option)]
    pub out: PathBuf,

    /// replace an output that exists
    #[argh(switch)]
    pub force: bool,

    /// field of the rows to train on; may be repeated (default: prompt and response)
    #[argh(option)]
    pub field: Vec<String>,
}

pub fn run(args: &Args) -> Result<()> {
    limits::check_option("--vocabulary", args.vocabulary, 0, VOCABULARY_MAX)?;
    if args.input.is_empty() {
        return Err(Error::usage("tokenizer needs at least one input file"));
    }
    out::check_new([&*args.out.join("tokenizer.json")], args.force)?;
    let default = ["prompt".to_owned(), "response".to_owned()];
    let fields = if args.field.is_empty() { &default[..] } else { &args.field[..] };
    let mut texts = Vec::new();
    for path in &args.input {
        if is_rows(path) {
            texts.extend(rows::read(path, |row| fields_of(row, fields))?.concat());
            continue;
        }
        let text = files::read_to_string(path).map_err(|e| Error::io("read", path, &e))?;
        texts.extend(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned));
    }
    // Files of a replaced tokenizer would add their tokens to the new one.
    let is_written = |name: &&str| ["tokenizer.json", "tokenizer_config.json"].contains(name);
    let others: Vec<&str> = TOKENIZER_FILES.into_iter().filter(|name| !is_written(name)).collect();
    let reached = train_bpe(&texts, args.vocabulary, &args.out, &others)?;
    note!("tokenizer: {reached} tokens from {} texts, in {}", texts.len(), args.out.display());
    if reached < args.vocabulary {
        note!(
            "tokenizer: smaller than --vocabulary {}, because the texts have no more pairs to merge",
            args.vocabulary
        );
    }
    Ok(())
}

/// The tokenizer of a directory that the command line names.
pub fn load(dir: &Path) -> Result<Tokenizer> {
    let is_absent = !dir.join("tokenizer.json").exists();
    match other_kind(dir).filter(|_| is_absent) {
        Some(error) => Err(error),
        None => Tokenizer::load(dir),
    }
}

fn fields_of(row: &Row, fields: &[String]) -> Result<Vec<String>> {
    let texts: Vec<String> = fields.iter().filter_map(|field| row.get(field)?.as_str()).map(str::to_owned).collect();
    if texts.is_empty() {
        return Err(Error::data(format!("no string in any of the fields {}", fields.join(", "))));
    }
    Ok(texts)
}
