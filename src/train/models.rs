//! The models of a job: described by their directories, checked against each other, and loaded.

use super::saved;
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::optim::OptimConfig;
use crate::error::{Error, Result};
use crate::launch::run::{Run, WeightsFrom};
use crate::learn::{Learner, Role, role};
use crate::model::{Arch, Head, ParamTable};
use crate::text::Tokenizer;
use std::path::{Path, PathBuf};

pub struct ModelSpec {
    pub role: RoleName,
    pub dir: PathBuf,
    pub head: Head,
    /// `None` for a model that does not learn.
    pub optim: Option<OptimConfig>,
}

impl ModelSpec {
    pub fn new(role: RoleName, dir: &Path, head: Head, optim: Option<&OptimConfig>) -> Self {
        Self { role, dir: dir.to_path_buf(), head, optim: optim.cloned() }
    }

    /// `model.actor`, which learns.
    pub fn actor(config: &Config, head: Head) -> Self {
        Self::new(RoleName::Actor, &config.model.actor, head, Some(&config.optim.actor))
    }

    /// A language model that does not learn.
    pub fn frozen(role: RoleName, dir: &Path) -> Self {
        Self::new(role, dir, Head::LanguageModel, None)
    }

    /// Reads its config.json.
    pub fn arch(&self) -> Result<Arch> {
        Arch::load(&self.dir).map_err(|e| e.within(role::key(self.role.name())))
    }
}

/// A model of a job, of any rank, and its config.json.
pub struct JobModel {
    pub spec: ModelSpec,
    pub arch: Arch,
}

impl JobModel {
    pub fn table(&self) -> ParamTable {
        ParamTable::new(&self.arch, self.spec.head)
    }
}

/// Architectures of a job's models, each with its head, in loading order, followed by its reward model.
#[derive(Clone, Debug, PartialEq)]
pub struct Archs(pub Vec<(RoleName, Head, Arch)>);

impl Archs {
    /// The first model.
    pub fn actor(&self) -> &Arch {
        &self.0[0].2
    }

    pub fn find(&self, role: RoleName) -> Option<&Arch> {
        self.0.iter().find(|(of, ..)| *of == role).map(|(.., arch)| arch)
    }
}

pub fn learned(models: &[JobModel]) -> impl Iterator<Item = &JobModel> {
    models.iter().filter(|model| model.spec.optim.is_some())
}

/// Disk space of a checkpoint: for each learned parameter its f32 weight, both moments, and its average.
pub fn saved_bytes(models: &[JobModel]) -> usize {
    let vectors = |model: &JobModel| model.spec.optim.as_ref().map_or(0, |optim| 3 + usize::from(optim.ema_beta > 0.0));
    models.iter().map(|model| vectors(model) * size_of::<f32>() * model.table().len()).sum()
}

/// Reads each model's config.json. Rejects models that do not match the tokenizer or the first model, or that `check`
/// rejects.
pub fn described(
    specs: Vec<ModelSpec>,
    tokenizer: &Tokenizer,
    check: impl Fn(&Arch, &JobModel) -> Result<()>,
) -> Result<Vec<JobModel>> {
    let mut all: Vec<JobModel> = Vec::new();
    for spec in specs {
        let mut model = JobModel { arch: spec.arch()?, spec };
        let (known, embedded) = (tokenizer.vocabulary(), model.arch.vocabulary);
        let dir = model.spec.dir.display();
        match all.first() {
            None if known > embedded => {
                return Err(Error::data(format!(
                    "the tokenizer of {dir} has {known} tokens, but its model embeds only {embedded}, without {}",
                    tokenizer.names_from(embedded)
                ))
                .hint("put the model's own tokenizer into its directory"));
            }
            None => {}
            Some(first) => {
                if model.spec.role != RoleName::Reward {
                    model.arch = with_tokens(tokenizer, first, &model)?;
                }
                check(&first.arch, &model)?;
            }
        }
        all.push(model);
    }
    Ok(all)
}

/// The same for a plan: it rejects another vocabulary as a run does, and reads tokenizers only if the sizes differ.
pub fn planned(specs: Vec<ModelSpec>) -> Result<Vec<JobModel>> {
    let all = specs.into_iter().map(|spec| Ok(JobModel { arch: spec.arch()?, spec }));
    let mut all: Vec<JobModel> = all.collect::<Result<_>>()?;
    if let Some((first, others)) = all.split_first_mut() {
        let vocabulary = first.arch.vocabulary;
        let differs =
            |model: &&mut JobModel| model.spec.role != RoleName::Reward && model.arch.vocabulary != vocabulary;
        for model in others.iter_mut().filter(differs) {
            model.arch = with_tokens(&Tokenizer::load(&first.spec.dir)?, first, model)?;
        }
    }
    Ok(all)
}

