//! Names of parameters.

pub(super) const LM_HEAD: &str = "lm_head.weight";
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The end of the name of a router of experts.
pub(super) const ROUTER: &str = ".mlp.gate.weight";
/// The end of the name of the gate of an expert that all tokens use.
pub(super) const SHARED_GATE: &str = ".shared_expert_gate.weight";
