//! Selective log-softmax over a linear head: full logits of all tokens never exist, only those of a chunk of tokens.
//!
//! logits[t][v] = (sum_d h[t][d] W[v][d]) / temperature; logprob[t] = logits[t][target[t]] - lse[t];
//! entropy[t] = lse[t] - sum_v softmax(logits[t])[v] logits[t][v].

use crate::tensor::{Tensor, Weight, WeightMut};
use std::ops::Range;

/// Forward only (scoring). `entropy` may be empty where it is not wanted. At most 64 MB of scratch.
pub fn forward(h: &Tensor, w: Weight, targets: &[u32], temperature: f32, logprobs: &mut [f32], entropy: &mut [f32]) {
    let _ = (h, w, targets, temperature, logprobs, entropy);
    todo!()
}

/// A loss that is local to a token: for tokens `range`, given (logprobs, entropy), writes (d loss / d logprob,
/// d loss / d entropy).
pub type TokenLoss<'a> = dyn FnMut(Range<usize>, &[f32], &[f32], &mut [f32], &mut [f32]) + 'a;

/// Forward and backward in one pass over chunks of tokens: the chunk that computes logits also forms
/// dlogits, then dh = dlogits W (overwritten) and dW += dlogits^T h. `logprobs` and `entropy` are filled for all tokens.
/// With s = softmax: dlogits[v] = (dlogprob (1[v = target] - s_v) - dentropy s_v (log s_v + entropy)) / temperature.
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
    let _ = (h, w, targets, temperature, loss, logprobs, entropy, dh, dw);
    todo!()
}
