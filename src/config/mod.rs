//! The one schema of a job. Every key has its type and default here; what it means, its unit, its legal values and its paper stand in
//! `jobs/reference.toml` alone, and a test holds the keys and defaults of both equal.

/// A table of a job: each key with its type, its default and, where it is a number, its range.
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

pub mod auto;
pub mod checkpoint;
pub mod data;
pub mod distill;
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
pub mod reward;
pub mod rollout;
mod schema;
mod words;

pub use load::{load, parse};
pub use schema::schema;
pub use words::nearest;

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

/// The word by which a job says a value that has one: `reinforce++`.
pub fn name(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|word| Some(word.as_str()?.to_string())).expect("a value with a name")
}

/// What a collective waits beyond the longest reward.
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
    /// Folder that relative paths start from: the job file's.
    #[serde(skip)]
    pub base: PathBuf,
}

impl Config {
    /// Micro-batches of so many tokens where the job leaves them to the plan.
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

    /// Checks what the types cannot: ranges, values that must fit each other, and what this release does not have.
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
            Error::need(self.job.steps > 0, "job.steps is 0, a ppo job needs at least 1")?;
            self.reward.check()?;
            self.rollout.check()?;
            self.ppo.check()?;
            self.optim.critic.check("optim.critic")?;
            let (prompts, samples) = (self.rollout.prompts_per_step, self.rollout.samples_per_prompt);
            let (all, most) = (prompts * samples, limits::SAMPLES_MAX);
            Error::need(
                all <= most,
                format!(
                    "rollout.prompts_per_step = {prompts} with rollout.samples_per_prompt = {samples} are {all} responses \
                     a step, needed at most {most}"
                ),
            )?;
            if self.ppo.advantage.is_grouped() && samples < 2 {
                let name = name(&self.ppo.advantage);
                return Err(Error::usage(format!(
                    "ppo.advantage = \"{name}\" with rollout.samples_per_prompt = {samples}, needed at least 2"
                ))
                .hint("this estimator compares the samples of a prompt with each other"));
            }
            let (has_texts, coef) = (!self.data.pretrain.is_empty(), self.ppo.ptx_coef);
            Error::need(
                has_texts == (coef > 0.0),
                format!("ppo.ptx_coef is {coef}, needed above 0 where data.pretrain names texts, and 0 where not"),
            )?;
            let is_random = self.rollout.temperature > 0.0;
            Error::need(is_random, "rollout.temperature is 0, a ppo job samples: needed above 0")?;
        } else {
            if self.job.kind == JobKind::Distill {
                self.check_distill()?;
            }
            let (of, epochs) = (name(&self.job.kind), self.epochs());
            let (is_sft, has_texts, coef) =
                (self.job.kind == JobKind::Sft, !self.data.pretrain.is_empty(), self.sft.pretrain_coef);
            Error::need(
                !is_sft || has_texts == (coef > 0.0),
                format!("sft.pretrain_coef is {coef}, needed above 0 where data.pretrain names texts, and 0 where not"),
            )?;
            Error::need(
                is_sft || !has_texts,
                format!("data.pretrain names texts, of which a {of} job learns nothing"),
            )?;
            Error::need(
                self.job.steps > 0 || epochs > 0.0,
                format!("{of}.epochs is {epochs} and job.steps is 0, needed one above 0"),
            )?;
            if self.job.kind == JobKind::StepReward {
                self.step_reward.check()?;
            }
        }
        for (key, path) in [("job.dir", &self.job.dir), ("model.actor", &self.model.actor)] {
            Error::need(!path.as_os_str().is_empty(), format!("{key} is empty, needed a directory"))?;
        }
        if self.job.gemm == Gemm::Cublaslt && self.job.device == DeviceName::Cpu {
            return Err(Error::usage("job.gemm = \"cublaslt\" with job.device = \"cpu\": cuBLASLt works on GPUs")
                .hint("set job.gemm = \"exact\" or \"auto\", or job.device = \"gpu\""));
        }
        Ok(())
    }

    /// Refuses jobs whose rollout can have no ranks of its own, or cannot run ahead there.
    fn check_rollout_ranks(&self) -> Result<()> {
        let ahead = self.mesh.async_updates_max > 0;
        if self.job.kind != JobKind::Ppo && (ahead || self.mesh.rollout_is_apart()) {
            let kind = name(&self.job.kind);
            return Err(Error::usage(format!("mesh gives the rollout ranks of its own, in a {kind} job"))
                .hint("leave \"rollout\" and mesh.async_updates_max out: they are of ppo"));
        }
        if ahead && self.rollout.dynamic_sampling.is_on() {
            return Err(Error::usage(
                "mesh.async_updates_max with rollout.dynamic_sampling, whose rounds wait for scores",
            )
            .hint("set mesh.async_updates_max = 0: the rollout may have ranks of its own all the same"));
        }
        if self.mesh.async_updates_max > 1 && !self.reward.environment.is_empty() {
            let k = self.mesh.async_updates_max;
            return Err(Error::usage(format!(
                "mesh.async_updates_max = {k} with reward.environment, whose turns do not go on under other weights"
            ))
            .hint("set mesh.async_updates_max = 1"));
        }
        self.mesh.check_async()
    }

    fn check_eval(&self) -> Result<()> {
        self.eval.check()?;
        if self.eval.beams > 1 && !self.reward.environment.is_empty() {
            return Err(Error::usage("eval.beams with reward.environment, whose turns are drawn and not searched for")
                .hint("leave eval.beams out"));
        }
        if self.data.eval_sets.is_empty() || matches!(self.job.kind, JobKind::Ppo | JobKind::Eval) {
            return Ok(());
        }
        let kind = name(&self.job.kind);
        Err(Error::usage(format!("data.eval_sets is set, a {kind} job evaluates on data.eval_split alone"))
            .hint("evaluate its checkpoints or its export with job.kind = \"eval\""))
    }

    fn check_distill(&self) -> Result<()> {
        self.distill.check(&self.model, &self.rollout)?;
        if !self.mesh.placement.is_empty() {
            return Err(Error::usage("mesh.placement is set, a distill job has its roles on all ranks")
                .hint("leave mesh.placement out; mesh.zero and mesh.tensor share the teachers' weights, too"));
        }
        if !self.samples() {
            return Ok(());
        }
        if self.rollout.keep_sampling_mask {
            return Err(Error::usage("rollout.keep_sampling_mask is true, a distill job compares whole distributions")
                .hint("leave rollout.keep_sampling_mask out: it is of ppo"));
        }
        self.rollout.check()?;
        Error::need(self.rollout.temperature > 0.0, "rollout.temperature is 0, a distill job samples: needed above 0")?;
        if self.reward.is_set() { self.reward.check() } else { Ok(()) }
    }

    /// Whether responses are sampled, to learn from or to evaluate.
    pub fn samples(&self) -> bool {
        matches!(self.job.kind, JobKind::Ppo | JobKind::Eval)
            || self.job.kind == JobKind::Distill && self.distill.on_policy
    }

    /// Refuses the numbers outside their ranges, whatever the job does with them.
    pub fn check_ranges(&self) -> Result<()> {
        let values = serde_json::to_value(self).map_err(|e| Error::fault(e.to_string()))?;
        let check = |(table, ranges): &(&str, Ranges)| {
            let settings = table.split('.').fold(&values, |values, name| &values[name]);
            limits::check_values(table, settings, ranges).err()
        };
        Error::all(TABLES.iter().filter_map(check).collect())
    }

    /// Seconds for which one collective may wait, 0 for ever: at least as long as another rank's Python reward may take to start.
    pub fn collective_timeout_s(&self) -> f64 {
        let (given, reward) = (self.mesh.collective_timeout_s, &self.reward);
        if given == 0.0 || !self.samples() || reward.python.is_empty() {
            return given;
        }
        given.max((f64::from(reward.retries) + 1.0) * reward.start_timeout_s + COLLECTIVE_MARGIN_S)
    }

    /// Passes over the data of a job that learns from rows as they are.
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

    /// The method by the name that the field has for it.
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

    /// Whether a reference model is loaded: not where no KL is asked for and none is named.
    pub fn needs_reference(&self) -> bool {
        self.job.kind == JobKind::Ppo && (self.ppo.kl_in != KlIn::None || !self.model.reference.as_os_str().is_empty())
            || self.job.kind == JobKind::Dpo && self.dpo.has_reference()
            || self.job.kind == JobKind::Kto
    }

    /// Whether the log-probabilities before the update are computed again, in the training layout: asked for, or because
    /// `rollout` and `training` differ in the order of their sums, as they do where products are `fast`. Of a rollout that runs ahead
    /// they are those of other weights anyway: the ratio is against what drew the tokens, but where a correction weighs that.
    pub fn recomputes_old_logprobs(&self, training: &Mesh, rollout: &Mesh, fast: bool) -> bool {
        match self.ppo.old_logprobs {
            OldLogprobs::Auto if self.mesh.async_updates_max > 0 => self.ppo.correction != Correction::None,
            OldLogprobs::Auto => fast || training.sequence > 1 || training.tensor != rollout.tensor,
            OldLogprobs::Rollout => false,
            OldLogprobs::Recompute => true,
        }
    }

    /// Responses to each prompt of a step: the samples, and behind them the greedy one where the estimator needs it.
    pub fn responses_per_prompt(&self) -> usize {
        self.rollout.samples_per_prompt + usize::from(self.has_greedy())
    }

    /// Whether each prompt of a step is answered greedily, too.
    pub fn has_greedy(&self) -> bool {
        self.job.kind == JobKind::Ppo && self.ppo.advantage.has_greedy()
    }

    /// What the critic is made of: where nothing is named, the first reward model, else the actor.
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

    /// 16 hexadecimal digits that tell configurations apart.
    pub fn hash(&self) -> String {
        format!("{:016x}", twox_hash::XxHash3_64::oneshot(self.to_toml().as_bytes()))
    }

    /// Fills in what the device decides. Matrix products of CPUs are exact.
    pub fn settle_on(&mut self, device: DeviceName) {
        self.job.device = device;
        let on_gpu = device == DeviceName::Gpu;
        if self.model.dtype == DTypeName::Auto {
            self.model.dtype = if on_gpu { DTypeName::Bf16 } else { DTypeName::F32 };
        }
        if !on_gpu {
            self.job.gemm = Gemm::Exact;
        }
    }

    /// Fills in keys whose default is another key's value.
    fn settle(&mut self) {
        if matches!(self.job.kind, JobKind::Distill | JobKind::Eval) {
            // Nothing is compared with what they were when the tokens were drawn.
            self.ppo.old_logprobs = ppo::OldLogprobs::Rollout;
        }
        self.data.only_evaluates = self.job.kind == JobKind::Eval;
        // Nothing is learned from what other jobs draw; distillation refuses it.
        self.rollout.keep_sampling_mask &= self.samples() && self.job.kind != JobKind::Eval;
        // Nothing is trained that could be exported.
        self.job.export &= self.job.kind != JobKind::Eval;
        if self.ppo.overlong_buffer_tokens > 0 && self.ppo.overlong_tokens_max == 0 {
            self.ppo.overlong_tokens_max = self.rollout.response_tokens_max;
        }
    }

    /// Makes all paths absolute, those of rewards too: a file that holds them may lie anywhere.
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
