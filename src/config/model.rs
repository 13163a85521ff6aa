//! `[model]`: the directory of each role, and the precision.

use super::limits::FINITE;
use crate::dtype::DType;
use argh::FromArgValue;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The dtype of weights in a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromArgValue, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DTypeName {
    /// bf16 on GPUs, f32 on CPUs.
    #[default]
    Auto,
    F32,
    Bf16,
}

impl DTypeName {
    /// The dtype. Before the device is chosen, it is the one of CPUs.
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::F32 | Self::Auto => DType::F32,
        }
    }
}

/// The storage of weights that do not train.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Quantize {
    /// `model.dtype`.
    #[default]
    None,
    /// 4-bit NormalFloat (arXiv:2305.14314).
    Nf4,
}

/// What training does to the vision tower of a model that reads images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Vision {
    /// It stays as it is.
    #[default]
    Frozen,
    /// It trains with the language model or, with adapters, where they are asked for.
    Train,
}

table! {
    /// `[model]`. Directories are Hugging Face model directories.
    pub struct ModelConfig {
        pub actor: PathBuf = PathBuf::new(),
        pub reference: PathBuf = PathBuf::new(),
        pub critic: PathBuf = PathBuf::new(),
        pub teachers: Vec<PathBuf> = Vec::new(),
        pub teacher_weights: Vec<f64> = Vec::new(),
        pub adapter: PathBuf = PathBuf::new(),
        pub reference_adapter: PathBuf = PathBuf::new(),
        pub freeze: Vec<String> = Vec::new(),
        pub critic_freeze: Vec<String> = Vec::new(),
        pub vision: Vision = Vision::Frozen,
        pub quantize: Quantize = Quantize::None,
        pub dtype: DTypeName = DTypeName::Auto,
        pub router_aux_loss_coef: f64 = 0.0 => 0.0..=FINITE,
    }
}

impl ModelConfig {
    /// The dtype of weights.
    pub fn dtype(&self) -> DType {
        self.dtype.dtype()
    }

    /// The weight of each teacher: the given weights, or equal ones, divided by their sum.
    pub fn teacher_weights(&self) -> Vec<f64> {
        let given =
            if self.teacher_weights.is_empty() { &vec![1.0; self.teachers.len()] } else { &self.teacher_weights };
        given.iter().map(|weight| weight / given.iter().sum::<f64>()).collect()
    }

    pub fn reference_dir(&self) -> &Path {
        if self.reference.as_os_str().is_empty() { &self.actor } else { &self.reference }
    }
}
