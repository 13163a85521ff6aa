//! The inputs of a job: models, rows and rewards, each file with a hash of its contents. A checkpoint keeps the hashes,
//! so that a resume detects changed contents under the same path.

use super::models::{self, JobModel};
use crate::checkpoint::Checkpoint;
use crate::comm::records;
use crate::config::Config;
use crate::config::checkpoint::ChangedInputs;
use crate::data::shard::FileHash;
use crate::data::{self, Hashes, Prepared, Reading, RowKind, SourceFile};
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::launch::run_lock::{INPUTS, PREPARED};
use crate::model::adapter_files;
use crate::model::small_files;
use crate::model::weight_files;
use crate::text::Tokenizer;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// The configuration key, then the rest of the file's name (`model.actor` and `/config.json`, `data.prompts[0]` and
/// `.bin`), then the hash of its contents.
pub type Inputs = BTreeMap<String, BTreeMap<String, String>>;

/// The inputs that a start has hashed so far.
pub struct Hashed {
    hashes: Hashes,
    inputs: Inputs,
}

impl Hashed {
    /// Shards JSONL rows, hashes the data, and compares each shard with its sidecar. All ranks call this.
    pub fn data(run: &Run, kind: RowKind, tokenizer: &Tokenizer, vocabulary: usize) -> Result<(Prepared, Self)> {
        let (config, shards) = (&run.config.data, run.dir.join(PREPARED));
        let mut hashes = Hashes::read(&run.dir.join(INPUTS));
        let reading = Reading { config, kind, tokenizer, vocabulary };
        let prepared = data::prepare(reading, &shards, &mut hashes, &run.ranks.all)?;
        let mut hashed = Self { hashes, inputs: Inputs::new() };
        let found = hashed.add(run, || Ok(prepared.files(config)))?;
        run.ranks.all.agree(prepared.check(config, &found))?;
        Ok((prepared, hashed))
    }

    /// Also hashes models and rewards. A dry run does so only if there are checkpoints, and keeps no hashes. All ranks
    /// call this.
    pub fn all(mut self, run: &Run, models: &[JobModel]) -> Result<Inputs> {
        let is_needed = !run.dry_run || run.checkpoints().exists();
        self.add(run, || if is_needed { models_and_rewards(&run.config, models) } else { Ok(Vec::new()) })?;
        for model in models.iter().filter(|_| is_needed) {
            let Some(saved) = model.spec.saved.as_ref().filter(|saved| saved.tuning.is_some()) else { continue };
            if !run.ranks.all.agree(compare_base(&saved.checkpoint, model, &self.inputs))? {
                let (dir, checkpoint) = (model.spec.dir.display(), saved.checkpoint.dir.display());
                run.recorder
                    .warn(&format!("cannot check that {dir} is the base model of {checkpoint}: it has no hashes"));
            }
        }
        let is_saver = run.ranks.world.rank == 0 && !run.dry_run;
        run.ranks.all.agree(if is_saver { self.hashes.save(&run.dir.join(INPUTS)) } else { Ok(()) })?;
        Ok(self.inputs)
    }

    /// Hashes the files that the first rank lists, because other hosts may still see an older listing.
    fn add(&mut self, run: &Run, list: impl Fn() -> Result<Vec<SourceFile>>) -> Result<BTreeMap<PathBuf, FileHash>> {
        let is_first = run.ranks.all.rank() == 0;
        let listed = run.ranks.all.agree(if is_first { list() } else { Ok(Vec::new()) })?;
        let files = records::of_first(&run.ranks.all, || listed);
        let paths: Vec<PathBuf> = files.iter().map(|file| file.path.clone()).collect();
        let found = self.hashes.hash_files(&paths, &run.ranks.all)?;
        for SourceFile { key, file, path } in files.into_iter().filter(|file| !file.key.is_empty()) {
            self.inputs.entry(key).or_default().insert(file, found[&path].xxh3.clone());
        }
        Ok(found)
    }
}

/// The existing files of models and rewards.
fn models_and_rewards(config: &Config, models: &[JobModel]) -> Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    for i in 0..models.len() {
        files.extend(model_files(models, i)?);
    }
    let of_environments = config.reward.environment.iter().flat_map(|environment| &environment.python);
    for (i, python) in config.reward.python.iter().chain(of_environments).enumerate() {
        let (key, path) = (format!("{REWARD}[{i}]"), config.base.join(&python.file));
        files.push(SourceFile { key, file: String::new(), path });
    }
    files.retain(|file| file.path.is_file());
    Ok(files)
}

/// The files of a model and of its adapter that may exist.
fn model_files(models: &[JobModel], i: usize) -> Result<Vec<SourceFile>> {
    let spec = &models[i].spec;
    // The tokenizer is the first model's.
    let small = if i == 0 { small_files::names(&spec.dir)? } else { vec!["config.json".to_owned()] };
    let of_model = small.into_iter().chain(weight_files(&spec.dir)).map(|name| (key(models, i), &spec.dir, name));
    let of_adapter = adapter_files::ALL.map(|name| (format!("{}.adapter", key(models, i)), &spec.adapter, name.into()));
    let of_adapter = of_adapter.into_iter().filter(|_| !spec.adapter.as_os_str().is_empty());
    let file = |(key, dir, name): (String, &PathBuf, String)| SourceFile {
        key,
        path: dir.join(&name),
        file: format!("/{name}"),
    };
    Ok(of_model.chain(of_adapter).map(file).collect())
}

