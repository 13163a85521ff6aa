//! The models of a job: described by their directories, and checked against each other.

use super::saved::{self, Saved};
use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::config::job::DeviceName;
use crate::config::mesh::{Auto, RoleName};
use crate::config::model::{Quantize, Vision};
use crate::config::optim::OptimConfig;
use crate::error::{Error, Result};
use crate::learn::role;
use crate::model::adapter_config::{AdapterConfig, Task};
use crate::model::adapter_files;
use crate::model::load::ModelFiles;
use crate::model::small_files::has_other_tokenizer;
use crate::model::tuning::Tuning;
use crate::model::{Arch, Head, ParamTable};
use crate::sys::stderr;
use crate::text::Tokenizer;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub struct ModelSpec {
    pub role: RoleName,
    pub dir: PathBuf,
    /// The directory of an adapter that the model starts with; empty for none.
    pub adapter: PathBuf,
    pub head: Head,
    /// `None` for a model that does not learn.
    pub optim: Option<OptimConfig>,
    /// The checkpoint with the values of a model that does not learn.
    pub saved: Option<Saved>,
}

impl ModelSpec {
    pub fn new(role: RoleName, dir: &Path, head: Head, optim: Option<&OptimConfig>) -> Self {
        Self { role, dir: dir.to_path_buf(), adapter: PathBuf::new(), head, optim: optim.cloned(), saved: None }
    }

    /// `model.actor`, which learns.
    pub fn actor(config: &Config, head: Head) -> Self {
        Self::new(RoleName::Actor, &config.model.actor, head, Some(&config.optim.actor))
    }

    /// A language model that does not learn.
    pub fn frozen(role: RoleName, dir: &Path) -> Self {
        Self::new(role, dir, Head::LanguageModel, None)
    }

    /// The same with its adapter. The actor and its copy have `model.adapter`, the reference has
    /// `model.reference_adapter`. A role whose directory has only an adapter has this one, on its base model or, if that
    /// is no directory here, on `model.actor`. Only a job that trains nothing has an actor in a checkpoint, whose base is
    /// that of the job that saved it.
    pub(super) fn located(mut self, config: &Config) -> Result<Self> {
        match self.role {
            RoleName::Actor | RoleName::Rollout => self.adapter.clone_from(&config.model.adapter),
            RoleName::Reference => self.adapter.clone_from(&config.model.reference_adapter),
            _ => {}
        }
        if self.role == RoleName::Actor && self.optim.is_none() && saved::is_checkpoint(&self.dir) {
            return self.of_checkpoint(config);
        }
        if adapter_files::is_alone(&self.dir) {
            if self.role == RoleName::Actor || !self.adapter.as_os_str().is_empty() {
                let (key, dir) = (role::key(self.role.name()), self.dir.display());
                return Err(Error::usage(format!("{key} must be a model (got {dir}, which has only an adapter)"))
                    .hint(format!("set {key} to the adapter's base model, and model.adapter = \"{dir}\"")));
            }
            let base = AdapterConfig::read(&self.dir)?.base_dir(&self.dir);
            self.adapter = std::mem::replace(&mut self.dir, base.unwrap_or_else(|| config.model.actor.clone()));
        }
        if self.role == RoleName::Actor && has_other_tokenizer(&self.adapter, &self.dir)? {
            let (dir, adapter) = (self.dir.display(), self.adapter.display());
            stderr::warn_once(&format!("the tokenizer is that of model.actor, {dir}; the one in {adapter} differs"));
        }
        Ok(self)
    }

