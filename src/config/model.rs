//! The shape of a model that is made new, `[model.new]` of a job: what its config.json will say.

use serde::{Deserialize, Serialize};

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
