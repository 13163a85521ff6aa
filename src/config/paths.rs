//! The paths of a job: relative ones start from the folder of the job file.

use super::Config;
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

    /// Makes relative paths start from `base`.
    pub(super) fn resolve_paths(&mut self, base: &Path) {
        let absolute = |path: &mut PathBuf| {
            if !path.as_os_str().is_empty() {
                *path = base.join(&*path);
            }
        };
        absolute(&mut self.job.dir);
        absolute(&mut self.model.actor);
        absolute(&mut self.model.reference);
        absolute(&mut self.model.critic);
        absolute(&mut self.model.adapter);
        absolute(&mut self.model.reference_adapter);
        absolute(&mut self.checkpoint.from);
        self.model.teachers.iter_mut().for_each(absolute);
        self.reward.models.iter_mut().for_each(|model| absolute(&mut model.dir));
        self.reward.judge.iter_mut().for_each(|judge| absolute(&mut judge.dir));
        self.data.relative_to(base);
        self.base = base.to_path_buf();
    }
}
