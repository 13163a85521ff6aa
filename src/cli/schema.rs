//! `schema`: what a job may hold, for editors.

use super::out::say;
use crate::config;
use crate::error::Result;
use argh::FromArgs;

/// Print a JSON schema of job files: every key with its type, default, range, words and meaning. Editors of TOML (taplo, Even
/// Better TOML of VS Code) complete and check a job by it: write it beside the job with `rlhf-hpc schema > job.schema.json`, and
/// let the job begin with the line `#:schema ./job.schema.json`.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "schema")]
pub struct Args {}

pub fn run(_: &Args) -> Result<()> {
    say!("{:#}", config::schema());
    Ok(())
}
