//! Causal grouped-query attention with optional sliding window, over packed sequences and over a paged KV cache.
//!
//! o[t] = sum_j softmax_j(scale q[t].k[j]) v[j] over the keys j <= t of the same sequence (and j > t - window).
//! Keys are walked in blocks of `PAGE` tokens aligned to the start of the sequence, ascending, with online softmax, so
//! packed training, prefill in any chunking, and decode agree bitwise.

use crate::tensor::{Tensor, arena::Buffer};

/// Tokens of one KV page, and keys of one block of the softmax.
pub const PAGE: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// A query sees at most this many keys, itself included; `None`: all before it.
    pub window: Option<usize>,
    /// Usually 1 / sqrt(head_dim).
    pub scale: f32,
}

/// q (t, h*e), k and v (t, g*e), already rotated; `cu_seqlens` = [0, end of sequence 0, ...]. Writes o (t, h*e) and
/// lse (t, h), the natural log-sum-exp of the scaled scores.
pub fn forward_packed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cu_seqlens: &[usize],
    shape: &AttentionShape,
    o: &mut Tensor,
    lse: &mut Tensor,
) {
    let _ = (q, k, v, cu_seqlens, shape, o, lse);
    todo!()
}

/// Gradients of `forward_packed`; dq, dk, dv are overwritten.
pub fn backward_packed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    d_o: &Tensor,
    cu_seqlens: &[usize],
    shape: &AttentionShape,
    dq: &mut Tensor,
    dk: &mut Tensor,
    dv: &mut Tensor,
) {
    let _ = (q, k, v, o, lse, d_o, cu_seqlens, shape, dq, dk, dv);
    todo!()
}

/// The KV cache of one layer: pages of `PAGE` tokens. Keys of a page lie transposed, [g][e][PAGE], values [g][PAGE][e].
#[derive(Debug)]
pub struct KvLayer {
    pub keys: Buffer,
    pub values: Buffer,
}

/// One sequence of a paged batch: `tokens` new rows after `past` cached ones; `blocks[i]` is the page of tokens
/// i*PAGE .. (i+1)*PAGE, and covers past + tokens.
#[derive(Clone, Debug)]
pub struct PagedSequence<'a> {
    pub past: usize,
    pub tokens: usize,
    pub blocks: &'a [u32],
}

/// A KV cache of `pages` pages (contents zero).
pub fn kv_layer(pages: usize, shape: &AttentionShape) -> KvLayer {
    let _ = (pages, shape);
    todo!()
}

/// Stores the rows of k and v (t, g*e) behind the cached tokens of their sequences (rows in sequence order).
pub fn kv_append(cache: &mut KvLayer, k: &Tensor, v: &Tensor, sequences: &[PagedSequence], shape: &AttentionShape) {
    let _ = (cache, k, v, sequences, shape);
    todo!()
}

/// Attention of new rows q (t, h*e) over the cache, which already holds the new rows' keys and values. One kernel for
/// prefill, chunked prefill and decode.
pub fn forward_paged(q: &Tensor, cache: &KvLayer, sequences: &[PagedSequence], shape: &AttentionShape, o: &mut Tensor) {
    let _ = (q, cache, sequences, shape, o);
    todo!()
}

/// Copies page `from` to page `to` (a shared prefix whose last page will be written by several sequences).
pub fn kv_copy_page(cache: &mut KvLayer, from: u32, to: u32, shape: &AttentionShape) {
    let _ = (cache, from, to, shape);
    todo!()
}
