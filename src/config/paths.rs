//! The paths of a job: relative ones start from the folder of the job file.

use super::Config;
use super::model::ModelConfig;
use crate::hub;
use std::path::{Path, PathBuf};

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
