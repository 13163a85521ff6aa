//! Soft caps of logits: y = c tanh(x / c) (arXiv:2408.00118, section 2).

use crate::device::{Device, cpu, cuda};
use crate::tensor::Tensor;

/// x = c tanh(x / c) in f32, if there is a cap.
pub fn forward(cap: Option<f32>, x: &mut Tensor) {
    let Some(cap) = cap else { return };
    match x.device() {
        Device::Cpu => cpu::softcap::forward(cap, x.data_mut()),
        Device::Cuda => cuda::softcap::forward(cap, x.cuda_mut()),
    }
}
