//! The schema of a job. Every key has its type and default here. Its meaning, unit, legal values and paper are only in
//! `jobs/reference.toml`, and a test checks that both have equal keys and defaults.

/// A table of a job: each key with its type, its default and, for numbers, its range.
macro_rules! table {
    (
        $(#[$about:meta])*
        pub struct $name:ident { $($(#[$about_key:meta])* pub $key:ident: $type:ty = $default:expr $(=> $range:expr)?,)* }
    ) => {
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        #[schemars(transform = crate::config::forms::with_ranges::<$name>)]
        $(#[$about])*
        pub struct $name {
            $($(#[$about_key])* pub $key: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($key: $default,)* }
            }
        }

        impl crate::config::limits::Ranged for $name {
            const RANGES: crate::config::limits::Ranges = &[$($((stringify!($key), $range),)?)*];
        }
    };
}

mod aliases;
pub mod auto;
mod check;
pub mod checkpoint;
pub mod data;
mod effect;
mod forms;
pub mod job;
mod layers;
pub mod limits;
mod load;
pub mod lora;
pub mod mesh;
pub mod method;
pub mod metric;
pub mod metrics;
pub mod model;
pub mod optim;
mod paths;
pub mod reference;
pub mod reward;
pub mod rollout;
mod schema;
mod values;
mod verl;
mod words;

pub use aliases::{keys, nearest, override_for};
pub use load::{load, parse};
pub use schema::schema;
pub use words::{flat, name};

use crate::mesh::Mesh;
use job::{DeviceName, Gemm, GradientConfig, JobConfig};
use limits::{Ranged, Ranges};
use method::ppo::{Correction, OldLogprobs};
use method::{MethodConfig, Shared, Uses};
use model::DTypeName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The seconds that a collective waits in addition to the longest reward.
const COLLECTIVE_MARGIN_S: f64 = 30.0;

macro_rules! config {
    (
        own { $($(#[$about:meta])* $kind:ident => $method:ident: $($path:ident)::+,)* }
        shared { $($(#[$about_shared:meta])* $kind_shared:ident => $shared:ident: $($path_shared:ident)::+,)* }
    ) => {
        /// A whole job.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct Config {
            pub job: JobConfig,
            pub model: model::ModelConfig,
            pub lora: lora::LoraConfig,
            pub mesh: mesh::MeshConfig,
            pub data: data::DataConfig,
            pub rollout: rollout::RolloutConfig,
            pub reward: reward::RewardConfig,
            $(pub $method: method::$($path)::+,)*
            pub gradient: GradientConfig,
            pub optim: optim::OptimRoles,
            $(pub $shared: method::$($path_shared)::+,)*
            pub checkpoint: checkpoint::CheckpointConfig,
            pub metrics: metrics::MetricsConfig,
            /// The base folder of relative paths, the folder of the job file.
            #[serde(skip)]
            pub base: PathBuf,
            /// The paths of the keys that the job file or an override sets, for `unused`.
            #[serde(skip)]
            pub given: Vec<String>,
            /// The job file, then its bases; empty for the text of a job.
            #[serde(skip)]
            pub files: Vec<PathBuf>,
            /// The keys that only a base sets, and its file.
            #[serde(skip)]
            pub of_base: BTreeMap<String, PathBuf>,
            /// Lines about names of models that are directories here, and repositories in the cache.
            #[serde(skip)]
            pub notes: Vec<String>,
        }

        /// The tables of a job that hold numbers, with their ranges.
        const TABLES: &[(&str, Ranges)] = &[
            ("job", JobConfig::RANGES),
            ("lora", lora::LoraConfig::RANGES),
            ("mesh", mesh::MeshConfig::RANGES),
            ("data.split", data::SplitConfig::RANGES),
            ("data", data::DataConfig::RANGES),
            ("rollout.dynamic_sampling", rollout::DynamicSampling::RANGES),
            ("rollout", rollout::RolloutConfig::RANGES),
            ("reward", reward::RewardConfig::RANGES),
            $((stringify!($method), method::$($path)::+::RANGES),)*
            ("gradient", GradientConfig::RANGES),
            ("optim.actor", optim::OptimConfig::RANGES),
            ("optim.critic", optim::OptimConfig::RANGES),
            $((stringify!($shared), method::$($path_shared)::+::RANGES),)*
            ("checkpoint", checkpoint::CheckpointConfig::RANGES),
            ("metrics", metrics::MetricsConfig::RANGES),
        ];

        impl Config {
            /// The settings of the job's method.
            pub fn method(&self) -> &dyn MethodConfig {
                // In the order of the kinds.
                let all: [&dyn MethodConfig; _] = [$(&self.$method,)* $(&self.$shared,)*];
                all[self.job.kind as usize]
            }

            /// Sets the tokens of a micro-batch if the job leaves them to the plan.
            pub fn set_microbatches(&mut self, tokens: usize) {
                for method in [$(&mut self.$method.microbatch_tokens_max,)*] {
                    if *method == auto::AUTO {
                        *method = tokens;
                    }
                }
            }
        }
    };
}
method::with_methods!(config);

impl Config {
    /// The kind of the job, as a job file has it.
    pub fn kind(&self) -> String {
        name(&self.job.kind)
    }

    /// Whether the job is of this kind.
    pub fn is(&self, kind: &str) -> bool {
        self.kind() == kind
    }

    /// The tables that the settings of a method are checked against.
    pub fn shared(&self) -> Shared<'_> {
        let Self { model, mesh, rollout, reward, optim, .. } = self;
        Shared { model, mesh, rollout, reward, optim }
    }

    pub fn uses(&self) -> Uses {
        self.method().uses(&self.shared())
    }

    /// A limit on the tokens of all rows, if the job sets one.
    pub fn row_tokens_max(&self) -> usize {
        let rows = match self.data.row_tokens_max {
            _ if self.samples() && self.reward.environment.is_empty() => {
                self.data.prompt_tokens_max + self.rollout.response_tokens_max
            }
            0 => usize::MAX,
            given => given,
        };
        rows.max(if self.data.pretrain.is_empty() { 0 } else { self.data.pretrain_tokens_max })
    }

    /// Whether responses are sampled, for training or for evaluation.
    pub fn samples(&self) -> bool {
        self.uses().samples
    }

    /// The seconds that a collective may wait, 0 for no limit. It is at least the time that another rank's Python
    /// reward may take to start.
    pub fn collective_timeout_s(&self) -> f64 {
        let (given, reward) = (self.mesh.collective_timeout_s, &self.reward);
        if given == 0.0 || !self.samples() || reward.python.is_empty() {
            return given;
        }
        given.max((f64::from(reward.retries) + 1.0) * reward.start_timeout_s + COLLECTIVE_MARGIN_S)
    }

    /// Whether the log-probabilities before the update are recomputed in the training layout. `auto` recomputes if
    /// `rollout` and `training` differ in the order of their sums, as they do with `fast` GEMMs. A rollout that runs
    /// ahead uses other weights anyway: its ratio is against the weights that sampled the tokens, unless a correction
    /// is set. Losses whose ratio is defined against the sampler do not recompute.
    pub fn recomputes_old_logprobs(&self, training: &Mesh, rollout: &Mesh, fast: bool) -> bool {
        match self.ppo.old_logprobs {
            OldLogprobs::Auto if self.ppo.loss.is_against_sampler() => false,
            OldLogprobs::Auto if self.mesh.async_updates_max > 0 => self.ppo.correction != Correction::None,
            OldLogprobs::Auto => fast || training.sequence > 1 || training.tensor != rollout.tensor,
            OldLogprobs::Rollout => false,
            OldLogprobs::Recompute => true,
        }
    }

    /// The number of responses to each prompt of a step: the samples, then the greedy one if the estimator needs it.
    pub fn responses_per_prompt(&self) -> usize {
        self.rollout.samples_per_prompt + usize::from(self.uses().greedy)
    }

    /// The directory of the critic's initial weights. By default the first reward model, or the actor without a reward
    /// model.
    pub fn critic_dir(&self) -> &Path {
        match (self.model.critic.as_os_str().is_empty(), self.reward.models.first()) {
            (false, _) => &self.model.critic,
            (true, Some(model)) => &model.dir,
            (true, None) => &self.model.actor,
        }
    }

    /// The whole configuration as TOML, every key with its value.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is TOML")
    }

    /// The files of a job with a base: `a.toml, based on b.toml, c.toml`.
    pub fn bases(&self) -> Option<String> {
        let shown: Vec<String> = self.files.iter().map(|file| file.display().to_string()).collect();
        let (job, bases) = shown.split_first()?;
        (!bases.is_empty()).then(|| format!("{job}, based on {}", bases.join(", ")))
    }

    /// A hash of the configuration, 16 hexadecimal digits.
    pub fn hash(&self) -> String {
        format!("{:016x}", twox_hash::XxHash3_64::oneshot(self.to_toml().as_bytes()))
    }

    /// Fills in the values that the device decides. GEMMs on CPUs are exact.
    pub fn resolve_device(&mut self, device: DeviceName) {
        self.job.device = device;
        let on_gpu = device == DeviceName::Gpu;
        if self.model.dtype == DTypeName::Auto {
            self.model.dtype = if on_gpu { DTypeName::Bf16 } else { DTypeName::F32 };
        }
        if !on_gpu {
            self.job.gemm = Gemm::Exact;
        }
    }

    /// Fills in keys whose default is another key's value, except paths.
    fn fill_defaults(&mut self) {
        let Uses { trains, samples, ratios, .. } = self.uses();
        self.data.only_evaluates = !trains;
        // Other jobs do not train on samples; distillation rejects it.
        self.rollout.keep_sampling_mask &= samples && trains;
        if samples && !ratios {
            self.ppo.old_logprobs = OldLogprobs::Rollout;
        }
        // There is no trained model to export.
        self.job.export &= trains;
        if self.ppo.overlong_buffer_tokens > 0 && self.ppo.overlong_tokens_max == 0 {
            self.ppo.overlong_tokens_max = self.rollout.response_tokens_max;
        }
    }
}
