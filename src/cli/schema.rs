//! `schema`: prints the JSON schema of job files, for editors.

use super::out::say;
use crate::config;
use crate::error::Result;
use argh::{ArgsInfo, FromArgs};

/// Print the JSON schema of job files: every key with its type, default, range, allowed values and meaning. TOML
/// editors (taplo, Even Better TOML of VS Code) use it to complete and check a job. Write it next to the job with
/// `rlhf-hpc schema > job.schema.json`, and add `#:schema ./job.schema.json` as the first line of the job.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "schema")]
pub struct Args {}

pub fn run(_: &Args) -> Result<()> {
    say!("{:#}", config::schema());
    Ok(())
}
