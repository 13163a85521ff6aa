//! y = x W^T and its gradients.

use crate::tensor::{DType, Tensor, Weight, WeightMut};

/// What `forward` does with what `y` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    /// y = ...
    Overwrite,
    /// y += ... (the residual stream)
    Add,
}

/// y[m][n] (+)= sum_k x[m][k] W[n][k] + bias[n]; one ascending-k chain of fused multiply-adds per output.
/// W in panel layout, f32 or bf16 (then x is rounded to bf16, accumulation is f32).
pub fn forward(x: &Tensor, w: Weight, bias: Option<&[f32]>, y: &mut Tensor, into: Into) {
    let _ = (x, w, bias, y, into);
    todo!()
}

/// dx[m][k] (+)= sum_n dy[m][n] W[n][k]
pub fn backward_input(dy: &Tensor, w: Weight, dx: &mut Tensor, into: Into) {
    let _ = (dy, w, dx, into);
    todo!()
}

/// dW[n][k] += sum_m dy[m][n] x[m][k]; with `DType::Bf16` the factors are rounded to bf16, sums stay f32.
pub fn backward_weight(dy: &Tensor, x: &Tensor, dw: &mut WeightMut, dtype: DType) {
    let _ = (dy, x, dw, dtype);
    todo!()
}

/// db[n] += sum_m dy[m][n]
pub fn backward_bias(dy: &Tensor, db: &mut [f32]) {
    let _ = (dy, db);
    todo!()
}
