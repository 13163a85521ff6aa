//! Sinks of attention: a logit s without a value in the softmax of each query head (arXiv:2309.17453, section 3.3). They
//! follow attention over keys, whose result o and log-sum-exp l they change:
//!
//! l' = ln(exp l + exp s), o' = o exp(l - l').
//!
//! The gradients of attention need l' and o' instead of l and o: then its probabilities are those with the sink. No GPU
//! kernel supports sinks.

use crate::device::cpu;
use crate::tensor::Tensor;

/// Changes o (t, h*e) and lse (t, h) by the sinks (h).
pub fn forward(o: &mut Tensor, lse: &mut Tensor, sinks: &[f32]) {
    check(o, lse, sinks);
    cpu::sinks::forward(o.data_mut(), lse.data_mut(), sinks);
}

/// Adds the gradients of the sinks, - sum_t exp(s - l'[t]) d_o[t].o'[t], from the results of `forward`.
pub fn backward([o, lse, d_o]: [&Tensor; 3], sinks: &[f32], slopes: &mut [f32]) {
    check(o, lse, sinks);
    super::check("sinks", "d_o", d_o, o.rows(), o.width());
    assert_eq!(slopes.len(), sinks.len(), "sinks: a gradient for each");
    cpu::sinks::backward([o, lse, d_o].map(Tensor::data), sinks, slopes);
}

fn check(o: &Tensor, lse: &Tensor, sinks: &[f32]) {
    super::check("sinks", "lse", lse, o.rows(), sinks.len());
    assert!(o.width().is_multiple_of(sinks.len()), "sinks: {} of {} columns", sinks.len(), o.width());
}
