//! A gate for each row: y[i] = sigmoid(g[i]) x[i]. No GPU kernel supports it.

use super::check;
use crate::device::cpu;
use crate::tensor::Tensor;

/// gate (t, 1), x and y (t, f).
pub fn forward(gate: &Tensor, x: &Tensor, y: &mut Tensor) {
    check("row_gate", "gate", gate, x.rows(), 1);
    check("row_gate", "y", y, x.rows(), x.width());
    cpu::row_gate::forward(gate.data(), x.data(), x.width(), y.data_mut());
}

/// Turns dy into dx, in place. Returns the gradient of the gate (t, 1).
pub fn backward(gate: &Tensor, x: &Tensor, dy: &mut Tensor) -> Tensor {
    check("row_gate", "gate", gate, x.rows(), 1);
    check("row_gate", "dy", dy, x.rows(), x.width());
    let mut dgate = gate.like(gate.rows(), 1);
    cpu::row_gate::backward(gate.data(), x.data(), x.width(), dy.data_mut(), dgate.data_mut());
    dgate
}
