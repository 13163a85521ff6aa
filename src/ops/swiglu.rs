//! y = silu(gate) * up, silu(x) = x / (1 + exp(-x)) (arXiv:2002.05202).

use super::matmul::{self, Factor, Output};
use crate::device::{Device, cpu, cuda};
use crate::tensor::Tensor;

/// gate, up, y (t, f).
pub fn forward(gate: &Tensor, up: &Tensor, y: &mut Tensor) {
    check("up", up, gate);
    check("y", y, gate);
    match gate.device() {
        Device::Cpu => cpu::swiglu::forward(gate.data(), up.data(), y.data_mut()),
        Device::Cuda => cuda::swiglu::forward(gate.cuda(), up.cuda(), y.cuda_mut()),
    }
}

/// act (t, f) = silu(gate) * up, with gate = x Wgate^T + bias and the same for up. The result is bit for bit that of
/// `matmul::forward_each` and `forward`, but gate and up are not kept. With few rows a GPU does not store them.
pub fn of_products(x: &Tensor, [gate, up]: [Factor; 2], act: &mut Tensor) {
    if matmul::forward_swiglu(x, [gate, up], act) {
        return;
    }
    let (t, f) = (act.rows(), act.width());
    let [mut of_gate, mut of_up] = [x.like(t, f), x.like(t, f)];
    let outputs = [(gate, &mut of_gate), (up, &mut of_up)].map(|(Factor { w, bias }, y)| Output { w, bias, y });
    matmul::forward_each(x, outputs);
    forward(&of_gate, &of_up, act);
}

/// Writes dgate and dup. (The caller may reuse gate's scratch memory for dgate.) With s = sigmoid(gate):
/// dgate = dy up s (1 + gate (1 - s)), dup = dy gate s.
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
