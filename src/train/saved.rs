//! Checkpoints that an evaluation job uses instead of a model directory.

use crate::checkpoint::{self, Checkpoint, Manifest, ModelVectors};
use crate::comm::{Group, records};
use crate::config::mesh::RoleName;
use crate::config::{self, Config};
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::learn::Role;
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

/// Reads the actor's weights from the checkpoint in `role.dir`. All ranks of the role call this.
pub fn fill(run: &Run, role: &mut Role) -> Result<()> {
    let (all, dir) = (&run.ranks.axes.all, role.dir.clone());
    let checkpoint = all.agree(Checkpoint::open(&dir))?;
    let saved = config::parse(checkpoint.manifest.state["config"].as_str().unwrap_or_default(), &[]);
    let saved = all.agree(saved.map_err(|e| e.within(dir.display())))?;
    if saved.is("reward_model") {
        let what = format!("model.actor: {} holds a reward model, which cannot write responses", dir.display());
        return all
            .agree(Err(Error::data(what).hint("evaluate it on data.eval_split with job.kind = \"reward_model\"")));
    }
    all.agree(checkpoint.verify(all).map_err(|e| e.hint("name another checkpoint in model.actor")))?;
    let (table, arch) = (role.weights.table.clone(), role.arch().clone());
    let read = ModelVectors::open(&checkpoint, RoleName::Actor.name(), &arch, &table)
        .and_then(|vectors| role.fill(|range, out| vectors.read("weights", range, out)))
        .map_err(|e| e.within("model.actor"));
    all.agree(read)
}