/// Gives models with equal files one directory, so that they share a frozen base.
pub fn unify(config: &Config, all: &mut [JobModel], inputs: &Inputs) -> Result<()> {
    let hashes: Vec<_> = (0..all.len()).map(|i| inputs.get(&key(all, i))).collect();
    for i in 1..all.len() {
        let is_same = |j: &usize| hashes[i].zip(hashes[*j]).is_some_and(|(own, other)| is_same_model(own, other));
        if let Some(first) = (0..i).find(is_same) {
            let dir = all[first].spec.dir.clone();
            all[i].spec.dir = dir;
        }
    }
    models::tune(config, all)
}

/// Compares the files of the frozen base of a trained model with those of the job that saved `checkpoint`. Returns
/// whether the checkpoint has hashes of all of them.
///
/// # Errors
/// `Data`, naming files that have changed or are missing; `Io`.
pub fn check_base(checkpoint: &Checkpoint, model: &JobModel) -> Result<bool> {
    let mut now = Inputs::new();
    for SourceFile { key, file, path } in model_files(std::slice::from_ref(model), 0)? {
        if is_of_base(&file) && path.is_file() {
            now.entry(key).or_default().insert(file, FileHash::from_file(&path)?.xxh3);
        }
    }
    compare_base(checkpoint, model, &now)
}

/// The same with the hashes `now`.
fn compare_base(checkpoint: &Checkpoint, model: &JobModel, now: &Inputs) -> Result<bool> {
    let inputs = &checkpoint.manifest.state["run"]["inputs"];
    let saved: Inputs = serde_json::from_value(inputs.clone()).unwrap_or_default();
    let (mut is_known, mut changed) = (true, BTreeSet::new());
    let of_model = key(std::slice::from_ref(model), 0);
    for (key, dir) in [(of_model.clone(), &model.spec.dir), (format!("{of_model}.adapter"), &model.spec.adapter)] {
        let [saved, now] = [&saved, now].map(|inputs| inputs.get(&key).cloned().unwrap_or_default());
        let files: BTreeSet<&String> = saved.keys().chain(now.keys()).filter(|file| is_of_base(file)).collect();
        for file in files {
            match saved.get(file) {
                Some(hash) if now.get(file) != Some(hash) => drop(changed.insert(format!("{}{file}", dir.display()))),
                found => is_known &= found.is_some(),
            }
        }
    }
    if changed.is_empty() {
        return Ok(is_known);
    }
    let (dir, changed) = (checkpoint.dir.display(), changed.into_iter().collect::<Vec<_>>().join(", "));
    Err(Error::data(format!("the base model of {dir} has changed: {changed}"))
        .hint("restore the files that its job began with"))
}

/// The key of a model's files. Several models of a role are numbered.
fn key(models: &[JobModel], i: usize) -> String {
    let role = models[i].spec.role;
    let same = models[..i].iter().filter(|other| other.spec.role == role).count();
    let number = if same > 0 { format!("[{same}]") } else { String::new() };
    format!("model.{}{number}", role.name())
}

/// Whether two models have equal weights and settings, by the hashes of their files.
fn is_same_model(a: &BTreeMap<String, String>, b: &BTreeMap<String, String>) -> bool {
    let of = |files: &BTreeMap<String, String>| -> Vec<(String, String)> {
        files.iter().filter(|(name, _)| is_of_model(name)).map(|(name, hash)| (name.clone(), hash.clone())).collect()
    };
    of(a) == of(b)
}

/// Every start reads the reward again, like the learning rate.
const REWARD: &str = "reward.python";

/// Compares the inputs of a checkpoint with those of `now`, which the next checkpoint keeps. Returns the accepted
/// changes.
pub fn compare(saved: &mut Inputs, now: &Inputs, changed: ChangedInputs) -> Result<Vec<String>> {
    let (mut refused, mut accepted) = (Vec::new(), Vec::new());
    for (key, files) in now {
        // config_diff reports inputs that the run did not use before.
        let Some(before) = saved.get_mut(key) else {
            saved.insert(key.clone(), files.clone());
            continue;
        };
        let names = differences(before, files);
        // Missing weights may be back at the next start.
        before.retain(|file, _| files.contains_key(file) || is_weights(file));
        before.extend(files.clone());
        let what = match names.concat().is_empty() {
            true if names.is_empty() => continue,
            true => key.clone(),
            false => format!("{key} ({})", names.join(", ")),
        };
        let is_taken = changed == ChangedInputs::Accept || key.starts_with(REWARD);
        if is_taken { accepted.push(format!("changed contents of {what}")) } else { refused.push(what) }
    }
    if refused.is_empty() {
        return Ok(accepted);
    }
    Err(Error::usage(format!("inputs of the run in job.dir have changed since its checkpoint: {}", refused.join(", ")))
        .hint(
            "restore the old files, set another job.dir for the changed job, or accept the new files with \
         checkpoint.changed_inputs=accept",
        ))
}

/// The files of a key that differ. The name is empty if a key has only one file.
fn differences(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<String> {
    let files: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let of = |file: &String| {
        let name = file.trim_start_matches('/');
        match (before.get(file), now.get(file)) {
            (Some(was), Some(is)) => (was != is).then(|| name.to_owned()),
            (None, _) => Some(format!("{name} is new")),
            // The weights of a model that learns are in the checkpoint. Loading another model reports missing files.
            (_, None) => (!is_weights(file)).then(|| format!("{name} is missing")),
        }
    };
    files.into_iter().filter_map(of).collect()
}

/// Whether a file decides the results of a frozen base with adapters, whose own values are in a checkpoint.
fn is_of_base(file: &str) -> bool {
    is_of_model(file) && file != "/adapter_model.safetensors" || file == "/adapter_config.json"
}

/// Whether a file decides the results of a model.
fn is_of_model(file: &str) -> bool {
    is_weights(file) || file == "/config.json"
}

fn is_weights(file: &str) -> bool {
    file.contains(".safetensors")
}
