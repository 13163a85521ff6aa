//! Selective log-softmax over a linear head: full logits of all tokens never exist, only those of a chunk of tokens.
//!
//! logits[t][v] = (sum_d h[t][d] W[v][d]) / temperature; logprob[t] = logits[t][target[t]] - lse[t];
//! entropy[t] = lse[t] - sum_v softmax(logits[t])[v] logits[t][v].

use crate::device::Device;
use crate::device::cpu::{linear_logprob as cpu, matmul as products};
use crate::ops::matmul::{
    backward_input_rows, backward_input_transposed_rows, backward_weight_rows, check, check_gradient, forward_rows,
    panels,
};
use crate::tensor::arena::Buffer;
use crate::tensor::{Tensor, Weight, WeightMut};
use std::ops::Range;

/// Logits of one chunk: enough rows for a fast product, few enough bytes to stay in cache where the vocabulary allows.
const CHUNK_BYTES: usize = 8 << 20;
/// The same where gradients follow: each chunk also passes over all of dW.
const CHUNK_BYTES_BACKWARD: usize = 16 << 20;
/// A head up to this size is transposed once for all chunks, a larger one again for each.
const TRANSPOSED_BYTES_MAX: usize = 64 << 20;
/// Never more than this (or one row).
const CHUNK_BYTES_MAX: usize = 40 << 20;
/// Rows below which the product over the vocabulary is slow.
const CHUNK_ROWS: usize = 64;

fn chunk_rows(tokens: usize, vocabulary: usize, bytes: usize) -> usize {
    let row = size_of::<f32>() * vocabulary;
    let rows = (bytes / row).max(CHUNK_ROWS).min(CHUNK_BYTES_MAX / row);
    let rows = if rows >= 8 { rows / 8 * 8 } else { rows.max(1) };
    rows.min(tokens)
}

fn check_inputs(op: &str, h: &Tensor, w: &Weight, targets: &[u32], temperature: f32, logprobs: usize) {
    check(op, "h", h, h.rows(), w.k);
    let t = h.rows();
    assert!(targets.len() == t, "{op}: {} targets for {t} tokens", targets.len());
    assert!(logprobs == t, "{op}: logprobs holds {logprobs} values, needed {t}");
    assert!(temperature > 0.0, "{op}: temperature {temperature} is not positive");
    if let Some(bad) = targets.iter().find(|&&v| v as usize >= w.n) {
        panic!("{op}: target {bad} outside the vocabulary of {}", w.n);
    }
}

/// Forward only (scoring). `entropy` may be empty where it is not wanted. At most 64 MB of scratch.
pub fn forward(h: &Tensor, w: Weight, targets: &[u32], temperature: f32, logprobs: &mut [f32], entropy: &mut [f32]) {
    const OP: &str = "linear_logprob::forward";
    check_inputs(OP, h, &w, targets, temperature, logprobs.len());
    let (t, d) = (h.rows(), h.width());
    let wanted = !entropy.is_empty();
    assert!(!wanted || entropy.len() == t, "{OP}: entropy holds {} values, needed {t} or 0", entropy.len());
    let head = panels(OP, &w);
    let rows = chunk_rows(t, w.n, CHUNK_BYTES);
    let mut logits = Buffer::scratch(rows * w.n);
    for start in (0..t).step_by(rows.max(1)) {
        let range = start..t.min(start + rows);
        let logits = &mut logits[..range.len() * w.n];
        match h.device() {
            Device::Cpu => {
                let h = &h.data()[range.start * d..range.end * d];
                forward_rows(h, range.len(), &head, None, logits, false);
                let stats = cpu::stats(logits, w.n, 1.0 / temperature);
                for (i, stats) in range.clone().zip(&stats) {
                    logprobs[i] = stats.logprob(logits[(i - range.start) * w.n + targets[i] as usize]);
                    if wanted {
                        entropy[i] = stats.entropy();
                    }
                }
            }
        }
    }
}

/// A loss that is local to a token: for tokens `range`, given (logprobs, entropy), writes (d loss / d logprob,
/// d loss / d entropy).
pub type TokenLoss<'a> = dyn FnMut(Range<usize>, &[f32], &[f32], &mut [f32], &mut [f32]) + 'a;

/// The head transposed, where several chunks will use it and it is not too large.
fn transposed_once(head: &products::Panels, several: bool) -> Option<Buffer> {
    let len = products::transposed_len(head);
    (several && size_of::<f32>() * len <= TRANSPOSED_BYTES_MAX).then(|| {
        let mut transposed = Buffer::scratch(len);
        products::transpose(head, &mut transposed);
        transposed
    })
}

/// Forward and backward in one pass over chunks of tokens: the chunk that computes logits also forms
/// dlogits, then dh = dlogits W (overwritten) and dW += dlogits^T h. `logprobs` and `entropy` are filled for all tokens.
/// With s = softmax: dlogits[v] = (dlogprob (1[v = target] - s_v) - dentropy s_v (log s_v + entropy)) / temperature.
/// Logprobs are bitwise those of `forward`.
pub fn forward_backward(
    h: &Tensor,
    w: Weight,
    targets: &[u32],
    temperature: f32,
    loss: &mut TokenLoss,
    logprobs: &mut [f32],
    entropy: &mut [f32],
    dh: &mut Tensor,
    dw: &mut WeightMut,
) {
    const OP: &str = "linear_logprob::forward_backward";
    check_inputs(OP, h, &w, targets, temperature, logprobs.len());
    let (t, d) = (h.rows(), h.width());
    assert!(entropy.len() == t, "{OP}: entropy holds {} values, needed {t}", entropy.len());
    check(OP, "dh", dh, t, d);
    check_gradient(OP, dw, w.n, w.k);
    let head = panels(OP, &w);
    let rows = chunk_rows(t, w.n, CHUNK_BYTES_BACKWARD);
    let mut logits = Buffer::scratch(rows * w.n);
    let transposed = transposed_once(&head, rows < t);
    let mut dlogprobs = vec![0.0; rows];
    let mut dentropy = vec![0.0; rows];
    for start in (0..t).step_by(rows.max(1)) {
        let range = start..t.min(start + rows);
        let m = range.len();
        let logits = &mut logits[..m * w.n];
        let (dlogprobs, dentropy) = (&mut dlogprobs[..m], &mut dentropy[..m]);
        match h.device() {
            Device::Cpu => {
                let part = range.start * d..range.end * d;
                let h = &h.data()[part.clone()];
                forward_rows(h, m, &head, None, logits, false);
                let stats = cpu::stats(logits, w.n, 1.0 / temperature);
                for (i, stats) in range.clone().zip(&stats) {
                    logprobs[i] = stats.logprob(logits[(i - range.start) * w.n + targets[i] as usize]);
                    entropy[i] = stats.entropy();
                }
                dlogprobs.fill(0.0);
                dentropy.fill(0.0);
                loss(range.clone(), &logprobs[range.clone()], &entropy[range.clone()], dlogprobs, dentropy);
                cpu::gradient(logits, w.n, &stats, &targets[range], dlogprobs, dentropy);
                let dh = &mut dh.data_mut()[part];
                match &transposed {
                    Some(transposed) => backward_input_transposed_rows(logits, m, &head, transposed, dh),
                    None => backward_input_rows(logits, m, &head, dh, false),
                }
                backward_weight_rows(logits, h, m, w.n, d, dw.values, head.is_bf16());
            }
        }
    }
}
