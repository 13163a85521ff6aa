//! values[t] = sum_d h[t][d] w[d]

use crate::device::Device;
use crate::device::cpu::value_head as cpu;
use crate::ops::matmul::check;
use crate::tensor::Tensor;

fn check_inputs(op: &str, h: &Tensor, w: &[f32], values: &[f32]) {
    check(op, "h", h, h.rows(), w.len());
    assert!(values.len() == h.rows(), "{op}: {} values for {} tokens", values.len(), h.rows());
}

/// One fixed order of summation per row, whatever the number of rows.
pub fn forward(h: &Tensor, w: &[f32], values: &mut [f32]) {
    check_inputs("value_head::forward", h, w, values);
    match h.device() {
        Device::Cpu => cpu::forward(h.data(), w, values),
    }
}

/// dh[t][d] = dvalues[t] w[d] (overwritten), dw[d] += sum_t dvalues[t] h[t][d]
pub fn backward(h: &Tensor, w: &[f32], dvalues: &[f32], dh: &mut Tensor, dw: &mut [f32]) {
    const OP: &str = "value_head::backward";
    check_inputs(OP, h, w, dvalues);
    check(OP, "dh", dh, h.rows(), w.len());
    assert!(dw.len() == w.len(), "{OP}: dw has {} values, w {}", dw.len(), w.len());
    match h.device() {
        Device::Cpu => cpu::backward(h.data(), w, dvalues, dh.data_mut(), dw),
    }
}
