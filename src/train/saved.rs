//! Models in checkpoints: for evaluation jobs, which use them instead of a model directory, and for exports.

use crate::checkpoint::{self, Checkpoint, Manifest, ModelVectors};
use crate::comm::{Group, records};
use crate::config::mesh::RoleName;
use crate::config::{self, Config};
use crate::error::Result;
use crate::launch::run::Run;
use crate::learn::Role;
use crate::model::tuning::Tuning;
use std::path::Path;

/// If an evaluation job names a run directory, replaces it with the newest checkpoint of the run. All ranks call this.
pub fn locate(config: &mut Config, group: &Group) {
    if !config.uses().trains {
        // Other hosts may still see an older listing.
        let found = records::of_first(group, || checkpoint::newest_of(&config.model.actor));
        config.model.actor = found.unwrap_or_else(|| config.model.actor.clone());
    }
}

/// The step of the checkpoint in `dir`; 0 for a model.
pub fn step_of(dir: &Path) -> u64 {
    Manifest::read(dir).map_or(0, |manifest| manifest.step)
}

pub fn is_checkpoint(dir: &Path) -> bool {
    dir.join(checkpoint::manifest::NAME).exists()
}

/// The configuration of the job that saved a checkpoint.
///
/// # Errors
/// `Usage` if it is not the text of a job.
pub fn config_of(checkpoint: &Checkpoint) -> Result<Config> {
    let text = checkpoint.manifest.state["config"].as_str().unwrap_or_default();
    config::parse(text, &[]).map_err(|e| e.within(checkpoint.dir.display()))
}

/// The actor in a checkpoint, for a job that trains nothing.
#[derive(Clone, Debug)]
pub struct Saved {
    pub checkpoint: Checkpoint,
    /// What of it the job trained, if not all of it.
    pub tuning: Option<Tuning>,
}

impl Saved {
    /// Reads the trained weights. All ranks of the role call this.
    pub fn fill(&self, run: &Run, role: &mut Role) -> Result<()> {
        let (all, checkpoint) = (&run.ranks.axes.all, &self.checkpoint);
        all.agree(checkpoint.verify(all).map_err(|e| e.hint("name another checkpoint in model.actor")))?;
        let (table, arch) = (role.weights.table.clone(), role.arch().clone());
        let read = ModelVectors::open(checkpoint, RoleName::Actor.name(), &arch, &table)
            .and_then(|vectors| role.fill(|range, out| vectors.read("weights", range, out)))
            .map_err(|e| e.within("model.actor"));
        all.agree(read)
    }
}
