//! A run that computes recorded steps of another run again: `rlhf-hpc replay`.

use super::run_lock::{INPUTS, link_shards};
use crate::error::{Error, Result};
use crate::learn::Learner;
use crate::metrics::keys::Metrics;
use crate::sys::files;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a replay measures of an update.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Update {
    pub metrics: BTreeMap<String, f64>,
    /// By the model's role and the parameter's name: the norm of its gradient before the clip.
    pub gradient_norms: BTreeMap<String, BTreeMap<String, f64>>,
}

impl Update {
    /// The measurements of an update of `learners`.
    pub fn new<'a>(metrics: Metrics, learners: impl IntoIterator<Item = &'a Learner>) -> Self {
        let of = |learner: &Learner| (learner.role.name.to_owned(), learner.norms.iter().cloned().collect());
        let trained = learners.into_iter().filter(|learner| !learner.norms.is_empty());
        Self { metrics: metrics.into_iter().collect(), gradient_norms: trained.map(of).collect() }
    }
}

/// The steps that a run computes again.
#[derive(Debug, Default)]
pub struct Replay {
    /// The run that recorded them. Nothing is written there.
    pub recorded: PathBuf,
    /// The last step to compute.
    pub step: u64,
    /// The update of that step to end after; after the last one if it is not set.
    pub update: Option<usize>,
    /// Whether the scores of samples are those of the record, because a service or a user's program gave them.
    pub keeps_scores: bool,
    /// The measurements of each update of the last step.
    updates: RefCell<Vec<Update>>,
}

impl Replay {
    /// The replay of `step` of the run in `recorded`.
    pub fn new(recorded: &Path, step: u64, update: Option<usize>, keeps_scores: bool) -> Self {
        Self { recorded: recorded.to_owned(), step, update, keeps_scores, updates: RefCell::default() }
    }

    /// The updates of `step` to make, of `all` that it has.
    pub fn updates_of(&self, step: u64, all: usize) -> usize {
        self.update.filter(|_| step == self.step).map_or(all, |last| last.min(all))
    }

    /// Keeps the measurements of an update, if it is one of the last step.
    pub fn note(&self, step: u64, update: impl FnOnce() -> Update) {
        if step == self.step {
            self.updates.borrow_mut().push(update());
        }
    }

    pub fn into_updates(self) -> Vec<Update> {
        self.updates.into_inner()
    }
}

/// Makes a directory next to `run_dir` in the state that a run resumes in after the step of `checkpoint`, or begins in
/// without one: with copies of the small files, and links to the shards and to the checkpoint. If that place cannot be
/// written and `is_local`, it is among the temporary files of this host.
pub fn rewound(run_dir: &Path, checkpoint: Option<&Path>, is_local: bool) -> Result<PathBuf> {
    let name = run_dir.file_name().unwrap_or_default().to_string_lossy();
    let name = format!(".{name}.replay-{}", std::process::id());
    let next = files::parent(run_dir).join(&name);
    let dir = match std::fs::create_dir(&next) {
        Ok(()) => next,
        Err(error) if !is_local => return Err(Error::io("make", &next, &error)),
        Err(_) => {
            let dir = std::env::temp_dir().join(name);
            std::fs::create_dir(&dir).map_err(|e| Error::io("make", &dir, &e))?;
            dir
        }
    };
    link_shards(run_dir, &dir)?;
    for name in [INPUTS, "metrics.jsonl"] {
        let from = run_dir.join(name);
        if from.is_file() {
            std::fs::copy(&from, dir.join(name)).map_err(|e| Error::io("copy", &from, &e))?;
        }
    }
    if let Some(checkpoint) = checkpoint {
        let all = dir.join("checkpoints");
        files::create_dir_all(&all)?;
        let link = all.join(checkpoint.file_name().unwrap_or_default());
        std::os::unix::fs::symlink(checkpoint, &link).map_err(|e| Error::io("create", &link, &e))?;
    }
    Ok(dir)
}
