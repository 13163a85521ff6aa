//! values[t] = sum_d h[t][d] w[d]

use crate::device::cpu::value_head as cpu;
use crate::device::cuda::Memory;
use crate::device::{Device, cuda};
use crate::ops::matmul::check;
use crate::tensor::{DType, Slice, SliceMut, Tensor};

fn check_inputs(op: &str, h: &Tensor, w: Slice, values: &[f32]) {
    check(op, "h", h, h.rows(), w.len());
    assert!(values.len() == h.rows(), "{op}: {} values for {} tokens", values.len(), h.rows());
}

/// One fixed order of summation per row, whatever the number of rows.
pub fn forward<'a>(h: &Tensor, w: impl Into<Slice<'a>>, values: &mut [f32]) {
    let w = w.into();
    check_inputs("value_head::forward", h, w, values);
    match h.device() {
        Device::Cpu => cpu::forward(h.data(), w.cpu(), values),
        Device::Cuda => {
            let mut found = h.statistics(h.rows(), 1);
            cuda::value_head::forward(h.cuda(), w.cuda(), found.cuda_mut());
            values.copy_from_slice(&found.to_host());
        }
    }
}

/// dh[t][d] = dvalues[t] w[d] (overwritten), dw[d] += sum_t dvalues[t] h[t][d]
pub fn backward<'a, 'b>(
    h: &Tensor,
    w: impl Into<Slice<'a>>,
    dvalues: &[f32],
    dh: &mut Tensor,
    dw: impl Into<SliceMut<'b>>,
) {
    const OP: &str = "value_head::backward";
    let (w, dw) = (w.into(), dw.into());
    check_inputs(OP, h, w, dvalues);
    check(OP, "dh", dh, h.rows(), w.len());
    assert!(dw.len() == w.len(), "{OP}: dw has {} values, w {}", dw.len(), w.len());
    match h.device() {
        Device::Cpu => cpu::backward(h.data(), w.cpu(), dvalues, dh.data_mut(), dw.cpu()),
        Device::Cuda => {
            let given = Memory::of(dvalues);
            cuda::value_head::backward(h.cuda(), w.cuda(), given.view(DType::F32), dh.cuda_mut(), dw.cuda());
        }
    }
}
