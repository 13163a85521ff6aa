//! values[t] = sum_d h[t][d] w[d]

use crate::tensor::Tensor;

pub fn forward(h: &Tensor, w: &[f32], values: &mut [f32]) {
    let _ = (h, w, values);
    todo!()
}

/// dh[t][d] = dvalues[t] w[d] (overwritten), dw[d] += sum_t dvalues[t] h[t][d]
pub fn backward(h: &Tensor, w: &[f32], dvalues: &[f32], dh: &mut Tensor, dw: &mut [f32]) {
    let _ = (h, w, dvalues, dh, dw);
    todo!()
}
