//! The one schema of a job. Every key has a default here and a line in `jobs/reference.toml`; a test holds them equal.

pub mod checkpoint;
pub mod data;
pub mod job;
mod load;
pub mod mesh;
pub mod metrics;
pub mod model;
pub mod optim;
pub mod ppo;
pub mod reward;
pub mod rollout;

pub use load::{load, parse};

use crate::error::{Error, Result};
use job::{EvalConfig, GradientConfig, JobConfig, JobKind, SftConfig};
use ppo::KlIn;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A whole job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub job: JobConfig,
    pub model: model::ModelConfig,
    pub mesh: mesh::MeshConfig,
    pub data: data::DataConfig,
    pub rollout: rollout::RolloutConfig,
    pub reward: reward::RewardConfig,
    pub ppo: ppo::PpoConfig,
    pub sft: SftConfig,
    pub gradient: GradientConfig,
    pub optim: optim::OptimRoles,
    pub eval: EvalConfig,
    pub checkpoint: checkpoint::CheckpointConfig,
    pub metrics: metrics::MetricsConfig,
    /// Folder that relative paths start from: the job file's.
    #[serde(skip)]
    pub base: PathBuf,
}

impl Config {
    /// Checks what single keys cannot: that values fit each other and this release.
    pub fn check(&self) -> Result<()> {
        self.data.check()?;
        self.optim.actor.check("optim.actor")?;
        self.checkpoint.check()?;
        if self.job.kind == JobKind::Ppo {
            self.rollout.check()?;
            self.ppo.check()?;
            self.optim.critic.check("optim.critic")?;
            let samples = self.rollout.samples_per_prompt;
            if self.ppo.advantage.is_grouped() && samples < 2 {
                let name = self.ppo.advantage.name();
                return Err(Error::usage(format!(
                    "ppo.advantage = \"{name}\" with rollout.samples_per_prompt = {samples}, needed at least 2"
                ))
                .hint("this estimator compares the samples of a prompt with each other"));
            }
            if self.rollout.temperature <= 0.0 {
                return Err(Error::usage("rollout.temperature is 0, a ppo job samples: needed above 0"));
            }
        }
        for (key, value) in [
            ("ppo.microbatch_tokens_max", self.ppo.microbatch_tokens_max),
            ("ppo.minibatch_samples", self.ppo.minibatch_samples),
            ("sft.microbatch_tokens_max", self.sft.microbatch_tokens_max),
            ("sft.minibatch_samples", self.sft.minibatch_samples),
        ] {
            if value == 0 {
                return Err(Error::usage(format!("{key} is 0, needed at least 1")));
            }
        }
        Ok(())
    }

    /// Whether a reference model is loaded: not where no KL is asked for and none is named.
    pub fn needs_reference(&self) -> bool {
        self.ppo.kl_in != KlIn::None || !self.model.reference.as_os_str().is_empty()
    }

    /// The whole configuration as TOML, every key with its value.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is TOML")
    }

    /// 16 hexadecimal digits that tell configurations apart.
    pub fn hash(&self) -> String {
        format!("{:016x}", twox_hash::XxHash3_64::oneshot(self.to_toml().as_bytes()))
    }

    /// Makes relative paths start from `base`.
    fn resolve_paths(&mut self, base: &Path) {
        let absolute = |path: &mut PathBuf| {
            if !path.as_os_str().is_empty() && path.is_relative() {
                *path = base.join(&*path);
            }
        };
        absolute(&mut self.job.dir);
        absolute(&mut self.model.actor);
        absolute(&mut self.model.reference);
        absolute(&mut self.model.critic);
        for prefix in self.data.prompts.iter_mut().chain(&mut self.data.split.eval_files) {
            let mut path = PathBuf::from(&*prefix);
            absolute(&mut path);
            *prefix = path.display().to_string();
        }
        self.base = base.to_path_buf();
    }
}