    /// The directory of its base, the same for every path that leads to it.
    pub(super) fn base(&self) -> PathBuf {
        self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone())
    }

    /// The same for the actor in a checkpoint, with its frozen base.
    fn of_checkpoint(mut self, job: &Config) -> Result<Self> {
        let dir = self.dir.clone();
        let wrong = |error: Error| error.within(role::key(RoleName::Actor.name()));
        let checkpoint = Checkpoint::open(&dir).map_err(wrong)?;
        let config = saved::config_of(&checkpoint).map_err(wrong)?;
        if config.is("reward_model") {
            let what = format!("{} holds a reward model, which cannot write responses", dir.display());
            let hint = "evaluate it on data.eval_split with job.kind = \"reward_model\"";
            return Err(wrong(Error::data(what).hint(hint)));
        }
        let model = JobModel::of_checkpoint(Self::actor(&config, self.head), &config, &checkpoint).map_err(wrong)?;
        let tuning = model.arch.tuning.as_deref().cloned();
        if tuning.is_some() {
            let (shown, base, adapter) = (dir.display(), model.spec.dir, self.adapter.display());
            if !self.adapter.as_os_str().is_empty() {
                return Err(Error::usage(format!("model.adapter must be empty with {shown} (got {adapter})"))
                    .hint("the checkpoint has trained parameters of its own; leave out model.adapter"));
            }
            if !base.join("config.json").is_file() {
                let what =
                    format!("{shown} needs the model that its job began with, {}, which is gone", base.display());
                return Err(wrong(Error::data(what).hint("put it back")));
            }
            if config.model.quantize != job.model.quantize {
                let [theirs, ours] = [&config, job].map(|config| config.model.quantize);
                stderr::warn_once(&format!(
                    "model.quantize is {ours:?}, but the job of {shown} trained with {theirs:?}: its results differ"
                ));
            }
            self.dir = base;
        }
        self.saved = Some(Saved { checkpoint, tuning });
        Ok(self)
    }

    /// The architecture of an actor, with its vision tower in the table if that trains.
    fn seeing(&self, config: &Config, arch: Arch) -> Result<Arch> {
        let is_actor = matches!(self.role, RoleName::Actor | RoleName::Rollout);
        if config.model.vision == Vision::Frozen || !is_actor {
            return Ok(arch);
        }
        if config.job.device == DeviceName::Gpu {
            return Err(Error::usage("model.vision = \"train\" is not supported with job.device = \"gpu\"")
                .hint("set job.device = \"cpu\", or model.vision = \"frozen\""));
        }
        if config.mesh.pipeline != Auto::Is(1) {
            return Err(Error::usage("model.vision = \"train\" does not support mesh.pipeline")
                .hint("set mesh.pipeline = 1, or model.vision = \"frozen\""));
        }
        arch.with_tower().map_err(|e| e.within("model.vision = \"train\""))
    }

    /// Reads its config.json. A model whose adapter has a value head is a value model.
    pub fn arch(&self, config: &Config) -> Result<Arch> {
        let key = role::key(self.role.name());
        let mut arch = self.seeing(config, Arch::load(&self.dir).map_err(|e| e.within(&key))?)?;
        // The reference, too: a policy with its weights has no divergence from it.
        if config.samples() && matches!(self.role, RoleName::Actor | RoleName::Rollout | RoleName::Reference) {
            arch = arch.with_keys_in(config.rollout.kv_dtype);
        }
        if self.adapter.as_os_str().is_empty() {
            return Ok(arch);
        }
        let of_adapter = match self.role {
            RoleName::Actor | RoleName::Rollout => "model.adapter",
            RoleName::Reference => "model.reference_adapter",
            _ => &key,
        };
        if AdapterConfig::read(&self.adapter).map_err(|e| e.within(of_adapter))?.task == Task::Value {
            arch.head = Head::Value;
        }
        Ok(arch)
    }
}

/// A model of a job, of any rank, and its config.json.
pub struct JobModel {
    pub spec: ModelSpec,
    pub arch: Arch,
}

impl JobModel {
    /// The table of what trains.
    pub fn table(&self) -> ParamTable {
        ParamTable::new(&self.arch, self.spec.head)
    }

    /// The table of all parameters of the model, without adapters.
    pub fn whole(&self) -> ParamTable {
        self.files().whole()
    }

    /// A model that the job of a checkpoint trained, with the job's configuration.
    ///
    /// # Errors
    /// `Data` or `Io` if the adapter that the job began with, or the checkpoint's config.json, cannot be read.
    pub fn of_checkpoint(spec: ModelSpec, config: &Config, checkpoint: &Checkpoint) -> Result<Self> {
        let (spec, arch) = (spec.located(config)?, Arch::load(&checkpoint.dir)?);
        let arch = spec.seeing(config, arch)?.for_rows(config.row_tokens_max());
        let mut model = Self { spec, arch };
        // A checkpoint has none of the tensors outside the language model.
        model.arch = model.arch.with_others(&model.spec.dir);
        model.arch.tuning = tuning(config, &model)?.map(Arc::new);
        Ok(model)
    }

