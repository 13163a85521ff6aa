//! `[model]`: which directories play which part, and in what precision.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Element type of weights. Activations and gradients are f32 on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    #[default]
    F32,
    Bf16,
}

impl DType {
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// `[model]`. Directories are Hugging Face model directories.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// The model that is trained. Required.
    pub actor: PathBuf,
    /// What the KL penalty is measured against. Empty: the actor as it was at the start.
    pub reference: PathBuf,
    /// Model that the critic starts from; one without a value head gets a new one. Empty: the actor's directory.
    pub critic: PathBuf,
    /// f32, or bf16: weights in bf16, sums and optimizer in f32.
    pub dtype: DType,
}

impl ModelConfig {
    pub fn reference_dir(&self) -> &Path {
        if self.reference.as_os_str().is_empty() { &self.actor } else { &self.reference }
    }

    pub fn critic_dir(&self) -> &Path {
        if self.critic.as_os_str().is_empty() { &self.actor } else { &self.critic }
    }
}

/// A new model with random weights. Field names are those of `model::Arch`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NewModel {
    /// `llama`, `mistral`, `qwen2` or `qwen3`.
    pub family: String,
    /// Tokens; 0: as many as the tokenizer has.
    pub vocabulary: usize,
    /// Width of the hidden state.
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// 0: width / heads.
    pub head_dim: usize,
    pub mlp_width: usize,
    /// Longest row, in tokens.
    pub context: usize,
    pub rope_theta: f64,
    pub norm_eps: f64,
    /// The head shares the embedding's matrix.
    pub tied: bool,
    /// Standard deviation of the new weights.
    pub init_std: f64,
}

impl Default for NewModel {
    fn default() -> Self {
        Self {
            family: "llama".into(),
            vocabulary: 0,
            width: 256,
            layers: 4,
            heads: 8,
            kv_heads: 4,
            head_dim: 0,
            mlp_width: 688,
            context: 2048,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            tied: false,
            init_std: 0.02,
        }
    }
}
