//! The schema of a job. Every key has its type and default here. Its meaning, unit, legal values and paper are only in
//! `jobs/reference.toml`, and a test checks that both have equal keys and defaults.

/// A table of a job: each key with its type, its default and, for numbers, its range.
macro_rules! table {
    (
        $(#[$about:meta])*
        pub struct $name:ident { $($(#[$about_key:meta])* pub $key:ident: $type:ty = $default:expr $(=> $range:expr)?,)* }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
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
pub mod checkpoint;
pub mod data;
pub mod distill;
mod effect;
pub mod job;
pub mod labelled;
pub mod limits;
mod load;
pub mod mesh;
pub mod metrics;
pub mod model;
pub mod optim;
pub mod ppo;
pub mod preference;
pub mod reference;
pub mod reward;
pub mod rollout;
mod schema;
mod values;
mod verl;

pub use aliases::{nearest, override_for};
pub use load::{load, parse};
pub use schema::schema;

use crate::error::{Error, Result};
use crate::mesh::Mesh;
use distill::DistillConfig;
use job::{DeviceName, EvalConfig, Gemm, GradientConfig, JobConfig, JobKind, SftConfig};
use labelled::{KtoConfig, StepRewardConfig};
use limits::{Ranged, Ranges};
use model::DTypeName;
use ppo::{Correction, Estimator, KlIn, OldLogprobs, PolicyLossKind};
use preference::{DpoConfig, PreferenceLoss, RewardModelConfig};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Every key of a table by its path, `job.kind`, with its value.
pub fn flat(table: &Table) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for (key, value) in table {
        match value {
            Value::Table(inner) => all.extend(flat(inner).into_iter().map(|(rest, v)| (format!("{key}.{rest}"), v))),
            value => drop(all.insert(key.clone(), value.clone())),
        }
    }
    all
}

/// The name of a value in a job file: `reinforce++`.
pub fn name(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|word| Some(word.as_str()?.to_string())).expect("a value with a name")
}

/// The seconds that a collective waits in addition to the longest reward.
const COLLECTIVE_MARGIN_S: f64 = 30.0;

/// The tables of a job that hold numbers, with their ranges.
const TABLES: [(&str, Ranges); 20] = [
    ("job", JobConfig::RANGES),
    ("mesh", mesh::MeshConfig::RANGES),
    ("data.split", data::SplitConfig::RANGES),
    ("data", data::DataConfig::RANGES),
    ("rollout.dynamic_sampling", rollout::DynamicSampling::RANGES),
    ("rollout", rollout::RolloutConfig::RANGES),
    ("reward", reward::RewardConfig::RANGES),
    ("ppo", ppo::PpoConfig::RANGES),
    ("sft", SftConfig::RANGES),
    ("reward_model", RewardModelConfig::RANGES),
    ("dpo", DpoConfig::RANGES),
    ("kto", KtoConfig::RANGES),
    ("step_reward", StepRewardConfig::RANGES),
    ("distill", DistillConfig::RANGES),
    ("gradient", GradientConfig::RANGES),
    ("optim.actor", optim::OptimConfig::RANGES),
    ("optim.critic", optim::OptimConfig::RANGES),
    ("eval", EvalConfig::RANGES),
    ("checkpoint", checkpoint::CheckpointConfig::RANGES),
    ("metrics", metrics::MetricsConfig::RANGES),
];

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
    pub reward_model: RewardModelConfig,
    pub dpo: DpoConfig,
    pub kto: KtoConfig,
    pub step_reward: StepRewardConfig,
    pub distill: DistillConfig,
    pub gradient: GradientConfig,
    pub optim: optim::OptimRoles,
    pub eval: EvalConfig,
    pub checkpoint: checkpoint::CheckpointConfig,
    pub metrics: metrics::MetricsConfig,
    /// The base folder of relative paths, the folder of the job file.
    #[serde(skip)]
    pub base: PathBuf,
    /// The paths of the keys that the job file or an override sets, for `unused`.
    #[serde(skip)]
    pub given: Vec<String>,
}

impl Config {
    /// Sets the tokens of a micro-batch if the job leaves them to the plan.
    pub fn set_microbatches(&mut self, tokens: usize) {
        for method in [
            &mut self.ppo.microbatch_tokens_max,
            &mut self.sft.microbatch_tokens_max,
            &mut self.reward_model.microbatch_tokens_max,
            &mut self.dpo.microbatch_tokens_max,
            &mut self.kto.microbatch_tokens_max,
            &mut self.step_reward.microbatch_tokens_max,
            &mut self.distill.microbatch_tokens_max,
        ] {
            if *method == auto::AUTO {
                *method = tokens;
            }
        }
    }

    /// Checks what types cannot: ranges, combinations of values, and values that this release does not support.
    pub fn check(&self) -> Result<()> {
        self.check_ranges()?;
        self.data.check()?;
        self.optim.actor.check("optim.actor")?;
        self.checkpoint.check(&self.eval)?;
        self.check_eval().and(self.check_rollout_ranks())?;
        if self.job.kind == JobKind::Eval {
            self.reward.check()?;
            self.rollout.check()?;
        } else if self.job.kind == JobKind::Ppo {
            Error::need(self.job.steps > 0, "job.steps must be at least 1 in a ppo job (got 0)")?;
            self.reward.check()?;
            self.rollout.check()?;
            self.ppo.check()?;
            self.optim.critic.check("optim.critic")?;
            let (prompts, samples) = (self.rollout.prompts_per_step, self.rollout.samples_per_prompt);
            let (all, most) = (prompts * samples, limits::SAMPLES_MAX);
            Error::need(
                all <= most,
                format!(
                    "rollout.prompts_per_step x rollout.samples_per_prompt must be at most {most} responses per step \
                     (got {prompts} x {samples} = {all})"
                ),
            )?;
            if self.ppo.advantage.is_grouped() && samples < 2 {
                let name = name(&self.ppo.advantage);
                return Err(Error::usage(format!(
                    "rollout.samples_per_prompt must be at least 2 with ppo.advantage = \"{name}\" (got {samples})"
                ))
                .hint("raise rollout.samples_per_prompt: this estimator compares the samples of a prompt"));
            }
            let (has_texts, coef) = (!self.data.pretrain.is_empty(), self.ppo.ptx_coef);
            Error::need(
                has_texts == (coef > 0.0),
                format!("ppo.ptx_coef must be above 0 if data.pretrain is set, and 0 otherwise (got {coef})"),
            )?;
            let is_random = self.rollout.temperature > 0.0;
            Error::need(is_random, "rollout.temperature must be above 0 in a ppo job (got 0)")?;
        } else {
            if self.job.kind == JobKind::Distill {
                self.check_distill()?;
            }
            let (of, epochs) = (name(&self.job.kind), self.epochs());
            let (is_sft, has_texts, coef) =
                (self.job.kind == JobKind::Sft, !self.data.pretrain.is_empty(), self.sft.pretrain_coef);
            Error::need(
                !is_sft || has_texts == (coef > 0.0),
                format!("sft.pretrain_coef must be above 0 if data.pretrain is set, and 0 otherwise (got {coef})"),
            )?;
            Error::need(is_sft || !has_texts, format!("data.pretrain is set, but {of} jobs do not use it"))?;
            Error::need(
                self.job.steps > 0 || epochs > 0.0,
                format!("{of}.epochs or job.steps must be above 0 (got {epochs} and 0)"),
            )?;
            if self.job.kind == JobKind::StepReward {
                self.step_reward.check()?;
            }
        }
        for (key, path) in [("job.dir", &self.job.dir), ("model.actor", &self.model.actor)] {
            Error::need(!path.as_os_str().is_empty(), format!("{key} must be a directory (got an empty string)"))?;
        }
        if self.job.gemm == Gemm::Cublaslt && self.job.device == DeviceName::Cpu {
            return Err(Error::usage("job.gemm = \"cublaslt\" needs GPUs (got job.device = \"cpu\")")
                .hint("set job.gemm = \"exact\" or \"auto\", or job.device = \"gpu\""));
        }
        Ok(())
    }

    /// Rejects rollout ranks of their own, or a rollout that runs ahead, in jobs that do not support them.
    fn check_rollout_ranks(&self) -> Result<()> {
        let ahead = self.mesh.async_updates_max > 0;
        if self.job.kind != JobKind::Ppo && (ahead || self.mesh.rollout_is_apart()) {
            let kind = name(&self.job.kind);
            return Err(Error::usage(format!(
                "rollout ranks of their own are for ppo jobs only (got job.kind = \"{kind}\")"
            ))
            .hint("remove \"rollout\" from mesh.placement, and mesh.async_updates_max"));
        }
        if ahead && self.rollout.dynamic_sampling.is_on() {
            return Err(Error::usage(
                "mesh.async_updates_max does not support rollout.dynamic_sampling, whose rounds wait for scores",
            )
            .hint("set mesh.async_updates_max = 0; the rollout can still have ranks of its own"));
        }
        if self.mesh.async_updates_max > 1 && !self.reward.environment.is_empty() {
            let k = self.mesh.async_updates_max;
            return Err(Error::usage(format!(
                "mesh.async_updates_max must be at most 1 with reward.environment, whose turns cannot change weights (got {k})"
            ))
            .hint("set mesh.async_updates_max = 1"));
        }
        self.mesh.check_async()
    }

    fn check_eval(&self) -> Result<()> {
        self.eval.check()?;
        if self.eval.beams > 1 && !self.reward.environment.is_empty() {
            return Err(Error::usage("eval.beams does not support reward.environment, whose turns are sampled")
                .hint("remove eval.beams"));
        }
        if self.data.eval_sets.is_empty() || matches!(self.job.kind, JobKind::Ppo | JobKind::Eval) {
            return Ok(());
        }
        let kind = name(&self.job.kind);
        Err(Error::usage(format!(
            "data.eval_sets is for ppo and eval jobs; {kind} jobs evaluate on data.eval_split only"
        ))
        .hint("remove data.eval_sets, and evaluate checkpoints or the export with job.kind = \"eval\""))
    }

    fn check_distill(&self) -> Result<()> {
        self.distill.check(&self.model, &self.rollout)?;
        if !self.mesh.placement.is_empty() {
            return Err(Error::usage(
                "mesh.placement does not support distill jobs, which have all roles on all ranks",
            )
            .hint("remove mesh.placement; mesh.zero and mesh.tensor also shard the teachers' weights"));
        }
        if !self.samples() {
            return Ok(());
        }
        if self.rollout.keep_sampling_mask {
            return Err(Error::usage(
                "rollout.keep_sampling_mask does not support distill jobs, which compare whole distributions",
            )
            .hint("remove rollout.keep_sampling_mask, which is for ppo jobs"));
        }
        self.rollout.check()?;
        if self.rollout.dynamic_sampling.is_on() && !self.reward.is_set() {
            return Err(Error::usage("rollout.dynamic_sampling keeps prompts by their rewards, but no reward is set")
                .hint("set a source in [reward], or remove [rollout.dynamic_sampling]"));
        }
        Error::need(self.rollout.temperature > 0.0, "rollout.temperature must be above 0 in a distill job (got 0)")?;
        if self.reward.is_set() { self.reward.check() } else { Ok(()) }
    }

    /// Whether responses are sampled, for training or for evaluation.
    pub fn samples(&self) -> bool {
        matches!(self.job.kind, JobKind::Ppo | JobKind::Eval)
            || self.job.kind == JobKind::Distill && self.distill.on_policy
    }

    /// Rejects numbers outside their ranges, even if the job does not use them.
    pub fn check_ranges(&self) -> Result<()> {
        let values = serde_json::to_value(self).map_err(|e| Error::fault(e.to_string()))?;
        let check = |(table, ranges): &(&str, Ranges)| {
            let settings = table.split('.').fold(&values, |values, name| &values[name]);
            limits::check_values(table, settings, ranges).err()
        };
        Error::all(TABLES.iter().filter_map(check).collect())
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

    /// The passes over the data of a job that trains on given rows.
    pub fn epochs(&self) -> f64 {
        match self.job.kind {
            JobKind::Sft | JobKind::Ppo | JobKind::Eval => self.sft.epochs,
            JobKind::RewardModel => self.reward_model.epochs,
            JobKind::Dpo => self.dpo.epochs,
            JobKind::Kto => self.kto.epochs,
            JobKind::StepReward => self.step_reward.epochs,
            JobKind::Distill => self.distill.epochs,
        }
    }

    /// The usual name of the method.
    pub fn method(&self) -> String {
        match (self.job.kind, self.dpo.loss) {
            (JobKind::Ppo, _) => {}
            (JobKind::Sft, _) => return "SFT".to_string(),
            (JobKind::Eval, _) => return "evaluation".to_string(),
            (JobKind::RewardModel, _) => return "reward model".to_string(),
            (JobKind::Kto, _) => return "KTO".to_string(),
            (JobKind::StepReward, _) => return "process reward model".to_string(),
            (JobKind::Distill, _) if self.distill.on_policy => return "on-policy distillation".to_string(),
            (JobKind::Distill, _) => return "distillation".to_string(),
            (JobKind::Dpo, PreferenceLoss::Sigmoid) if self.dpo.label_smoothing > 0.0 => return "cDPO".to_string(),
            (JobKind::Dpo, PreferenceLoss::Sigmoid) => return "DPO".to_string(),
            (JobKind::Dpo, PreferenceLoss::Ipo) => return "IPO".to_string(),
            (JobKind::Dpo, PreferenceLoss::Simpo) => return "SimPO".to_string(),
            (JobKind::Dpo, PreferenceLoss::Orpo) => return "ORPO".to_string(),
        }
        let of_estimator = match self.ppo.advantage {
            Estimator::Gae => "PPO",
            Estimator::ReinforcePp => "REINFORCE++",
            Estimator::ReinforcePpBaseline => "REINFORCE++-baseline",
            Estimator::Rloo => "RLOO",
            Estimator::Grpo => "GRPO",
            Estimator::DrGrpo => "Dr. GRPO",
            Estimator::Gdpo => "GDPO",
            Estimator::Remax => "ReMax",
        };
        match self.ppo.loss {
            PolicyLossKind::Clip => of_estimator.to_string(),
            other => format!("{of_estimator} with the {} loss", name(&other).to_uppercase()),
        }
    }

    /// Whether a reference model is loaded. A ppo job without a KL and without a named reference does not load one.
    pub fn needs_reference(&self) -> bool {
        self.job.kind == JobKind::Ppo && (self.ppo.kl_in != KlIn::None || !self.model.reference.as_os_str().is_empty())
            || self.job.kind == JobKind::Dpo && self.dpo.has_reference()
            || self.job.kind == JobKind::Kto
    }

    /// Whether the log-probabilities before the update are recomputed in the training layout. `auto` recomputes if
    /// `rollout` and `training` differ in the order of their sums, as they do with `fast` GEMMs. A rollout that runs
    /// ahead uses other weights anyway: its ratio is against the weights that sampled the tokens, unless a correction
    /// is set.
    pub fn recomputes_old_logprobs(&self, training: &Mesh, rollout: &Mesh, fast: bool) -> bool {
        match self.ppo.old_logprobs {
            OldLogprobs::Auto if self.mesh.async_updates_max > 0 => self.ppo.correction != Correction::None,
            OldLogprobs::Auto => fast || training.sequence > 1 || training.tensor != rollout.tensor,
            OldLogprobs::Rollout => false,
            OldLogprobs::Recompute => true,
        }
    }

    /// The number of responses to each prompt of a step: the samples, then the greedy one if the estimator needs it.
    pub fn responses_per_prompt(&self) -> usize {
        self.rollout.samples_per_prompt + usize::from(self.has_greedy())
    }

    /// Whether each prompt of a step also gets a greedy response.
    pub fn has_greedy(&self) -> bool {
        self.job.kind == JobKind::Ppo && self.ppo.advantage.has_greedy()
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
        if matches!(self.job.kind, JobKind::Distill | JobKind::Eval) {
            // There is no ratio to the log-probabilities at sampling.
            self.ppo.old_logprobs = ppo::OldLogprobs::Rollout;
        }
        self.data.only_evaluates = self.job.kind == JobKind::Eval;
        // Other jobs do not train on samples; distillation rejects it.
        self.rollout.keep_sampling_mask &= self.samples() && self.job.kind != JobKind::Eval;
        // There is no trained model to export.
        self.job.export &= self.job.kind != JobKind::Eval;
        if self.ppo.overlong_buffer_tokens > 0 && self.ppo.overlong_tokens_max == 0 {
            self.ppo.overlong_tokens_max = self.rollout.response_tokens_max;
        }
    }

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
    fn resolve_paths(&mut self, base: &Path) {
        let absolute = |path: &mut PathBuf| {
            if !path.as_os_str().is_empty() {
                *path = base.join(&*path);
            }
        };
        absolute(&mut self.job.dir);
        absolute(&mut self.model.actor);
        absolute(&mut self.model.reference);
        absolute(&mut self.model.critic);
        self.model.teachers.iter_mut().for_each(absolute);
        self.reward.models.iter_mut().for_each(|model| absolute(&mut model.dir));
        self.reward.judge.iter_mut().for_each(|judge| absolute(&mut judge.dir));
        self.data.relative_to(base);
        self.base = base.to_path_buf();
    }
}
