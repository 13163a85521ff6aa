//! Causal grouped-query attention with optional sliding window, over packed sequences and over a paged KV cache.
//!
//! o[t] = sum_j softmax_j(scale q[t].k[j]) v[j] over the keys j <= t of the same sequence (and j > t - window).
//! Keys are walked in blocks of `PAGE` tokens aligned to the start of the sequence, ascending, with online softmax
//! (arXiv:2205.14135), so packed training, prefill in any chunking, and decode agree bitwise.

use crate::device::{Device, cpu};
use crate::tensor::{Tensor, arena::Buffer};

pub use crate::device::cpu::attention::{AttentionShape, PAGE, PagedSequence, Span};

/// q (t, h*e), k and v (t, g*e), already rotated; `cu_seqlens` = [0, end of sequence 0, ...]. Writes o (t, h*e) and
/// lse (t, h), the natural log-sum-exp of the scaled scores.
///
/// # Panics
/// If the shapes do not fit together.
pub fn forward_packed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cu_seqlens: &[usize],
    shape: &AttentionShape,
    o: &mut Tensor,
    lse: &mut Tensor,
) {
    check_packed(q, k, v, cu_seqlens, shape);
    check("o", o, q.rows(), q.width());
    check("lse", lse, q.rows(), shape.heads);
    match q.device() {
        Device::Cpu => cpu::attention::forward_packed(
            q.data(),
            k.data(),
            v.data(),
            cu_seqlens,
            shape,
            o.data_mut(),
            lse.data_mut(),
        ),
    }
}

/// Gradients of `forward_packed`; dq, dk, dv are overwritten. With p[t][j] = exp(scale q[t].k[j] - lse[t]) and
/// delta[t] = d_o[t].o[t]: ds[t][j] = scale p[t][j] (d_o[t].v[j] - delta[t]); dq[t] = sum_j ds[t][j] k[j];
/// dk[j] = sum_t ds[t][j] q[t]; dv[j] = sum_t p[t][j] d_o[t], the last two over all heads of the key's group.
///
/// # Panics
/// If the shapes do not fit together.
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
    check_packed(q, k, v, cu_seqlens, shape);
    check("o", o, q.rows(), q.width());
    check("lse", lse, q.rows(), shape.heads);
    check("d_o", d_o, q.rows(), q.width());
    check("dq", dq, q.rows(), q.width());
    check("dk", dk, k.rows(), k.width());
    check("dv", dv, k.rows(), k.width());
    match q.device() {
        Device::Cpu => cpu::attention::backward_packed(
            q.data(),
            k.data(),
            v.data(),
            o.data(),
            lse.data(),
            d_o.data(),
            cu_seqlens,
            shape,
            dq.data_mut(),
            dk.data_mut(),
            dv.data_mut(),
        ),
    }
}

/// The KV cache of one layer: pages of `PAGE` tokens. Keys of a page lie transposed, [g][e][PAGE], values [g][PAGE][e].
#[derive(Debug)]
pub struct KvLayer {
    pub keys: Buffer,
    pub values: Buffer,
}

/// A KV cache of `pages` pages (contents zero).
pub fn kv_layer(pages: usize, shape: &AttentionShape) -> KvLayer {
    let len = pages * cpu::attention::page_len(shape);
    KvLayer { keys: Buffer::zeros(len), values: Buffer::zeros(len) }
}

/// Stores the rows of k and v (t, g*e) behind the cached tokens of their sequences (rows in sequence order).
///
/// # Panics
/// If the shapes do not fit together, or a page table does not cover its sequence or names a page that is not there.
pub fn kv_append(cache: &mut KvLayer, k: &Tensor, v: &Tensor, sequences: &[PagedSequence], shape: &AttentionShape) {
    let rows = check_sequences(cache, sequences, shape);
    check("k", k, rows, shape.kv_heads * shape.head_dim);
    check("v", v, rows, shape.kv_heads * shape.head_dim);
    match k.device() {
        Device::Cpu => {
            cpu::attention::kv_append(&mut cache.keys, &mut cache.values, k.data(), v.data(), sequences, shape);
        }
    }
}

/// Attention of new rows q (t, h*e) over the cache, which already holds the new rows' keys and values. One kernel for
/// prefill, chunked prefill and decode.
///
/// # Panics
/// As `kv_append`.
pub fn forward_paged(q: &Tensor, cache: &KvLayer, sequences: &[PagedSequence], shape: &AttentionShape, o: &mut Tensor) {
    let rows = check_sequences(cache, sequences, shape);
    check("q", q, rows, shape.heads * shape.head_dim);
    check("o", o, rows, shape.heads * shape.head_dim);
    match q.device() {
        Device::Cpu => {
            cpu::attention::forward_paged(q.data(), &cache.keys, &cache.values, sequences, shape, o.data_mut());
        }
    }
}

/// Copies page `from` to page `to` (a shared prefix whose last page will be written by several sequences).
///
/// # Panics
/// If either page is not there.
pub fn kv_copy_page(cache: &mut KvLayer, from: u32, to: u32, shape: &AttentionShape) {
    let len = cpu::attention::page_len(shape);
    let from = from as usize * len;
    for buffer in [&mut cache.keys, &mut cache.values] {
        buffer.copy_within(from..from + len, to as usize * len);
    }
}

pub(super) fn check(name: &str, x: &Tensor, rows: usize, width: usize) {
    assert!(
        x.rows() == rows && x.width() == width,
        "attention: {name} is {} x {}, needs {rows} x {width}",
        x.rows(),
        x.width()
    );
}

pub(super) fn check_heads(shape: &AttentionShape) {
    assert!(
        shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads),
        "attention: {} heads do not divide over {} key/value heads",
        shape.heads,
        shape.kv_heads
    );
    assert!(shape.window != Some(0), "attention: a window of 0 keys sees nothing");
}

fn check_packed(q: &Tensor, k: &Tensor, v: &Tensor, cu_seqlens: &[usize], shape: &AttentionShape) {
    check_heads(shape);
    let rows = q.rows();
    check("q", q, rows, shape.heads * shape.head_dim);
    check("k", k, rows, shape.kv_heads * shape.head_dim);
    check("v", v, rows, shape.kv_heads * shape.head_dim);
    assert!(
        cu_seqlens.first() == Some(&0) && cu_seqlens.last() == Some(&rows) && cu_seqlens.is_sorted(),
        "attention: cu_seqlens {cu_seqlens:?} does not cut {rows} rows"
    );
}

/// The number of new rows.
fn check_sequences(cache: &KvLayer, sequences: &[PagedSequence], shape: &AttentionShape) -> usize {
    check_heads(shape);
    let pages = cache.keys.len() / cpu::attention::page_len(shape);
    for sequence in sequences {
        let needed = (sequence.past + sequence.tokens).div_ceil(PAGE);
        assert!(
            sequence.blocks.len() >= needed,
            "attention: {} pages for {} + {} tokens, needs {needed}",
            sequence.blocks.len(),
            sequence.past,
            sequence.tokens
        );
        for &page in &sequence.blocks[..needed] {
            assert!((page as usize) < pages, "attention: page {page} of a cache of {pages}");
        }
    }
    sequences.iter().map(|s| s.tokens).sum()
}
