//! Names of parameters.

pub(super) const LM_HEAD: &str = "lm_head.weight";
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The end of the name of a router of experts.
pub(super) const ROUTER: &str = ".mlp.gate.weight";
