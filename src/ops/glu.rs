//! Gated linear units: y = act(gate) * up (arXiv:2002.05202).

use super::matmul::{self, Factor, Output};
pub use crate::device::cpu::glu::Activation;
use crate::device::{Device, cpu, cuda};
use crate::tensor::Tensor;

/// gate, up, y (t, f).
pub fn forward(activation: Activation, gate: &Tensor, up: &Tensor, y: &mut Tensor) {
    check("up", up, gate);
    check("y", y, gate);
    match gate.device() {
        Device::Cpu => cpu::glu::forward(activation, gate.data(), up.data(), y.data_mut()),
        Device::Cuda => cuda::glu::forward(activation, gate.cuda(), up.cuda(), y.cuda_mut()),
    }
}

/// y (t, f) = act(gate) * up, with gate = x Wgate^T + bias and the same for up. The result is bit for bit that of
/// `matmul::forward_each` and `forward`, but gate and up are not kept. With few rows a GPU does not store them.
pub fn of_products(activation: Activation, x: &Tensor, [gate, up]: [Factor; 2], y: &mut Tensor) {
    if matmul::forward_glu(activation, x, [gate, up], y) {
        return;
    }
    let (t, f) = (y.rows(), y.width());
    let [mut of_gate, mut of_up] = [x.like(t, f), x.like(t, f)];
    let outputs = [(gate, &mut of_gate), (up, &mut of_up)].map(|(Factor { w, bias }, y)| Output { w, bias, y });
    matmul::forward_each(x, outputs);
    forward(activation, &of_gate, &of_up, y);
}

/// Writes dgate = dy up act'(gate) and dup = dy act(gate). (The caller may reuse gate's scratch memory for dgate.)
pub fn backward(activation: Activation, gate: &Tensor, up: &Tensor, dy: &Tensor, dgate: &mut Tensor, dup: &mut Tensor) {
    check("up", up, gate);
    check("dy", dy, gate);
    check("dgate", dgate, gate);
    check("dup", dup, gate);
    match gate.device() {
        Device::Cpu => {
            cpu::glu::backward(activation, gate.data(), up.data(), dy.data(), dgate.data_mut(), dup.data_mut());
        }
        Device::Cuda => {
            cuda::glu::backward(activation, gate.cuda(), up.cuda(), dy.cuda(), dgate.cuda_mut(), dup.cuda_mut());
        }
    }
}

fn check(name: &str, x: &Tensor, gate: &Tensor) {
    super::check("glu", name, x, gate.rows(), gate.width());
}
