//! `rlhf-hpc tokenizer`: trains a byte-level BPE.

use super::out::note;
use std::path::PathBuf;

use argh::FromArgs;

use crate::config::limits::{self, VOCABULARY_MAX};
use crate::data::is_jsonl;
use crate::error::{Error, Result};
use crate::sys::files;
use crate::text::train_bpe;

/// Train a byte-level BPE tokenizer from JSONL or text files.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "tokenizer")]
pub struct Args {
    /// JSONL files (all text fields that are named by --field) or text files (each line)
    #[argh(positional)]
    pub input: Vec<PathBuf>,

    /// largest vocabulary, special tokens and 256 bytes included
    #[argh(option)]
    pub vocabulary: usize,

    /// directory for tokenizer.json and tokenizer_config.json
    #[argh(option)]
    pub out: PathBuf,

    /// field of the JSONL rows to learn from, may be repeated; default: prompt and response
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
        let text = files::read_to_string(path).map_err(|e| Error::io("read", path, &e))?;
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            if is_jsonl(path) {
                let at = || format!("{}:{}", path.display(), i + 1);
                texts.extend(fields_of(line, fields).map_err(|e| e.within(at()))?);
            } else {
                texts.push(line.to_owned());
            }
        }
    }
    let reached = train_bpe(&texts, args.vocabulary, &args.out)?;
    note!("tokenizer: {reached} tokens from {} texts, in {}", texts.len(), args.out.display());
    if reached < args.vocabulary {
        note!("tokenizer: the texts have no more pairs to join than these ({} asked)", args.vocabulary);
    }
    Ok(())
}

fn fields_of(line: &str, fields: &[String]) -> Result<Vec<String>> {
    let row: serde_json::Value = serde_json::from_str(line).map_err(|e| Error::data(format!("not JSON: {e}")))?;
    let texts: Vec<String> = fields.iter().filter_map(|field| row.get(field)?.as_str()).map(str::to_owned).collect();
    if texts.is_empty() {
        return Err(Error::data(format!("no text in any of the fields {}", fields.join(", "))));
    }
    Ok(texts)
}
