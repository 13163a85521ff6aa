//! `[job]`, `[sft]`, `[gradient]`, `[eval]`: the kind of job, and the division of its steps.

use super::limits::{COUNT, FINITE, SAMPLES, THREADS_MAX, TOKENS};
use super::optim::GradientOrder;
use super::rollout::TEMPERATURE_MIN;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use argh::FromArgValue;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::path::PathBuf;

/// The kind of job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// Supervised fine-tuning: token cross-entropy.
    Sft,
    /// A model that scores, trained on preferences.
    RewardModel,
    /// A policy trained on preferences themselves: DPO and its relatives (`dpo.loss`).
    Dpo,
    /// A policy trained on single responses that are labeled good or bad.
    Kto,
    /// A process reward model: it labels the steps of a response.
    StepReward,
    /// A student that learns the distributions of teachers, on rows or on its own samples (`distill.on_policy`).
    Distill,
    /// An evaluation of responses to held-out prompts, without training.
    Eval,
    /// Proximal policy optimization and its relatives (`ppo.advantage`).
    #[default]
    Ppo,
}

/// The device of the models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromArgValue, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceName {
    Cpu,
    /// One GPU per rank.
    Gpu,
    /// `gpu` if any rank sees a GPU, else `cpu`. The GPU must support the models and pass the self-test.
    #[default]
    Auto,
}

/// The backend for collectives of values on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collectives {
    /// NCCL over each axis whose ranks have the library and a GPU each; MPI over the others.
    #[default]
    Auto,
    /// NCCL; an error if that is not possible.
    Nccl,
    /// MPI through host memory.
    Mpi,
}

/// The backend of GEMMs on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gemm {
    /// Our own kernels: the result of a row is bit-identical in every batch.
    Exact,
    /// cuBLASLt for GEMMs of many rows; old log-probabilities are recomputed.
    Cublaslt,
    /// The faster one, according to two GEMMs that are timed at the start; `exact` if there is no cuBLASLt.
    #[default]
    Auto,
}

table! {
    pub struct JobConfig {
        pub kind: JobKind = JobKind::Ppo,
        pub name: String = String::new(),
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
    /// Whether GEMMs may use cuBLASLt; under `auto` this is decided at the start of the run.
    pub fn may_be_fast(&self) -> bool {
        self.device == DeviceName::Gpu && self.gemm != Gemm::Exact
    }
}

/// The tokens that a supervised loss counts.
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

/// The part of a forward that the backward recomputes instead of keeping it (arXiv:1604.06174).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// The least recomputation with which the plan finds that the job fits.
    #[default]
    Auto,
    None,
    /// The norm, the projections and the attention of each block, but not their contribution to the residual stream
    /// (arXiv:2205.05198).
    Attention,
    /// Everything in each block except its input.
    Block,
}

impl From<bool> for Recompute {
    fn from(block: bool) -> Self {
        if block { Self::Block } else { Self::None }
    }
}

/// A name, or true or false as in older jobs.
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
    /// Rejects a fixed order of sums if the layout, `mesh` with ZeRO stage `stage`, has another order.
    pub fn check_layout(&self, mesh: &Mesh, stage: usize) -> Result<()> {
        let cut = mesh.sequence > 1 || mesh.tensor > 1 || stage > 1;
        if self.order == GradientOrder::Fast || !cut {
            return Ok(());
        }
        Err(Error::usage(format!(
            "gradient.order = \"fixed\" needs sequence = tensor = 1 and mesh.zero of at most 1 (got {mesh}, mesh.zero = {stage})"
        ))
        .hint("shard over data only with mesh.zero = 1, or set gradient.order = \"fast\""))
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
    /// Rejects numbers of samples that have no meaning.
    pub fn check(&self) -> Result<()> {
        let (n, t) = (self.samples_per_prompt, self.temperature);
        Error::need(
            t == 0.0 || t >= TEMPERATURE_MIN,
            format!("eval.temperature must be 0 (greedy) or at least {TEMPERATURE_MIN} (got {t})"),
        )?;
        if let Some(k) = self.pass_at.iter().find(|k| !(1..=n).contains(*k)) {
            return Err(Error::usage(format!(
                "eval.pass_at must be between 1 and eval.samples_per_prompt = {n} (got {k})"
            ))
            .hint("raise eval.samples_per_prompt: pass@k needs at least k samples of a prompt"));
        }
        if n > 1 && t == 0.0 {
            return Err(Error::usage(format!("eval.samples_per_prompt must be 1 with eval.temperature = 0 (got {n})"))
                .hint("set eval.temperature, for example to 1.0: at temperature 0 all samples of a prompt are equal"));
        }
        Ok(())
    }

    /// Whether samples use a temperature of their own instead of the rollout's.
    pub fn draws(&self) -> bool {
        self.temperature > 0.0
    }
}
