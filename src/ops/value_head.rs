//! values[t] = sum_d h[t][d] w[d]

use super::check;
use crate::device::cpu::value_head as cpu;
use crate::device::cuda::Memory;
use crate::device::{Device, cuda};
use crate::tensor::{DType, Slice, SliceMut, Tensor};

fn check_inputs(op: &str, h: &Tensor, w: Slice, values: usize) {
    check(op, "h", h, h.rows(), w.len());
    assert!(values == h.rows(), "{op}: {values} values for {} tokens", h.rows());
}

/// Sums in a fixed order per row, for any number of rows. `values` are on the device of `h`.
pub fn forward<'a, 'b>(h: &Tensor, w: impl Into<Slice<'a>>, values: impl Into<SliceMut<'b>>) {
    let (w, values) = (w.into(), values.into());
    check_inputs("value_head::forward", h, w, values.len());
    match h.device() {
        Device::Cpu => cpu::forward(h.data(), w.f32(), values.f32()),
        Device::Cuda => cuda::value_head::forward(h.cuda(), w.cuda(), values.cuda()),
    }
}

/// dh[t][d] = dvalues[t] w[d] (overwritten), dw[d] += sum_t dvalues[t] h[t][d]. `dvalues` are on the host.
pub fn backward<'a, 'b>(
    h: &Tensor,
    w: impl Into<Slice<'a>>,
    dvalues: &[f32],
    dh: &mut Tensor,
    dw: impl Into<SliceMut<'b>>,
) {
    const OP: &str = "value_head::backward";
    let (w, dw) = (w.into(), dw.into());
    check_inputs(OP, h, w, dvalues.len());
    check(OP, "dh", dh, h.rows(), w.len());
    assert!(dw.len() == w.len(), "{OP}: dw has {} values, but w has {}", dw.len(), w.len());
    match h.device() {
        Device::Cpu => cpu::backward(h.data(), w.f32(), dvalues, dh.data_mut(), dw.f32()),
        Device::Cuda => {
            let dvalues = Memory::from_values(dvalues);
            cuda::value_head::backward(h.cuda(), w.cuda(), dvalues.view(DType::F32), dh.cuda_mut(), dw.cuda());
        }
    }
}
