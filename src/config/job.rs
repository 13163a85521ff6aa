//! `[job]`, `[sft]`, `[gradient]`, `[eval]`: what is run, and how steps are cut.

use super::limits::{COUNT, FINITE, SAMPLES, THREADS_MAX, TOKENS};
use super::optim::GradientOrder;
use super::rollout::TEMPERATURE_MIN;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use argh::FromArgValue;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::path::PathBuf;

/// What the job does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// Supervised fine-tuning: token cross-entropy.
    Sft,
    /// A model that scores, trained on preferences.
    RewardModel,
    /// A policy trained on preferences themselves: DPO and its relatives (`dpo.loss`).
    Dpo,
    /// A policy trained on single responses that are labelled good or bad.
    Kto,
    /// A process reward model: it labels the steps of a response.
    StepReward,
    /// A student that learns the distributions of teachers, on rows or on its own samples (`distill.on_policy`).
    Distill,
    /// Answers to held-out prompts, and how many are right: nothing is trained.
    Eval,
    /// Proximal policy optimisation and its relatives (`ppo.advantage`).
    #[default]
    Ppo,
}

/// What models are put on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromArgValue, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceName {
    Cpu,
    /// One GPU a rank.
    Gpu,
    /// `gpu` where every rank finds one, the models suit it and its kernels compute what the CPU does; else `cpu`.
    #[default]
    Auto,
}

/// How collectives of values on GPUs go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collectives {
    /// NCCL over each axis whose ranks have a GPU each and the library; MPI over the others.
    #[default]
    Auto,
    /// NCCL, or no run.
    Nccl,
    /// MPI through the host.
    Mpi,
}

/// Who computes GEMMs on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gemm {
    /// Our own kernels: a row has the same bits whatever else is in the batch.
    Exact,
    /// cuBLASLt for those of many rows: old log-probabilities are computed again.
    Cublaslt,
    /// The faster one, as two products say that are timed at the start; `exact` where there is no cuBLASLt.
    #[default]
    Auto,
}

table! {
    pub struct JobConfig {
        pub kind: JobKind = JobKind::Ppo,
        pub name: String = "rlhf".into(),
        pub dir: PathBuf = "runs/rlhf".into(),
        pub seed: u64 = 42 => 0.0..=i64::MAX as f64,
        pub steps: u64 = 0 => 0.0..=COUNT,
        pub device: DeviceName = DeviceName::Auto,
        pub collectives: Collectives = Collectives::Auto,
        pub gemm: Gemm = Gemm::Auto,
        pub check: bool = true,
        pub threads: usize = 0 => 0.0..=THREADS_MAX as f64,
        pub export: bool = true,
    }
}

impl JobConfig {
    /// Whether products may be cuBLASLt's; under `auto` only the start shows whether they are.
    pub fn may_be_fast(&self) -> bool {
        self.device == DeviceName::Gpu && self.gemm != Gemm::Exact
    }
}

/// Which tokens a supervised loss counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// Every response (assistant) token.
    #[default]
    Response,
    /// The last response of a row of several.
    LastResponse,
    /// All tokens: continued pretraining.
    All,
}

table! {
    pub struct SftConfig {
        pub epochs: f64 = 1.0 => 0.0..=1e6,
        pub minibatch_samples: usize = 64 => 1.0..=SAMPLES,
        #[serde(with = "super::auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
        pub loss_on: LossOn = LossOn::Response,
        pub pretrain_coef: f32 = 0.0 => 0.0..=FINITE,
    }
}

/// What of a forward the backward computes again, instead of it being kept (arXiv:1604.06174).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// The least with which the plan finds the job to fit.
    #[default]
    Auto,
    None,
    /// The norm, the projections and the attention of each block, but not what it adds to the residual stream (arXiv:2205.05198).
    Attention,
    /// All of each block but its input.
    Block,
}

impl From<bool> for Recompute {
    fn from(block: bool) -> Self {
        if block { Self::Block } else { Self::None }
    }
}

/// A word, or true and false as in older jobs.
fn recompute<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Recompute, D::Error> {
    match toml::Value::deserialize(from)? {
        toml::Value::Boolean(block) => Ok(block.into()),
        word => Recompute::deserialize(word).map_err(|e| D::Error::custom(e.message())),
    }
}

table! {
    pub struct GradientConfig {
        pub order: GradientOrder = GradientOrder::Fast,
        pub chunks: usize = 8 => 1.0..=65_536.0,
        #[serde(deserialize_with = "recompute")]
        pub recompute: Recompute = Recompute::Auto,
    }
}

impl GradientConfig {
    /// Refuses a fixed order of sums where the layout has another: `mesh` under ZeRO stage `stage`.
    pub fn check_layout(&self, mesh: &Mesh, stage: usize) -> Result<()> {
        let cut = mesh.sequence > 1 || mesh.tensor > 1 || stage > 1;
        if self.order == GradientOrder::Fast || !cut {
            return Ok(());
        }
        Err(Error::usage(format!(
            "gradient.order = \"fixed\" on {mesh} with mesh.zero = {stage}, needed sequence = tensor = 1 and zero up to 1"
        ))
        .hint("shard over data alone with mesh.zero = 1, or set gradient.order = \"fast\""))
    }
}

table! {
    pub struct EvalConfig {
        pub every_steps: u64 = 0 => 0.0..=COUNT,
        pub samples_max: usize = 0 => 0.0..=COUNT,
        pub patience: u64 = 0 => 0.0..=COUNT,
        pub correct_at: f32 = 1.0 => -FINITE..=FINITE,
        pub samples_per_prompt: usize = 1 => 1.0..=65_536.0,
        pub pass_at: Vec<usize> = vec![1],
        pub temperature: f32 = 0.0 => 0.0..=FINITE,
        pub beams: usize = 1 => 1.0..=1024.0,
    }
}

impl EvalConfig {
    /// Refuses numbers of samples that say nothing.
    pub fn check(&self) -> Result<()> {
        let (n, t) = (self.samples_per_prompt, self.temperature);
        Error::need(
            t == 0.0 || t >= TEMPERATURE_MIN,
            format!("eval.temperature is {t}, needed 0 (greedy) or at least {TEMPERATURE_MIN}"),
        )?;
        if let Some(k) = self.pass_at.iter().find(|k| !(1..=n).contains(*k)) {
            return Err(Error::usage(format!("eval.pass_at has {k}, needed from 1 to eval.samples_per_prompt = {n}"))
                .hint("raise eval.samples_per_prompt: pass@k is estimated from at least k samples of a prompt"));
        }
        if n > 1 && t == 0.0 {
            return Err(Error::usage(format!("eval.samples_per_prompt = {n} with eval.temperature = 0"))
                .hint("at temperature 0 all samples of a prompt are one: set eval.temperature, for example to 1.0"));
        }
        Ok(())
    }

    /// Whether samples are drawn at a temperature of their own, not at the rollout's.
    pub fn draws(&self) -> bool {
        self.temperature > 0.0
    }
}
