//! y = silu(gate) * up, silu(x) = x / (1 + exp(-x)) (arXiv:2002.05202).

use crate::device::{Device, cpu, cuda};
use crate::tensor::Tensor;

/// gate, up, y (t, f).
///
/// # Panics
/// If the shapes differ.
pub fn forward(gate: &Tensor, up: &Tensor, y: &mut Tensor) {
    check("up", up, gate);
    check("y", y, gate);
    match gate.device() {
        Device::Cpu => cpu::swiglu::forward(gate.data(), up.data(), y.data_mut()),
        Device::Cuda => cuda::swiglu::forward(gate.cuda(), up.cuda(), y.cuda_mut()),
    }
}

/// Writes dgate and dup. (dgate may be computed in place of gate's own scratch by the caller.) With s = sigmoid(gate):
/// dgate = dy up s (1 + gate (1 - s)), dup = dy gate s.
///
/// # Panics
/// If the shapes differ.
pub fn backward(gate: &Tensor, up: &Tensor, dy: &Tensor, dgate: &mut Tensor, dup: &mut Tensor) {
    check("up", up, gate);
    check("dy", dy, gate);
    check("dgate", dgate, gate);
    check("dup", dup, gate);
    match gate.device() {
        Device::Cpu => {
            cpu::swiglu::backward(gate.data(), up.data(), dy.data(), dgate.data_mut(), dup.data_mut());
        }
        Device::Cuda => {
            cuda::swiglu::backward(gate.cuda(), up.cuda(), dy.cuda(), dgate.cuda_mut(), dup.cuda_mut());
        }
    }
}

fn check(name: &str, x: &Tensor, gate: &Tensor) {
    super::check("swiglu", name, x, gate.rows(), gate.width());
}