    pub(super) fn files(&self) -> ModelFiles<'_> {
        let ModelSpec { dir, adapter, head, .. } = &self.spec;
        let adapter = Some(&**adapter).filter(|dir| !dir.as_os_str().is_empty());
        ModelFiles { dir, adapter, arch: &self.arch, head: *head }
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
    config: &Config,
    specs: Vec<ModelSpec>,
    tokenizer: &Tokenizer,
    check: impl Fn(&Arch, &JobModel) -> Result<()>,
) -> Result<Vec<JobModel>> {
    let mut all: Vec<JobModel> = Vec::new();
    for spec in specs {
        let spec = spec.located(config)?;
        let mut model = JobModel { arch: spec.arch(config)?.for_rows(config.row_tokens_max()), spec };
        if model.arch.context < model.arch.positions {
            let (dir, context) = (model.spec.dir.display(), model.arch.context);
            stderr::note_once(&format!(
                "{dir}: rows have at most {context} tokens, for which LongRoPE has its short factors"
            ));
        }
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
    tune(config, &mut all)?;
    Ok(all)
}

/// The same for a plan: it rejects another vocabulary as a run does, and reads tokenizers only if the sizes differ.
pub fn planned(config: &Config, specs: Vec<ModelSpec>) -> Result<Vec<JobModel>> {
    let located = specs.into_iter().map(|spec| spec.located(config));
    let all = located.map(|spec| {
        spec.and_then(|spec| Ok(JobModel { arch: spec.arch(config)?.for_rows(config.row_tokens_max()), spec }))
    });
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

/// Sets what of each model trains. A frozen language model uses the base of a model that trains in part and has the same
/// directory.
pub fn tune(config: &Config, all: &mut [JobModel]) -> Result<()> {
    let mut tunings = all.iter().map(|model| tuning(config, model)).collect::<Result<Vec<_>>>()?;
    let bases: Vec<PathBuf> =
        all.iter().zip(&tunings).filter(|(_, tuning)| tuning.is_some()).map(|(m, _)| m.spec.base()).collect();
    if share_towers(all, &bases)? {
        tunings = all.iter().map(|model| tuning(config, model)).collect::<Result<Vec<_>>>()?;
    }
    all.iter().zip(&tunings).try_for_each(|(model, tuning)| check_tower(model, tuning.as_ref()))?;
    let is_quantized = config.model.quantize == Quantize::Nf4;
    for (model, tuning) in all.iter_mut().zip(tunings) {
        if is_quantized && matches!(config.mesh.pipeline, Auto::Is(stages) if stages > 1) {
            return Err(Error::usage(
                "model.quantize = \"nf4\" does not support mesh.pipeline, as codes are not sent from stage to stage",
            )
            .hint("set mesh.pipeline = 1: a base in nf4 rarely needs stages"));
        }
        if is_quantized && tuning.is_none() && model.spec.optim.is_some() {
            return Err(Error::usage(format!(
                "model.quantize = \"nf4\" needs frozen weights, but all of the {} trains",
                model.spec.role.name()
            ))
            .hint("set lora.rank, which trains adapters, or remove model.quantize"));
        }
        let is_base = model.spec.head == Head::LanguageModel && bases.contains(&model.spec.base());
        let frozen = || {
            let whole = model.files().whole();
            let names = whole.specs().iter().map(|spec| spec.name.clone());
            // A value head is never quantized, and no part of a base.
            let heads = names.filter(|name| *name == model.arch.head_name(Head::Value)).collect();
            Tuning { whole: heads, ..Tuning::default() }
        };
        // The whole of a model that learns trains, unless its own settings say otherwise.
        let is_frozen = (is_base || is_quantized) && !learns(model);
        model.arch.tuning = tuning.or_else(|| is_frozen.then(frozen)).map(Arc::new);
    }
    Ok(())
}

/// Gives the models on a base that has a tower in its table one, too, so that their units are the same. Returns whether
/// there were any.
fn share_towers(all: &mut [JobModel], bases: &[PathBuf]) -> Result<bool> {
    let has_tower = |model: &JobModel| model.arch.sight.as_ref().is_some_and(|sight| sight.trains);
    let towers: Vec<PathBuf> = all.iter().filter(|model| has_tower(model)).map(|model| model.spec.base()).collect();
    let mut any = false;
    for model in all {
        let base = model.spec.base();
        if bases.contains(&base) && towers.contains(&base) && !has_tower(model) {
            model.arch = model.arch.clone().with_tower()?;
            any = true;
        }
    }
    Ok(any)
}

/// Rejects a tower that is to train while all of it is frozen.
fn check_tower(model: &JobModel, tuning: Option<&Tuning>) -> Result<()> {
    let (Some(tuning), true) = (tuning, model.spec.role == RoleName::Actor && model.spec.optim.is_some()) else {
        return Ok(());
    };
    let has_tower = model.arch.sight.as_ref().is_some_and(|sight| sight.trains);
    let trains = tuning.adapters.keys().chain(&tuning.whole).any(|name| name.starts_with("model.visual."));
    if has_tower && !trains {
        return Err(Error::usage("model.vision = \"train\" has no use: all of the tower is frozen")
            .hint("name modules of the tower in lora.targets, such as \"attn.qkv\", or remove model.vision"));
    }
    Ok(())
}

/// Whether a model trains, or has the weights of one that trains.
fn learns(model: &JobModel) -> bool {
    model.spec.optim.is_some() || model.spec.role == RoleName::Rollout
}

const NEEDS_TOWER: &str = "set model.vision = \"train\" for adapters of the vision tower";

/// Whether an error names a module that the model's frozen vision tower has.
fn of_frozen_tower(model: &JobModel, error: &Error) -> bool {
    let is_frozen = model.arch.sight.as_ref().is_some_and(|sight| !sight.trains);
    is_frozen
        && ["visual.", "attn.qkv", "attn.proj", "linear_fc1", "linear_fc2"]
            .iter()
            .any(|name| error.message.contains(name))
}

/// What of a model trains, if not all of it does. The rollout's copy of the actor is made as the actor.
fn tuning(config: &Config, model: &JobModel) -> Result<Option<Tuning>> {
    if let Some(saved) = &model.spec.saved {
        return Ok(saved.tuning.clone());
    }
    let params = model.files().whole().shapes();
    let role = if model.spec.role == RoleName::Rollout { RoleName::Actor } else { model.spec.role };
    let (lora, table) = (&config.lora, config.lora.table_of(role));
    let learns = learns(model);
    let is_tuned = learns && lora.is_on(role);
    let tuned = || {
        let tuned = Tuning::lora(&lora.of_role(role), table, &params);
        tuned.map_err(|e| if of_frozen_tower(model, &e) { e.hint(NEEDS_TOWER) } else { e })
    };
    if let Some(dir) = model.files().adapter {
        // A plan has only the settings; loading checks the tensors.
        let given = AdapterConfig::read(dir)?.tuning(&params).map_err(|e| e.within(dir.display()))?;
        if is_tuned && (&given.adapters, &given.whole) != (&tuned()?.adapters, &tuned()?.whole) {
            let dir = dir.display();
            let message = format!("{table} asks for other adapters than {dir} has");
            return Err(
                Error::usage(message).hint(format!("remove [{table}]: training continues the adapter as it is"))
            );
        }
        return Ok(Some(given));
    }
    let (frozen, key) = match role {
        RoleName::Critic => (&config.model.critic_freeze, "model.critic_freeze"),
        _ => (&config.model.freeze, "model.freeze"),
    };
    match (is_tuned, learns && !frozen.is_empty()) {
        (true, true) => {
            Err(Error::usage(format!("{key} has no use with {table}.rank above 0, which freezes all but adapters"))
                .hint(format!("remove {key}, or set {table}.rank = 0")))
        }
        (true, false) => tuned().map(Some),
        (false, true) => Tuning::freeze(frozen, key, &params).map(Some),
        (false, false) => Ok(None),
    }
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
