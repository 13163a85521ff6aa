//! Paths in a job: relative to the folder of their file, or on the command line to the current one.

use super::Config;
use super::model::ModelConfig;
use crate::hub;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

impl Config {
    /// Makes all paths absolute, also those of rewards, so that a file with them can be anywhere.
    pub fn make_absolute(&mut self, here: &Path) {
        let base = here.join(&self.base);
        self.resolve_paths(here);
        for python in &mut self.reward.python {
            python.file = base.join(&python.file).display().to_string();
            if python.interpreter.contains('/') {
                python.interpreter = base.join(&python.interpreter).display().to_string();
            }
        }
    }

    /// The directories of all models and adapters that the job names.
    fn model_dirs_mut(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let ModelConfig { actor, reference, critic, adapter, reference_adapter, teachers, .. } = &mut self.model;
        let own = [actor, reference, critic, adapter, reference_adapter].into_iter().chain(teachers);
        let rewards = self.reward.models.iter_mut().map(|model| &mut model.dir);
        own.chain(rewards).chain(self.reward.judge.iter_mut().map(|judge| &mut judge.dir))
    }

    /// The paths of models and rows that are in snapshots of the Hugging Face cache.
    pub fn snapshots(&self) -> Vec<PathBuf> {
        let mut config = self.clone();
        let rows = config.data.sources().map(|path| PathBuf::from(&*path)).collect::<Vec<_>>();
        let all = config.model_dirs_mut().map(|dir| dir.clone()).chain(rows);
        all.filter(|path| hub::snapshot_of(path).is_some()).collect()
    }

    /// Makes relative paths start from `base`. Names of the Hub become directories of the cache.
    pub(super) fn resolve_paths(&mut self, base: &Path) {
        let absolute = |path: &mut PathBuf| {
            if !path.as_os_str().is_empty() {
                *path = base.join(&*path);
            }
        };
        absolute(&mut self.job.dir);
        absolute(&mut self.checkpoint.from);
        let mut notes = std::mem::take(&mut self.notes);
        for dir in self.model_dirs_mut().filter(|dir| !dir.as_os_str().is_empty()) {
            *dir = hub::model_dir(base, dir, &mut notes);
        }
        self.notes = notes;
        self.data.relative_to(base);
        self.base = base.to_path_buf();
    }
}

/// Keys whose values are paths.
const PATHS: [&str; 19] = [
    "job.dir",
    "checkpoint.from",
    "model.actor",
    "model.adapter",
    "model.reference_adapter",
    "model.reference",
    "model.critic",
    "model.teachers",
    "data.prompts",
    "data.pretrain",
    "data.eval_sets",
    "data.split.eval_files",
    "reward.python",
    "reward.python.file",
    "reward.models",
    "reward.models.dir",
    "reward.judge",
    "reward.judge.dir",
    ENVIRONMENT,
];
/// A path on the command line is relative to the folder of the job file here, because the key was no path at first.
const ENVIRONMENT: &str = "reward.environment";

/// The value of an override of `path` with paths relative to `here`.
pub(super) fn of_override(path: &str, value: Value, here: &Path, notes: &mut Vec<String>) -> Value {
    if path == ENVIRONMENT || !PATHS.contains(&path) { value } else { from_here(path, value, here, false, notes) }
}

/// Makes the paths in a file of the folder `dir` absolute.
pub(super) fn make_absolute(table: &mut Table, dir: &Path, notes: &mut Vec<String>) {
    for path in PATHS {
        let mut parts: Vec<&str> = path.split('.').collect();
        let key = parts.pop().expect("a key");
        let inner = parts.iter().try_fold(&mut *table, |table, part| table.get_mut(*part)?.as_table_mut());
        if let Some(value) = inner.and_then(|table| table.get_mut(key)) {
            *value = from_here(path, value.clone(), dir, true, notes);
        }
    }
}

/// The value of `key` with paths relative to `here`; in tables only the paths in `file`, `dir` and `prompts`, and with
/// `whole` also in tables within them and of interpreters. Names of the Hub become directories of the cache.
fn from_here(key: &str, value: Value, here: &Path, whole: bool, notes: &mut Vec<String>) -> Value {
    match value {
        Value::String(path) if !path.is_empty() => {
            let is_model = ["model.", "reward.models", "reward.judge"].iter().any(|of| key.starts_with(of));
            let full = match key {
                _ if key.starts_with("data.") => hub::rows_path(here, &path),
                _ if is_model => hub::model_dir(here, Path::new(&path), notes),
                _ => here.join(path),
            };
            Value::String(full.display().to_string())
        }
        Value::Array(all) => Value::Array(all.into_iter().map(|one| from_here(key, one, here, whole, notes)).collect()),
        Value::Table(table) => {
            let of = |(name, value): (String, Value)| {
                let is_program = name == "interpreter" && value.as_str().is_some_and(|word| word.contains('/'));
                match name.as_str() {
                    "file" | "dir" | "prompts" => (name, from_here(key, value, here, whole, notes)),
                    "python" if whole => (name, from_here(key, value, here, whole, notes)),
                    _ if whole && is_program => (name, from_here(key, value, here, whole, notes)),
                    _ => (name, value),
                }
            };
            Value::Table(table.into_iter().map(of).collect())
        }
        other => other,
    }
}
