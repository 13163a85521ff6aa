//! Models in checkpoints: what `rlhf-hpc export` writes, and what a job that only evaluates takes in place of a model directory.

use crate::checkpoint::{self, Checkpoint, Manifest, ModelVectors};
use crate::comm::{Group, records};
use crate::config::job::JobKind;
use crate::config::mesh::RoleName;
use crate::config::{self, Config};
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::learn::Role;
use crate::model::{Arch, Head};
use std::path::Path;

/// Where a job that only evaluates names a run directory, puts its newest checkpoint in that place. All ranks call this.
pub fn locate(config: &mut Config, group: &Group) {
    if config.job.kind == JobKind::Eval {
        // Other hosts may still see an older listing.
        let found = records::of_first(group, || checkpoint::newest_of(&config.model.actor));
        config.model.actor = found.unwrap_or_else(|| config.model.actor.clone());
    }
}

/// The step of the checkpoint in `dir`; 0 of a model.
pub fn step_of(dir: &Path) -> u64 {
    Manifest::read(dir).map_or(0, |manifest| manifest.step)
}

pub fn is_checkpoint(dir: &Path) -> bool {
    dir.join(checkpoint::manifest::NAME).exists()
}

/// A model that the checkpoint's job trains, as the job itself exports it.
pub fn learned(checkpoint: &Checkpoint, role: &str) -> Result<(Arch, Head)> {
    let state = &checkpoint.manifest.state;
    let config = config::parse(state["config"].as_str().unwrap_or_default(), &[])
        .map_err(|e| e.within(checkpoint.dir.display()))?;
    let all: Vec<_> = super::models(&config).into_iter().filter(|model| model.optim.is_some()).collect();
    let Some(model) = all.iter().find(|model| model.role.name() == role) else {
        let names: Vec<&str> = all.iter().map(|model| model.role.name()).collect();
        return Err(Error::usage(format!("--role {role}: needed is {}", names.join(" or "))));
    };
    let mut arch = Arch::load(&checkpoint.dir)?;
    if config.job.kind == JobKind::RewardModel {
        arch.reward_mean_std = super::reward_model::mean_std(&state["run"]["method"])?;
    }
    Ok((arch, model.head))
}

/// Reads the actor's weights from the checkpoint in `role.dir`. All ranks of the role call this.
pub fn fill(run: &Run, role: &mut Role) -> Result<()> {
    let (all, dir) = (&run.ranks.axes.all, role.dir.clone());
    let opened = Checkpoint::open(&dir).and_then(|checkpoint| match learned(&checkpoint, RoleName::Actor.name())?.1 {
        Head::LanguageModel => Ok(checkpoint),
        Head::Value => Err(Error::data(format!("{} holds a reward model, which does not answer", dir.display()))),
    });
    let checkpoint = all.agree(opened)?;
    all.agree(checkpoint.verify(all).map_err(|e| e.hint("name another checkpoint in model.actor")))?;
    let (table, arch) = (role.weights.table.clone(), role.arch().clone());
    let read = ModelVectors::open(&checkpoint, RoleName::Actor.name(), &arch, &table)
        .and_then(|vectors| role.fill(|range, out| vectors.read("weights", range, out)))
        .map_err(|e| e.within("model.actor"));
    all.agree(read)
}
