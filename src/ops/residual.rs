//! Sums and copies of whole tensors: y += s x.

use crate::device::{Device, cpu, cuda};
use crate::tensor::{Slice, SliceMut, Tensor};

/// y += x in f32, on either device.
pub fn accumulate(x: Slice, y: SliceMut) {
    assert_eq!(x.len(), y.len(), "residual: the lengths must be equal ({} and {})", x.len(), y.len());
    match y {
        SliceMut::Cuda(y) => cuda::copy::add(x.cuda(), y),
        y => cpu::copy::add(x.f32(), y.f32()),
    }
}

/// y += s x for activations. bf16 values are rounded once.
pub fn add(s: f32, x: &Tensor, y: &mut Tensor) {
    super::check("residual", "y", y, x.rows(), x.width());
    match x.device() {
        Device::Cpu => cpu::copy::add_scaled(s, x.data(), y.data_mut()),
        Device::Cuda => cuda::copy::add_scaled(s, x.cuda(), y.cuda_mut()),
    }
}

/// A copy of activations.
pub fn copy(x: &Tensor) -> Tensor {
    let mut y = x.like(x.rows(), x.width());
    match x.device() {
        Device::Cpu => cpu::copy::copy(x.data(), y.data_mut()),
        Device::Cuda => cuda::copy::cast(x.cuda(), y.cuda_mut()),
    }
    y
}
