//! `[job]`, `[sft]`, `[gradient]`, `[eval]`: what is run, and how steps are cut.

use super::optim::GradientOrder;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What the job does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// Supervised fine-tuning: token cross-entropy.
    Sft,
    /// Proximal policy optimisation and its relatives (`ppo.advantage`).
    #[default]
    Ppo,
}

impl JobKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Ppo => "ppo",
        }
    }
}

/// What models are put on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

/// Kinds of the schema that a later release brings: refused by name, not as unknown.
pub const KINDS_TO_COME: [&str; 5] = ["reward_model", "step_reward", "dpo", "kto", "distill"];

table! {
    pub struct JobConfig {
        /// `sft` or `ppo`. Required.
        pub kind: JobKind = JobKind::Ppo,
        /// Shown in the banner.
        pub name: String = "rlhf".into(),
        /// Run directory: metrics, checkpoints, export, logs. Re-running the same line resumes from it.
        pub dir: PathBuf = "runs/rlhf".into(),
        /// Seed of every random draw.
        pub seed: u64 = 42,
        /// Optimisation rounds: one rollout phase each for ppo, one optimizer step each for sft. 0: as many as
        /// `sft.epochs` gives (sft only).
        pub steps: u64 = 0,
        /// cpu | gpu | auto.
        pub device: DeviceName = DeviceName::Auto,
        /// `auto`, `nccl` or `mpi`: how values on GPUs go from rank to rank.
        pub collectives: Collectives = Collectives::Auto,
        /// exact | cublaslt | auto: GEMMs on a GPU.
        pub gemm: Gemm = Gemm::Auto,
        /// Whether a run that starts a GPU first compares its kernels with the CPU, and what collectives bring with what was sent.
        pub check: bool = true,
        /// Threads a rank computes with. 0: cores of the affinity mask / ranks of the host.
        pub threads: usize = 0,
        /// Write `export/`, a Hugging Face directory, when the job is done.
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
    /// All tokens: continued pretraining.
    All,
}

table! {
    pub struct SftConfig {
        /// Passes over the rows, where `job.steps` is 0. The last may be a fraction.
        pub epochs: f64 = 1.0,
        /// Rows of one optimizer step, over all ranks.
        pub minibatch_samples: usize = 64,
        /// Tokens of one packed forward and backward on one rank.
        pub microbatch_tokens_max: usize = 8192,
        /// Which tokens are learned: response | all.
        pub loss_on: LossOn = LossOn::Response,
    }
}

table! {
    pub struct GradientConfig {
        /// `fast`: one chunk a rank, summed as MPI likes. `fixed`: `gradient.chunks` chunks keyed by global sample, summed as
        /// a binary tree, so that 1, 2, 4 ... ranks are bitwise equal.
        pub order: GradientOrder = GradientOrder::Fast,
        /// Chunks of a minibatch under `order = "fixed"`.
        pub chunks: usize = 8,
        /// Keep only the input of each block and compute its forward again in the backward pass, but for its last product
        /// (activation recomputation, arXiv:1604.06174): less memory, about a quarter more compute.
        pub recompute: bool = false,
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
        /// Steps between evaluations; there is one before the first step and one after the last, too. 0: never.
        pub every_steps: u64 = 0,
        /// Rows of the eval split that are used. 0: all.
        pub samples_max: usize = 0,
        /// A response counts as correct from this score on.
        pub correct_at: f32 = 1.0,
    }
}
