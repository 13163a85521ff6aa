//! The recorded steps of a run. A child process with limits reads each file, so a damaged one is only an error.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::rollouts::{ENDING, step_path, steps_in};
pub use super::step_file::{RecordedSample, RecordedTokens};
use super::step_query::{Query, VERB};
use crate::comm::records;
use crate::error::{Error, Result};
use crate::experience::Experience;
use crate::sys::{files, reexec};
use serde::de::DeserializeOwned;

/// The recorded steps of `run_dir`, ascending.
pub fn steps(run_dir: &Path) -> Result<Vec<u64>> {
    steps_in(&run_dir.join("rollouts"), ENDING)
}

/// A recorded step.
#[derive(Debug)]
pub struct RecordedStep {
    pub step: u64,
    path: PathBuf,
}

impl RecordedStep {
    pub fn for_step(run_dir: &Path, step: u64) -> Self {
        Self { step, path: step_path(run_dir, step) }
    }

    /// The scores of all samples, in their order.
    pub fn scores(&self) -> Result<Vec<f32>> {
        self.ask(&Query::Scores)
    }

    /// All samples, in their order.
    pub fn samples(&self) -> Result<Vec<RecordedSample>> {
        let mut samples: Vec<RecordedSample> = self.ask(&Query::Samples)?;
        samples.iter_mut().enumerate().for_each(|(i, sample)| sample.index = i);
        Ok(samples)
    }

    /// The per-token arrays of these samples.
    pub fn tokens(&self, samples: Vec<usize>) -> Result<Vec<RecordedTokens>> {
        self.ask(&Query::Tokens(samples))
    }

    /// All samples with all that the file holds of them, in their order. `Response::prompt` counts the groups of samples
    /// of one prompt.
    pub fn experience(&self) -> Result<Vec<Experience>> {
        self.ask(&Query::Experience)
    }

    /// The hash of the configuration of the job that recorded the step.
    pub fn config_hash(&self) -> Result<String> {
        self.ask(&Query::ConfigHash)
    }

    fn ask<T: DeserializeOwned>(&self, query: &Query) -> Result<T> {
        let path = &self.path;
        // Only a regular file cannot make the child wait.
        files::open(path).map_err(|e| Error::io("read", path, &e))?;
        let (step, query) = (self.step.to_string(), serde_json::to_string(query).expect("a query serializes"));
        let arguments = [OsStr::new(VERB), path.as_os_str(), OsStr::new(&step), OsStr::new(&query)];
        let output = reexec::run(&arguments).map_err(|e| Error::io("start a process to read", path, &e))?;
        let answer: Result<Result<T>> = records::decode(&output.stdout);
        answer
            .ok()
            .filter(|_| output.status.success())
            .unwrap_or_else(|| {
                let (path, why) = (path.display(), reexec::describe(&output));
                Err(Error::data(format!("cannot read {path}: HDF5 does not accept it ({why})")))
            })
            .map_err(|e| e.hint("the file is damaged: restore it from a copy, or remove it"))
    }
}
