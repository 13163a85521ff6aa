//! Attention over keys that come in blocks, as they travel around the ranks of the sequence axis (arXiv:2310.01889).
//!
//! A block is one run of memory, the keys of a rank's rows and behind them their values: k (t, g*e), v (t, g*e).
//! (o, lse) hold the result over the blocks that have come so far: o = softmax over their keys, lse = ln of the sum of
//! exp of the scaled scores. The keys of the next block are merged in: l = ln(exp l0 + exp l1),
//! o = exp(l0 - l) o0 + exp(l1 - l) o1 (arXiv:2205.14135, section 3.1). The order of the blocks shows in the last bits.
//! Tensors are on the CPU.

use super::attention::{AttentionShape, Span, check, check_heads};
use crate::device::cpu;
use crate::tensor::Tensor;
use crate::tensor::arena::Buffer;

/// The block of k and v (t, g*e).
///
/// # Panics
/// If k and v have different shapes.
pub fn block(k: &Tensor, v: &Tensor) -> Buffer {
    check("v", v, k.rows(), k.width());
    let mut block = Buffer::scratch(2 * k.data().len());
    let (keys, values) = block.split_at_mut(k.data().len());
    cpu::copy::copy(k.data(), keys);
    cpu::copy::copy(v.data(), values);
    block
}

/// k and v of a block.
///
/// # Panics
/// If the block has another length.
pub fn unblock(block: &[f32], k: &mut Tensor, v: &mut Tensor) {
    let (keys, values) = halves(block);
    cpu::copy::copy(keys, k.data_mut());
    cpu::copy::copy(values, v.data_mut());
}

/// Elements of the block of `tokens` rows.
pub fn block_len(tokens: usize, shape: &AttentionShape) -> usize {
    2 * tokens * shape.kv_heads * shape.head_dim
}

/// o (t, h*e) and lse (t, h) over no keys: 0 and -inf.
pub fn begin(o: &mut Tensor, lse: &mut Tensor) {
    cpu::copy::fill(o.data_mut(), 0.0);
    cpu::copy::fill(lse.data_mut(), f32::NEG_INFINITY);
}

/// Merges attention of q (t, h*e) over the keys of a block into (o, lse), as far as `waves` say who sees what.
///
/// # Panics
/// If the shapes do not fit together, or a span lies outside of them.
pub fn forward(
    q: &Tensor,
    block: &[f32],
    waves: &[Vec<Span>],
    shape: &AttentionShape,
    o: &mut Tensor,
    lse: &mut Tensor,
) {
    check_block(q, block, waves, shape);
    check("o", o, q.rows(), q.width());
    check("lse", lse, q.rows(), shape.heads);
    let (k, v) = halves(block);
    for wave in waves {
        cpu::attention::forward_spans(q.data(), k, v, wave, shape, o.data_mut(), lse.data_mut());
    }
}

/// Adds what the keys of a block contribute to dq (t, h*e) and to the gradients of the block, `dblock`. `o` and `lse`
/// are those over all blocks; equations as `attention::backward_packed`.
///
/// # Panics
/// As `forward`.
pub fn backward(
    [q, o, lse, d_o]: [&Tensor; 4],
    block: &[f32],
    waves: &[Vec<Span>],
    shape: &AttentionShape,
    dq: &mut Tensor,
    dblock: &mut [f32],
) {
    check_block(q, block, waves, shape);
    check("o", o, q.rows(), q.width());
    check("lse", lse, q.rows(), shape.heads);
    check("d_o", d_o, q.rows(), q.width());
    check("dq", dq, q.rows(), q.width());
    assert_eq!(block.len(), dblock.len(), "the gradients of a block are shaped as the block");
    let (k, v) = halves(block);
    let (dk, dv) = dblock.split_at_mut(k.len());
    for wave in waves {
        cpu::attention::backward_spans(
            q.data(),
            k,
            v,
            o.data(),
            lse.data(),
            d_o.data(),
            wave,
            shape,
            dq.data_mut(),
            dk,
            dv,
        );
    }
}

/// sum += block, gradients of one block from two ranks.
///
/// # Panics
/// If the lengths differ.
pub fn add(block: &[f32], sum: &mut [f32]) {
    cpu::residual::add(block, sum);
}

fn halves(block: &[f32]) -> (&[f32], &[f32]) {
    block.split_at(block.len() / 2)
}

fn check_block(q: &Tensor, block: &[f32], waves: &[Vec<Span>], shape: &AttentionShape) {
    check_heads(shape);
    check("q", q, q.rows(), shape.heads * shape.head_dim);
    let width = 2 * shape.kv_heads * shape.head_dim;
    assert!(block.len().is_multiple_of(width), "attention: a block of {} values in rows of {width}", block.len());
    let key_rows = block.len() / width;
    for span in waves.iter().flatten() {
        let within = span.row + span.tokens <= q.rows() && span.key_row + span.keys <= key_rows;
        let last = (span.past + span.tokens).saturating_sub(1);
        let sees = span.tokens > 0 && span.keys > 0 && shape.visible(last).start < span.keys;
        assert!(within && sees, "attention: {span:?} of {} rows of q and {key_rows} of k", q.rows());
    }
}
