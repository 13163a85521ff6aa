//! Shape checks for all kinds of attention.

pub use crate::device::cpu::attention::{AttentionShape, PAGE, PagedSequence, Span};
use crate::device::{cuda, null};
use crate::tensor::Tensor;

pub(super) fn check(name: &str, x: &Tensor, rows: usize, width: usize) {
    super::check("attention", name, x, rows, width);
}

pub(super) fn check_heads(shape: &AttentionShape) {
    assert!(
        shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads),
        "attention: {} heads must be a multiple of {} key/value heads",
        shape.heads,
        shape.kv_heads
    );
    assert!(shape.window != Some(0), "attention: the window must be at least 1 key");
}

/// The sum of d_o o for each row and head, on a GPU.
pub(super) fn delta(o: &Tensor, d_o: &Tensor, lse: &Tensor, shape: &AttentionShape) -> Tensor {
    let mut delta = lse.statistics(lse.rows(), lse.width());
    cuda::attention_backward::delta(o.cuda(), d_o.cuda(), shape, delta.cuda_mut());
    delta
}

/// The number of (query, key) pairs of `tokens` queries after `past` keys: query i sees past + i + 1 keys, at most
/// `window`.
pub fn pairs(past: usize, tokens: usize, window: Option<usize>) -> f64 {
    let sum = |n: usize| n as f64 * (n as f64 + 1.0) / 2.0;
    let Some(window) = window else { return sum(past + tokens) - sum(past) };
    let growing = window.clamp(past, past + tokens);
    sum(growing) - sum(past) + (past + tokens - growing) as f64 * window as f64
}

/// FLOPs of a forward: q k^T and p v are two each, for every (query, key) pair and column of q.
pub fn flops(q_width: usize, pairs: f64) -> f64 {
    4.0 * q_width as f64 * pairs
}

/// Notes the forward of attention for a plan, from the number of (query, key) pairs and the `bytes` of keys and values
/// read.
pub(super) fn note_pairs(shape: &AttentionShape, pairs: f64, bytes: f64) {
    null::note(null::ATTENTION, flops(shape.heads * shape.head_dim, pairs), bytes);
}

/// Notes the backward: four more GEMMs for the same pairs.
pub(super) fn note_backward(shape: &AttentionShape, pairs: f64) {
    null::note(null::ATTENTION_BACKWARD, 2.0 * flops(shape.heads * shape.head_dim, pairs), 0.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pair_counts_equal_those_of_the_causal_mask_and_of_a_window() {
        assert_eq!(pairs(0, 4, None), 1.0 + 2.0 + 3.0 + 4.0);
        assert_eq!(pairs(3, 2, None), 4.0 + 5.0);
        assert_eq!(pairs(3, 2, Some(2)), 2.0 + 2.0);
        assert_eq!(pairs(0, 3, Some(2)), 1.0 + 2.0 + 2.0);
        assert_eq!(pairs(0, 3, Some(9)), pairs(0, 3, None));
    }
}
