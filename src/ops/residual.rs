//! y += x

use crate::device::{Device, cpu};
use crate::tensor::Tensor;

/// y[t][d] += x[t][d]
///
/// # Panics
/// If the shapes differ.
pub fn add(x: &Tensor, y: &mut Tensor) {
    assert!(
        x.rows() == y.rows() && x.width() == y.width(),
        "residual: x is {} x {}, y is {} x {}",
        x.rows(),
        x.width(),
        y.rows(),
        y.width()
    );
    match x.device() {
        Device::Cpu => cpu::residual::add(x.data(), y.data_mut()),
    }
}
