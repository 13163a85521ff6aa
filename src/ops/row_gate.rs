//! A gate for each row: y[i] = sigmoid(g[i]) x[i], g[i] = w n[i].

use super::matmul::{self, Into};
use super::{check, residual};
use crate::device::cuda::Memory;
use crate::device::{Device, cpu, cuda};
use crate::tensor::{DType, Operand, Tensor, Weight, WeightMut};

/// g (t, 1) in f32, from n (t, d) and w (1, d).
///
/// # Panics
/// If w is in nf4.
pub fn logits(n: &Tensor, w: Operand) -> Tensor {
    let mut gate = n.statistics(n.rows(), 1);
    match (n.device(), w) {
        (Device::Cpu, w) => matmul::forward(n, w, None, &mut gate, Into::Overwrite),
        (Device::Cuda, Operand::Values(w)) => {
            cuda::value_head::forward(n.cuda(), w.values.cuda().part(0..w.k), gate.cuda_mut());
        }
        (Device::Cuda, Operand::Nf4(_)) => panic!("row_gate: the gate's matrix is not quantized"),
    }
    gate
}

/// dn += dg w, and dw += dg^T n if the gate trains.
pub fn backward_logits(n: &Tensor, w: Weight, dgate: &Tensor, dn: &mut Tensor, dw: Option<WeightMut>, dtype: DType) {
    match n.device() {
        Device::Cpu => {
            if let Some(dw) = dw {
                matmul::backward_weight(dgate, n, dw, dtype);
            }
            matmul::backward_input(dgate, w, dn, Into::Add);
        }
        Device::Cuda => {
            let mut unused: Memory;
            let dw = if let Some(dw) = dw {
                dw.values.cuda()
            } else {
                unused = Memory::zeros(w.k * size_of::<f32>());
                unused.view_mut(DType::F32)
            };
            let mut through_gate = n.like(n.rows(), n.width());
            let w = w.values.cuda().part(0..w.k);
            cuda::value_head::backward(n.cuda(), w, dgate.cuda(), through_gate.cuda_mut(), dw.part(0..n.width()));
            residual::add(1.0, &through_gate, dn);
        }
    }
}

/// gate (t, 1), x and y (t, f).
pub fn forward(gate: &Tensor, x: &Tensor, y: &mut Tensor) {
    check("row_gate", "gate", gate, x.rows(), 1);
    check("row_gate", "y", y, x.rows(), x.width());
    match x.device() {
        Device::Cpu => cpu::row_gate::forward(gate.data(), x.data(), x.width(), y.data_mut()),
        Device::Cuda => cuda::row_gate::forward(gate.cuda(), x.cuda(), x.width(), y.cuda_mut()),
    }
}

/// Turns dy into dx, in place. Returns the gradient of the gate (t, 1), in f32.
pub fn backward(gate: &Tensor, x: &Tensor, dy: &mut Tensor) -> Tensor {
    check("row_gate", "gate", gate, x.rows(), 1);
    check("row_gate", "dy", dy, x.rows(), x.width());
    let (width, mut dgate) = (x.width(), gate.statistics(gate.rows(), 1));
    match x.device() {
        Device::Cpu => cpu::row_gate::backward(gate.data(), x.data(), width, dy.data_mut(), dgate.data_mut()),
        Device::Cuda => cuda::row_gate::backward(gate.cuda(), x.cuda(), width, dy.cuda_mut(), dgate.cuda_mut()),
    }
    dgate
}
