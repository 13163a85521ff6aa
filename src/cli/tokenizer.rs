//! `rlhf-hpc tokenizer`: trains a byte-level BPE tokenizer.

use super::out::note;
use std::path::PathBuf;

use argh::FromArgs;

use super::rows::{self, Row};
use crate::config::limits::{self, VOCABULARY_MAX};
use crate::data::input::is_rows;
use crate::error::{Error, Result};
use crate::sys::files;
use crate::text::train_bpe;

/// Train a byte-level BPE tokenizer on files of rows or text.
#[derive(FromArgs, Debug)]
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

    /// field of the rows to train on; may be repeated (default: prompt and response)
    #[argh(option)]
    pub field: Vec<String>,
}

pub fn run(args: &Args) -> Result<()> {
    limits::check_option("--vocabulary", args.vocabulary, 0, VOCABULARY_MAX)?;
    if args.input.is_empty() {
        return Err(Error::usage("tokenizer needs at least one input file"));
    }
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
    let reached = train_bpe(&texts, args.vocabulary, &args.out)?;
    note!("tokenizer: {reached} tokens from {} texts, in {}", texts.len(), args.out.display());
    if reached < args.vocabulary {
        note!(
            "tokenizer: smaller than --vocabulary {}, because the texts have no more pairs to merge",
            args.vocabulary
        );
    }
    Ok(())
}

fn fields_of(row: &Row, fields: &[String]) -> Result<Vec<String>> {
    let texts: Vec<String> = fields.iter().filter_map(|field| row.get(field)?.as_str()).map(str::to_owned).collect();
    if texts.is_empty() {
        return Err(Error::data(format!("no string in any of the fields {}", fields.join(", "))));
    }
    Ok(texts)
}