/// The architecture of a model with the vocabulary of the first one. Rejects a model whose tokenizer differs. A model
/// without a tokenizer is accepted if its vocabulary has the same size. With the first one's tokenizer it may be larger:
/// the rest is padding, which is left off.
fn with_tokens(tokenizer: &Tokenizer, first: &JobModel, model: &JobModel) -> Result<Arch> {
    let JobModel { spec: ModelSpec { role, dir, .. }, arch } = model;
    let (name, shown, actor) = (role::key(role.name()), dir.display(), first.spec.dir.display());
    let [own, other] = [arch, &first.arch].map(|arch| arch.vocabulary);
    let of_model = if *dir == first.spec.dir { None } else { Tokenizer::find(dir)? };
    let agrees = of_model.as_ref().map(|of_model| tokenizer.agrees_with(of_model) && of_model.vocabulary() <= other);
    let what = match agrees {
        Some(true) if own > other => return Ok(arch.clone().without_padding(other)),
        Some(true) if own < other => {
            return Err(Error::data(format!(
                "{name} ({shown}) pads its vocabulary to {own} tokens, but model.actor pads it to {other}"
            ))
            .hint(format!("pad both alike with resize_token_embeddings({other}) of transformers")));
        }
        Some(false) => format!("{name}: the tokenizer of {shown} differs from the tokenizer of model.actor, {actor}"),
        None if own != other => {
            format!("{name} ({shown}) has a vocabulary of {own} tokens, but model.actor has {other}")
        }
        _ => return Ok(arch.clone()),
    };
    let hint = match role {
        RoleName::Critic => {
            "; without model.critic, the critic starts from the first of reward.models, whose tokenizer may differ"
        }
        _ => "",
    };
    Err(Error::data(what).hint(format!("use models with the same tokenizer{hint}")))
}

/// Loads the models that are on this rank, in their order. All ranks call this.
pub fn load(run: &Run, models: &[JobModel], values: WeightsFrom) -> Result<Vec<Role>> {
    let mut roles = Vec::new();
    let loaded = models.iter().filter(|model| run.ranks.has(model.spec.role)).try_for_each(|model| {
        let JobModel { spec: ModelSpec { role, dir, head, optim }, arch } = model;
        let learns = optim.is_some();
        // Only a job that trains nothing has a frozen actor.
        let is_saved =
            !learns && *role == RoleName::Actor && values != WeightsFrom::Nowhere && saved::is_checkpoint(dir);
        let values = match learns {
            true => values,
            false if values == WeightsFrom::Nowhere => values,
            false if is_saved => WeightsFrom::Checkpoint,
            false => WeightsFrom::ModelDir,
        };
        let mut role = run.role(role.name(), dir, arch, *head, values)?;
        if is_saved {
            saved::fill(run, &mut role)?;
        }
        if !learns {
            // Only master weights are made from the files.
            role.source = None;
        }
        if !learns && model.spec.role != RoleName::Rollout {
            run.offload_role(&mut role)?;
        }
        roles.push(role);
        Ok(())
    });
    run.ranks.all.agree(loaded)?;
    Ok(roles)
}

/// Adds gradients and optimizer state to the models that learn, for a run of `updates` optimizer steps. Returns the
/// frozen models as well.
pub fn learners(
    run: &Run,
    models: &[JobModel],
    roles: Vec<Role>,
    updates: u64,
    values: WeightsFrom,
) -> Result<(Vec<Learner>, Vec<Role>)> {
    let (mut learners, mut frozen) = (Vec::new(), Vec::new());
    // One after the other: if state is offloaded, the first model's state is out of memory before the second needs the
    // memory.
    for role in roles {
        let spec = models.iter().map(|model| &model.spec).find(|spec| spec.role.name() == role.name);
        match spec.and_then(|spec| spec.optim.as_ref()) {
            Some(optim) => learners.push(run.learner(role, optim, updates, values)?),
            None => frozen.push(role),
        }
    }
    Ok((learners, frozen))
}
