//! `rlhf-hpc corpus`: writes the arithmetic corpus of `data::arithmetic` as JSONL.

use super::out::note;
use std::fs;
use std::io::Write;
use std::path::PathBuf;

use argh::FromArgs;

use crate::config::limits::{self, ROWS_MAX};
use crate::data::arithmetic::{CorpusConfig, Question, corpus};
use crate::error::{Error, Result};
use crate::sys::files;

/// Write a corpus of arithmetic questions, with worked answers and deliberately noisy demonstrations, as JSONL.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "corpus")]
pub struct Args {
    /// file to write; a row has prompt, response (right), demonstration (noisy), answer, kind, split, mistake
    #[argh(option)]
    pub out: PathBuf,

    /// training rows (default: 12000)
    #[argh(option, default = "12_000")]
    pub rows: usize,

    /// eval rows, all different, of operands that training never sees (default: 500)
    #[argh(option, default = "500")]
    pub eval_rows: usize,

    /// seed of all draws (default: 0)
    #[argh(option, default = "0")]
    pub seed: u64,

    /// digits of the longest operand (default: 2)
    #[argh(option, default = "2")]
    pub digits: u32,

    /// share of wrong demonstrations where the systematic mistake is possible (default: 0.7)
    #[argh(option, default = "0.7")]
    pub noise: f64,

    /// share of the operand pairs that are kept for eval rows (default: 0.1)
    #[argh(option, default = "0.1")]
    pub eval_ratio: f64,
}

pub fn run(args: &Args) -> Result<()> {
    let Args { rows, eval_rows, seed, digits, noise, eval_ratio, ref out } = *args;
    for (option, value) in [("--rows", rows), ("--eval-rows", eval_rows)] {
        limits::check_option(option, value, 0, ROWS_MAX)?;
    }
    let questions = corpus(&CorpusConfig { rows, eval_rows, seed, digits, noise, eval_ratio })?;
    let dir = files::parent(out);
    fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, &e))?;
    files::replace_with(out, |file| {
        let mut write = |row: &Question| {
            serde_json::to_writer(&mut *file, row)?;
            file.write_all(b"\n")
        };
        questions.iter().try_for_each(&mut write).map_err(|e| Error::io("write", out, &e))
    })?;
    let wrong = questions.iter().filter(|row| !row.demonstration.ends_with(&format!(" {}", row.answer))).count();
    let (share, out) = (100.0 * wrong as f64 / questions.len() as f64, out.display());
    note!(
        "corpus: {rows} training rows and {eval_rows} eval rows, {share:.0}% of the demonstrations end with a wrong answer, in {out}"
    );
    Ok(())
}
