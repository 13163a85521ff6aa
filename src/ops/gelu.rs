//! GELU (arXiv:1606.08415) of each value, in either form. No GPU kernel supports it without a gate.

use crate::device::cpu;
pub use crate::device::cpu::gelu::Gelu;
use crate::tensor::Tensor;

/// y = gelu(x)
pub fn forward(form: Gelu, x: &Tensor, y: &mut Tensor) {
    super::check("gelu", "y", y, x.rows(), x.width());
    cpu::gelu::forward(form, x.data(), y.data_mut());
}

/// Turns dy into dx = dy gelu'(x), in place.
pub fn backward(form: Gelu, x: &Tensor, dy: &mut Tensor) {
    super::check("gelu", "dy", dy, x.rows(), x.width());
    cpu::gelu::backward(form, x.data(), dy.data_mut());
}
