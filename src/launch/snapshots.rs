//! Snapshots of the Hugging Face cache: all ranks must have the same ones, although each host may have its own cache.

use crate::comm::{World, records};
use crate::error::{Error, Result};
use crate::hub;
use std::path::PathBuf;

/// Compares the snapshots of this rank with those of the first one. All ranks call this.
///
/// # Errors
/// `Usage`, with the first difference.
pub fn compare(world: &World, paths: &[PathBuf]) -> Result<()> {
    let named = |path: &PathBuf| hub::snapshot_of(path).map(|(found, commit)| format!("{}@{commit}", found.id));
    let mine = paths.iter().filter_map(named).collect::<Vec<_>>().join(" ");
    let all: Vec<String> = records::gather(&world.group(), &[mine])?;
    let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
    let shown = |text: &str| if text.is_empty() { "no snapshot".to_owned() } else { text.replace(' ', ", ") };
    Err(Error::usage(format!(
        "all ranks must have the same snapshots in their Hugging Face caches (got {} on rank 0, {}, and {} on rank {rank}, {})",
        shown(&all[0]),
        world.hosts[0],
        shown(&all[rank]),
        world.hosts[rank]
    ))
    .hint("set HF_HOME to a folder that all hosts share, or name a revision that all have, as ORG/NAME@COMMIT"))
}
