//! Soft caps of logits: y = c tanh(x / c) (arXiv:2408.00118, section 2). No GPU kernel supports them.

use crate::device::cpu;
use crate::tensor::Tensor;

/// x = c tanh(x / c), if there is a cap.
pub fn forward(cap: Option<f32>, x: &mut Tensor) {
    if let Some(cap) = cap {
        cpu::softcap::forward(cap, x.data_mut());
    }
}
