//! What an engine takes of a GPU beside its cache.

use crate::config::rollout::RolloutConfig;
use crate::model::{Arch, TensorPart};
use crate::tensor::DType::Bf16;

/// The most that a rank of `tensor` takes of a GPU beside weights and cache while it answers `samples` requests: the forward that reads
/// prompts beside those that decode, what graphs of decoding keep (their small tables left out), and logits that are changed
/// before a draw.
pub fn forward_bytes(arch: &Arch, tensor: usize, rollout: &RolloutConfig, samples: usize) -> u64 {
    let (part, rows) = (TensorPart::fullest(arch, tensor), samples.min(rollout.batch_max));
    let (queries, keys) = (part.heads(arch).len() * arch.head_dim, part.kv_heads(arch).len() * arch.head_dim);
    let row = 3 * arch.width + 2 * queries + 2 * keys + 3 * part.range(arch.mlp_width).len();
    let logits = part.range(arch.vocabulary).len() * size_of::<f32>();
    // `rows` of the tokens go through the head.
    let forward = |tokens: usize| tokens * row * Bf16.bytes() + rows * (arch.width * Bf16.bytes() + logits);
    let graphs = if rollout.graphs { forward(rows) } else { 0 };
    let edits = rollout.repetition_penalty != 1.0 || rollout.response_tokens_min > 0;
    let edited = if edits { rows * arch.vocabulary * size_of::<f32>() } else { 0 };
    (forward(rollout.prefill_tokens_max + rows) + graphs + edited) as u64
}
