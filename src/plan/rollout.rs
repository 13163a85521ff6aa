//! What an engine takes beside its cache.

use super::shape::Dims;
use crate::config::rollout::RolloutConfig;
use crate::model::Arch;
use crate::tensor::DType;

/// The most that one forward over `tokens` tokens takes, `rows` of which go through the head; `activation`: bytes of a value of
/// the hidden state.
fn forward_bytes(dims: &Dims, tokens: usize, rows: usize, activation: usize) -> usize {
    let row = 3 * dims.d + 2 * dims.q() + 2 * dims.kv() + 3 * dims.f;
    tokens * row * activation + rows * (dims.d * activation + dims.v * size_of::<f32>())
}

/// The most that a rank of `tensor` takes of a GPU beside weights and cache while it answers `samples` requests: the forward that reads
/// prompts beside those that decode, what graphs of decoding keep (their small tables left out), and logits that are changed
/// before a draw.
pub fn rollout_bytes(arch: &Arch, tensor: usize, rollout: &RolloutConfig, samples: usize) -> u64 {
    let (dims, rows) = (Dims::new(arch, tensor), samples.min(rollout.batch_max));
    let forward = |tokens| forward_bytes(&dims, tokens, rows, DType::Bf16.bytes());
    let graphs = if rollout.graphs { forward(rows) } else { 0 };
    let edited = if edits(rollout) { rows * dims.vocabulary * size_of::<f32>() } else { 0 };
    (forward(rollout.prefill_tokens_max + rows) + graphs + edited) as u64
}

/// Whether tokens are drawn from logits that are changed before.
fn edits(rollout: &RolloutConfig) -> bool {
    rollout.repetition_penalty != 1.0 || rollout.response_tokens_min > 0
}
