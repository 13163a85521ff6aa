//! y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps), over groups of w.len() values (arXiv:1910.07467).
//!
//! A row of x may hold several groups (qk-norm: one per head); rstd has one value per group.

use crate::tensor::Tensor;

/// x, y (t, groups * w.len()); rstd (t, groups).
pub fn forward(x: &Tensor, w: &[f32], eps: f32, y: &mut Tensor, rstd: &mut Tensor) {
    let _ = (x, w, eps, y, rstd);
    todo!()
}

/// dx += rstd (w dy - x rstd^2 mean(w dy x)), dw += sum_t dy x rstd. `dx` must not alias.
pub fn backward(x: &Tensor, w: &[f32], rstd: &Tensor, dy: &Tensor, dx: &mut Tensor, dw: &mut [f32]) {
    let _ = (x, w, rstd, dy, dx, dw);
    todo!()
}
