//! `[model]`: which directories play which part, and in what precision.

use crate::dtype::DType;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What a job says of the element type of its weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeName {
    /// bf16 on GPUs, f32 on CPUs.
    #[default]
    Auto,
    F32,
    Bf16,
}

/// `[model]`. Directories are Hugging Face model directories.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// The model that is trained. Required.
    pub actor: PathBuf,
    /// What the KL penalty is measured against. Empty: the model of `actor`'s directory.
    pub reference: PathBuf,
    /// Model that the critic starts from; one without a value head gets a new one. Empty: the actor's directory.
    pub critic: PathBuf,
    /// f32, or bf16: weights in bf16; sums, gradients, optimizer state and master weights in f32. auto: what the device likes.
    pub dtype: DTypeName,
}

impl ModelConfig {
    /// What weights are held in; while nobody has said on which device, as on CPUs.
    pub fn dtype(&self) -> DType {
        match self.dtype {
            DTypeName::Bf16 => DType::Bf16,
            DTypeName::F32 | DTypeName::Auto => DType::F32,
        }
    }

    pub fn reference_dir(&self) -> &Path {
        if self.reference.as_os_str().is_empty() { &self.actor } else { &self.reference }
    }

    pub fn critic_dir(&self) -> &Path {
        if self.critic.as_os_str().is_empty() { &self.actor } else { &self.critic }
    }
}
