//! `[job]` and `[gradient]`: the kind of job, its device, and the sums of its gradients.

use super::limits::{COUNT, THREADS_MAX};
use super::method::JobKind;
use super::optim::GradientOrder;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use argh::FromArgValue;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::path::PathBuf;

/// The device of the models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromArgValue, Serialize, Deserialize, schemars::JsonSchema)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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
        pub kind: JobKind = <_>::default(),
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

/// The part of a forward that the backward recomputes instead of keeping it (arXiv:1604.06174).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// The least recomputation with which the job fits, according to the plan.
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

/// Deserializes a name, or true or false as in older jobs.
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
        #[schemars(transform = super::forms::or_bool)]
        pub recompute: Recompute = Recompute::Auto,
    }
}

impl GradientConfig {
    /// Rejects a fixed order of sums if stages have several parts of the layers, whose micro-batches alternate.
    pub fn check_chunks(&self, chunks: usize) -> Result<()> {
        if self.order == GradientOrder::Fast || chunks == 1 {
            return Ok(());
        }
        Err(Error::usage(format!("gradient.order = \"fixed\" needs mesh.pipeline_chunks = 1 (got {chunks})"))
            .hint("set mesh.pipeline_chunks = 1, or gradient.order = \"fast\""))
    }

    /// Rejects a fixed order of sums if the layout, `mesh` with ZeRO stage `stage`, has another order. On an expert axis
    /// the gradient of an expert is one sum over rows of several ranks, not one of each chunk of samples.
    pub fn check_layout(&self, mesh: &Mesh, stage: usize) -> Result<()> {
        let cut = mesh.sequence > 1 || mesh.tensor > 1 || mesh.expert > 1 || stage > 1;
        if self.order == GradientOrder::Fast || !cut {
            return Ok(());
        }
        Err(Error::usage(format!(
            "gradient.order = \"fixed\" needs sequence = tensor = expert = 1 and mesh.zero of at most 1 (got {mesh}, mesh.zero = {stage})"
        ))
        .hint("shard over data only with mesh.zero = 1, or set gradient.order = \"fast\""))
    }
}
