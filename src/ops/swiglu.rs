//! y = silu(gate) * up, silu(x) = x / (1 + exp(-x)) (arXiv:2002.05202).

use crate::tensor::Tensor;

pub fn forward(gate: &Tensor, up: &Tensor, y: &mut Tensor) {
    let _ = (gate, up, y);
    todo!()
}

/// Writes dgate and dup. (dgate may be computed in place of gate's own scratch by the caller.)
pub fn backward(gate: &Tensor, up: &Tensor, dy: &Tensor, dgate: &mut Tensor, dup: &mut Tensor) {
    let _ = (gate, up, dy, dgate, dup);
    todo!()
}
