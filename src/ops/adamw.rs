//! AdamW with decoupled weight decay (arXiv:1711.05101), fused over flat slices.

use crate::device::cpu::adamw as cpu;
use crate::device::cuda::adamw::Decays;
use crate::device::{Device, cuda, null};

/// The numbers of one update; t counts updates from 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    /// 1 - beta1^t
    pub bias1: f32,
    /// 1 - beta2^t
    pub bias2: f32,
    /// Multiplies the gradient first (clipping).
    pub grad_scale: f32,
}

/// m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m/bias1 / (sqrt(v/bias2) + eps) + weight_decay p)
///
/// Elementwise: the result is bitwise the same however a parameter is cut into slices.
pub fn step(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], hyper: &Hyper) {
    let len = p.len();
    assert!(
        g.len() == len && m.len() == len && v.len() == len,
        "adamw::step: {len} parameters, {} gradients, {} first and {} second moments",
        g.len(),
        m.len(),
        v.len()
    );
    null::note(null::OPTIMIZER, 0.0, (28 * len) as f64);
    cpu::step(p, g, m, v, &factors(hyper));
}

impl Hyper {
    /// The numbers that kernels of a GPU take; the weight decay is a matter of the parts there.
    pub fn on_gpu(&self) -> cuda::adamw::Update {
        let Self { lr, beta1, beta2, eps, bias1, bias2, grad_scale, .. } = *self;
        cuda::adamw::Update { lr, beta1, beta2, eps, bias1, bias2, grad_scale }
    }
}

/// What kernels of a GPU take of parts (end, weight decay) of a run, ends ascending; nothing on the CPU.
pub fn decays(device: Device, parts: &[(usize, f32)]) -> Option<Decays> {
    match device {
        Device::Cpu => None,
        Device::Cuda => Some(Decays::of(parts)),
    }
}

fn factors(hyper: &Hyper) -> cpu::Factors {
    cpu::Factors {
        grad_scale: hyper.grad_scale,
        beta1: hyper.beta1,
        beta2: hyper.beta2,
        step_size: hyper.lr / hyper.bias1,
        inverse_sqrt_bias2: 1.0 / hyper.bias2.sqrt(),
        eps: hyper.eps,
        decay: hyper.lr * hyper.weight_decay,
    }
}
