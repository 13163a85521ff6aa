//! Who plays on this rank: the models of the roles that its place has, checked against the actor.

use super::role::Role;
use super::setup::{Run, Values, check_context, check_same_vocabulary, check_vocabulary};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::error::Result;
use crate::model::{Arch, Head, ParamTable};
use crate::text::Tokenizer;
use std::path::{Path, PathBuf};

/// A model that the job needs, wherever it is.
pub struct Needed {
    pub role: RoleName,
    pub dir: PathBuf,
    pub arch: Arch,
    pub head: Head,
    pub learns: bool,
}

impl Needed {
    /// The table of the whole model.
    pub fn table(&self) -> ParamTable {
        ParamTable::new(&self.arch, self.head)
    }
}

/// The models that this rank plays.
pub struct Cast {
    pub actor: Option<Role>,
    pub critic: Option<Role>,
    pub reference: Option<Role>,
}

/// The models that a ppo job needs, with their directories and heads.
fn needed(config: &Config) -> Vec<(RoleName, &Path, Head, bool)> {
    let mut all = vec![(RoleName::Actor, config.model.actor.as_path(), Head::LanguageModel, true)];
    if config.ppo.advantage.has_critic() {
        all.push((RoleName::Critic, config.model.critic_dir(), Head::Value, true));
    }
    if config.needs_reference() {
        all.push((RoleName::Reference, config.model.reference_dir(), Head::LanguageModel, false));
    }
    all
}

impl Needed {
    /// What all models of the job are, the actor first: they go together, and with the tokenizer. Their weights are not
    /// looked at. All ranks call this.
    ///
    /// # Errors
    /// `Data` where a model does not fit the tokenizer, the actor or the job.
    pub fn all(run: &Run, tokenizer: &Tokenizer) -> Result<Vec<Self>> {
        run.all.agree(described(&run.config, tokenizer))
    }
}

impl Cast {
    /// The models of this rank's place; those that learn with `values`. All ranks call this.
    ///
    /// # Errors
    /// As `Role::load`.
    pub fn load(run: &Run, needed: &[Needed], values: Values) -> Result<Self> {
        let play = |role: RoleName| -> Result<Option<Role>> {
            let wanted = needed.iter().find(|n| n.role == role && run.plays(role));
            let Some(Needed { dir, arch, head, learns, .. }) = wanted else { return Ok(None) };
            if *learns {
                return run.role(role.name(), dir, arch, *head, values).map(Some);
            }
            let mut loaded = run.role(role.name(), dir, arch, *head, Values::OfTheDirectory)?;
            // It has no masters to be made from the files.
            loaded.source = None;
            run.offload_role(&mut loaded)?;
            Ok(Some(loaded))
        };
        let loaded = || Ok((play(RoleName::Actor)?, play(RoleName::Reference)?, play(RoleName::Critic)?));
        let (actor, reference, critic) = run.all.agree(loaded())?;
        Ok(Self { actor, critic, reference })
    }
}

fn described(config: &Config, tokenizer: &Tokenizer) -> Result<Vec<Needed>> {
    let mut all: Vec<Needed> = Vec::new();
    for (role, dir, head, learns) in needed(config) {
        let arch = Arch::load(dir).map_err(|e| e.within(format!("model.{}", role.name())))?;
        match all.first() {
            None => check_vocabulary(&arch, dir, tokenizer)?,
            Some(actor) => {
                check_same_vocabulary(&actor.arch, &arch, role.name())?;
                check_context(&actor.arch, &arch, role.name(), config)?;
            }
        }
        all.push(Needed { role, dir: dir.to_path_buf(), arch, head, learns });
    }
    Ok(all)
}
