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

table! {
    /// `[model]`. Directories are Hugging Face model directories.
    pub struct ModelConfig {
        pub actor: PathBuf = PathBuf::new(),
        pub reference: PathBuf = PathBuf::new(),
        pub critic: PathBuf = PathBuf::new(),
        pub dtype: DTypeName = DTypeName::Auto,
    }
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
}
