//! `rlhf-hpc report`: one page about a run, or several.
//!
//! The plots are SVG, so the page can be read and printed without a script. A curve's path holds the numbers
//! themselves, and a transform scales them. The script that shows values under the pointer reads them from the path.

mod bars;
mod facts;
mod numbers;
mod page;
mod plot;
mod samples;
mod source;
mod text;
mod timeline;
mod waits;

use super::out::note;
use crate::error::{Error, Kind, Result, format_bytes};
use crate::sys::files;
use argh::{ArgsInfo, FromArgs};
use source::Source;
use std::path::{Path, PathBuf};

/// Write one self-contained HTML page about one or several runs: curves, times, memory, data rows and samples.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "report")]
pub struct Args {
    /// run directories; several runs share the plots
    #[argh(positional)]
    pub runs: Vec<PathBuf>,

    /// output file (default: report.html in the first run directory)
    #[argh(option)]
    pub out: Option<PathBuf>,
}

/// The number of colors that readers can distinguish.
const RUNS_MAX: usize = 8;

pub fn run(args: &Args) -> Result<()> {
    let first = args.runs.first().ok_or_else(|| Error::usage("report needs at least one run directory"))?;
    let out = args.out.clone().unwrap_or_else(|| beside(first));
    let Written { bytes, lacks, traced } = write(&args.runs, &out)?;
    for line in traced {
        note!("{line}");
    }
    note!("report: {}, {}", out.display(), format_bytes(bytes as u64));
    let (damaged, missing): (Vec<_>, Vec<_>) = lacks.into_iter().partition(|lack| lack.kind == Kind::Data);
    warn(&missing);
    let Some((last, damaged)) = damaged.split_last() else { return Ok(()) };
    warn(damaged);
    Err(last.clone().within("the page has no part for a damaged file"))
}

/// Prints the reasons why parts of a page are missing.
pub(super) fn warn(lacks: &[Error]) {
    for lack in lacks {
        note!("warning: {}", lack.message);
    }
}

/// The path of a run's page.
pub(super) fn beside(run: &Path) -> PathBuf {
    run.join("report.html")
}

/// A written page.
pub(super) struct Written {
    bytes: usize,
    /// The missing parts, with the reasons.
    pub lacks: Vec<Error>,
    /// A line about each traced step.
    traced: Vec<String>,
}

/// Writes the page about `runs` to `out`.
pub(super) fn write(runs: &[PathBuf], out: &Path) -> Result<Written> {
    if runs.len() > RUNS_MAX {
        return Err(Error::usage(format!("a page can show at most {RUNS_MAX} runs (got {})", runs.len())));
    }
    let mut sources = runs.iter().map(|run| Source::read(run)).collect::<Result<Vec<_>>>()?;
    source::name_apart(&mut sources);
    let page = page::render_page(&mut sources);
    files::write_atomic(out, page.as_bytes())?;
    let traced = sources.iter().flat_map(|source| &source.traced).map(timeline::line).collect();
    let lacks = sources.into_iter().flat_map(|source| source.lacks).collect();
    Ok(Written { bytes: page.len(), lacks, traced })
}
