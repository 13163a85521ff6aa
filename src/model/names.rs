//! Names of parameters.

pub(super) const LM_HEAD: &str = "lm_head.weight";
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
