//! `rlhf-hpc report`: one page about a run, or several.
//!
//! The plots are drawn here, as SVG, so that the page needs no script to be read or printed. A curve's path holds the numbers
//! themselves, and a transform puts them in place: the script that shows them under the pointer reads them there.

mod bars;
mod facts;
mod numbers;
mod page;
mod plot;
mod samples;
mod source;
mod text;

use super::out::note;
use crate::error::{Error, Result, format_bytes};
use crate::sys::files;
use argh::FromArgs;
use source::Source;
use std::path::{Path, PathBuf};

/// Write one self-contained HTML page about one or several runs: curves, times, memory, rows, and samples to read.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "report")]
pub struct Args {
    /// run directories; several are laid over each other
    #[argh(positional)]
    pub runs: Vec<PathBuf>,

    /// the file to write (default: report.html in the first run directory)
    #[argh(option)]
    pub out: Option<PathBuf>,
}

/// Colours of runs that everybody can tell apart.
const RUNS_MAX: usize = 8;

pub fn run(args: &Args) -> Result<()> {
    let first = args.runs.first().ok_or_else(|| Error::usage("report needs at least one run directory"))?;
    let out = args.out.clone().unwrap_or_else(|| beside(first));
    let (bytes, lacks) = write(&args.runs, &out)?;
    for lack in lacks {
        note!("warning: {lack}");
    }
    note!("report: {}, {}", out.display(), format_bytes(bytes as u64));
    Ok(())
}

/// Where the page of a run stands.
pub(super) fn beside(run: &Path) -> PathBuf {
    run.join("report.html")
}

/// Writes the page about `runs` to `out`: its bytes, and what is missing on it, with the reason.
pub(super) fn write(runs: &[PathBuf], out: &Path) -> Result<(usize, Vec<String>)> {
    if runs.len() > RUNS_MAX {
        return Err(Error::usage(format!("{} runs, of which {RUNS_MAX} can be told apart on a page", runs.len())));
    }
    let mut sources = runs.iter().map(|run| Source::read(run)).collect::<Result<Vec<_>>>()?;
    source::name_apart(&mut sources);
    let page = page::of(&mut sources);
    files::write_atomic(out, page.as_bytes())?;
    Ok((page.len(), sources.into_iter().flat_map(|source| source.lacks).collect()))
}
