//! Selective log-softmax over a linear head. Logits exist only for one chunk of tokens at a time.
//!
//! logits[t][v] = (sum_d h[t][d] W[v][d]) / temperature; logprob[t] = logits[t][target[t]] - lse[t];
//! With a soft cap c, logits[t][v] = c tanh(sum_d h[t][d] W[v][d] / c) / temperature.
//! entropy[t] = lse[t] - sum_v softmax(logits[t])[v] logits[t][v].
//!
//! If a token has a sampling mask (`Targets`), log-probability, entropy and their gradients refer to the softmax over
//! the tokens that the mask keeps: logits[t][v] = -inf for all others.
//!
//! W may be a part of the vocabulary's rows (`HeadPart`). Then the statistics of a chunk's rows are combined over all
//! parts before they are used.

pub use super::head_part::{Combine, Extra, Gather, HeadPart, RowStats, Targets, TokenLoss};

use super::check;
use super::linear_logprob_cuda::{self as on_gpu, Comparison};
use super::matmul::{backward_input_rows, backward_weight_rows, check_gradient, panels};
use crate::device::cpu::{copy, matmul as products, softcap, softmax};
use crate::device::cuda::Memory;
use crate::device::{Device, null};
use crate::sys::trace;
use crate::tensor::arena::Buffer;
use crate::tensor::{DType, SliceMut, Tensor, Weight, WeightMut};

/// The logits of one chunk: enough rows for a fast GEMM, few enough bytes to stay in cache if the vocabulary allows.
const CHUNK_BYTES: usize = 8 << 20;
/// The same with gradients: each chunk also reads and writes all of dW.
const CHUNK_BYTES_BACKWARD: usize = 16 << 20;
/// A head up to this size is transposed once for all chunks. A larger one is transposed again for each chunk.
const TRANSPOSED_BYTES_MAX: usize = 64 << 20;
/// The upper limit of a chunk's logits (or one row).
const CHUNK_BYTES_MAX: usize = 40 << 20;
/// The number of rows below which the GEMM over the vocabulary is slow.
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
    assert!(logprobs == t, "{op}: logprobs must hold {t} values, got {logprobs}");
    assert!(temperature > 0.0, "{op}: the temperature must be positive, got {temperature}");
}

const FORWARD: &str = "linear_logprob::forward";
const BACKWARD: &str = "linear_logprob::forward_backward";

/// Notes `products` GEMMs of `t` rows with W for a plan.
fn note(op: &'static str, products: f64, t: usize, w: &Weight) {
    null::note(op, products * 2.0 * (t * w.n * w.k) as f64, 0.0);
}

/// Forward only (scoring). `entropy` may be empty if it is not wanted. Uses at most 64 MB of scratch memory.
pub fn forward(h: &Tensor, w: Weight, targets: &[u32], temperature: f32, logprobs: &mut [f32], entropy: &mut [f32]) {
    let part = HeadPart::whole(&w);
    let kind = if entropy.is_empty() { Extra::Nothing } else { Extra::Entropy };
    to_host(h, logprobs, entropy, |logprobs, entropy| {
        forward_part(h, w, part, targets.into(), temperature, logprobs, kind, entropy, None);
    });
}

/// Calls `work` with memory on the device of `h`, then copies the results to the host.
pub(super) fn to_host(h: &Tensor, logprobs: &mut [f32], entropy: &mut [f32], work: impl FnOnce(SliceMut, SliceMut)) {
    if h.device() == Device::Cpu {
        return work(logprobs.into(), entropy.into());
    }
    let (t, wanted) = (logprobs.len(), entropy.len());
    let mut found = Memory::scratch((t + wanted) * size_of::<f32>());
    let mut both = found.view_mut(DType::F32);
    let (first, second) = both.split_at(t);
    work(SliceMut::Cuda(first), SliceMut::Cuda(second));
    let found: Vec<f32> = found.read(t + wanted);
    logprobs.copy_from_slice(&found[..t]);
    entropy.copy_from_slice(&found[t..]);
}

/// `forward` on one part of the head. `extra` is empty for `Extra::Nothing`. All parts call this with the same h and
/// targets, and get the same results, on the device of `h`. On a GPU the host does not wait, unless the distributions
/// are compared with others.
pub fn forward_part(
    h: &Tensor,
    w: Weight,
    part: HeadPart,
    targets: Targets,
    temperature: f32,
    logprobs: SliceMut,
    kind: Extra,
    extra: SliceMut,
    mut against: Option<&mut dyn Comparison>,
) {
    check_inputs(FORWARD, h, &w, targets.tokens, temperature, logprobs.len());
    let (t, d) = (h.rows(), h.width());
    let needed = if kind == Extra::Nothing { 0 } else { t };
    assert!(extra.len() == needed, "{FORWARD}: {kind:?} needs room for {needed} values, got {}", extra.len());
    note(null::HEAD, 1.0, t, &w);
    let _span = trace::operation(null::HEAD, "tokens vocabulary width", || [t, w.n, w.k]);
    if h.device() == Device::Cuda {
        let head = on_gpu::Head::new(FORWARD, h, &w, part, targets.unmasked(), temperature);
        on_gpu::forward(&head, logprobs.cuda(), kind, extra.cuda(), against);
        return;
    }
    let (logprobs, extra) = (logprobs.f32(), extra.f32());
    let head = panels(FORWARD, &w);
    let rows = chunk_rows(t, part.rows_max, CHUNK_BYTES);
    let mut logits = Buffer::scratch(rows * w.n);
    for start in (0..t).step_by(rows.max(1)) {
        let range = start..t.min(start + rows);
        let logits = &mut logits[..range.len() * w.n];
        let h = &h.data()[range.start * d..range.end * d];
        let (_, stats, found) = part.stats(h, head, 1.0 / temperature, targets.part(range.clone()), logits);
        for ((i, stats), &logit) in range.clone().zip(&stats).zip(&found) {
            logprobs[i] = stats.logprob(logit);
            match kind {
                Extra::Nothing => {}
                Extra::Entropy => extra[i] = stats.entropy(),
                Extra::Top => extra[i] = f32::from(u8::from(stats.is_top(logit))),
            }
        }
        if let Some(against) = &mut against {
            against.chunk(part, range, logits, None);
        }
    }
}

/// The transposed head, if several chunks use it and it is not too large.
fn transposed_once(head: &products::Panels, several: bool) -> Option<Buffer> {
    let len = products::transposed_len(head);
    (several && size_of::<f32>() * len <= TRANSPOSED_BYTES_MAX).then(|| {
        let mut transposed = Buffer::scratch(len);
        products::transpose(head, &mut transposed);
        transposed
    })
}

/// Forward and backward in a single loop over chunks of tokens. Each chunk computes logits and then
/// dlogits, dh = dlogits W (overwritten) and dW += dlogits^T h. `logprobs` and `entropy` are filled for all tokens.
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
    dw: WeightMut,
) {
    let part = HeadPart::whole(&w);
    forward_backward_part(h, w, part, targets.into(), temperature, loss, None, logprobs, entropy, dh, Some(dw));
}

/// `forward_backward` on one part of the head: `dh` is this part's share of a sum over all parts. The comparison
/// `against` adds to dlogits. A frozen head has no `dw`.
pub fn forward_backward_part(
    h: &Tensor,
    w: Weight,
    part: HeadPart,
    targets: Targets,
    temperature: f32,
    loss: &mut TokenLoss,
    mut against: Option<&mut dyn Comparison>,
    logprobs: &mut [f32],
    entropy: &mut [f32],
    dh: &mut Tensor,
    mut dw: Option<WeightMut>,
) {
    check_inputs(BACKWARD, h, &w, targets.tokens, temperature, logprobs.len());
    let (t, d) = (h.rows(), h.width());
    assert!(entropy.len() == t, "{BACKWARD}: entropy must hold {t} values, got {}", entropy.len());
    check(BACKWARD, "dh", dh, t, d);
    if let Some(dw) = &dw {
        check_gradient(BACKWARD, dw, w.n, w.k);
    }
    note(null::HEAD_BACKWARD, if dw.is_some() { 3.0 } else { 2.0 }, t, &w);
    let _span = trace::operation(null::HEAD_BACKWARD, "tokens vocabulary width", || [t, w.n, w.k]);
    if h.device() == Device::Cuda {
        let head = on_gpu::Head::new(BACKWARD, h, &w, part, targets.unmasked(), temperature);
        on_gpu::forward_backward(&head, loss, against, logprobs, entropy, dh, dw);
        return;
    }
    let head = panels(BACKWARD, &w);
    let rows = chunk_rows(t, part.rows_max, CHUNK_BYTES_BACKWARD);
    let mut logits = Buffer::scratch(rows * w.n);
    let keeps = against.is_some() || part.softcap.is_some();
    let mut kept = Buffer::scratch(if keeps { logits.len() } else { 0 });
    let transposed = transposed_once(&head, rows < t);
    let mut dlogprobs = vec![0.0; rows];
    let mut dentropy = vec![0.0; rows];
    for start in (0..t).step_by(rows.max(1)) {
        let range = start..t.min(start + rows);
        let m = range.len();
        let logits = &mut logits[..m * w.n];
        let (dlogprobs, dentropy) = (&mut dlogprobs[..m], &mut dentropy[..m]);
        let rows = range.start * d..range.end * d;
        let h = &h.data()[rows.clone()];
        let (places, stats, found) = part.stats(h, head, 1.0 / temperature, targets.part(range.clone()), logits);
        if keeps {
            copy::copy(logits, &mut kept[..m * w.n]);
        }
        for ((i, stats), &logit) in range.clone().zip(&stats).zip(&found) {
            logprobs[i] = stats.logprob(logit);
            entropy[i] = stats.entropy();
        }
        dlogprobs.fill(0.0);
        dentropy.fill(0.0);
        loss(range.clone(), &logprobs[range.clone()], &entropy[range.clone()], dlogprobs, dentropy);
        softmax::backward_rows(logits, w.n, &stats, &places, dlogprobs, dentropy);
        if let Some(against) = &mut against {
            against.chunk(part, range, &kept[..m * w.n], Some(logits));
        }
        if let Some(cap) = part.softcap {
            softcap::backward(cap, &kept[..m * w.n], logits);
        }
        backward_input_rows(logits, m, &head, transposed.as_deref(), &mut dh.data_mut()[rows], false);
        if let Some(dw) = &mut dw {
            backward_weight_rows(logits, h, m, w.n, d, dw.values.reborrow().f32(), head.is_bf16());
        }
    }
}
