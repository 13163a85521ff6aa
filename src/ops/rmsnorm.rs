//! y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps), over groups of w.len() values (arXiv:1910.07467).
//!
//! A row of x may hold several groups (qk-norm: one per head); rstd has one value per group.

use crate::device::{Device, cpu};
use crate::tensor::Tensor;

/// x, y (t, groups * w.len()); rstd (t, groups).
///
/// # Panics
/// If the shapes do not fit together.
pub fn forward(x: &Tensor, w: &[f32], eps: f32, y: &mut Tensor, rstd: &mut Tensor) {
    let groups = check_groups(x, w);
    check("y", y, x.rows(), x.width());
    check("rstd", rstd, x.rows(), groups);
    match x.device() {
        Device::Cpu => cpu::rmsnorm::forward(x.data(), w, eps, y.data_mut(), rstd.data_mut()),
    }
}

/// dx += rstd (w dy - x rstd^2 mean(w dy x)), dw += sum_t dy x rstd. `dx` must not alias.
///
/// # Panics
/// If the shapes do not fit together.
pub fn backward(x: &Tensor, w: &[f32], rstd: &Tensor, dy: &Tensor, dx: &mut Tensor, dw: &mut [f32]) {
    let groups = check_groups(x, w);
    check("rstd", rstd, x.rows(), groups);
    check("dy", dy, x.rows(), x.width());
    check("dx", dx, x.rows(), x.width());
    assert_eq!(dw.len(), w.len(), "rmsnorm: dw has {} values, w {}", dw.len(), w.len());
    match x.device() {
        Device::Cpu => {
            cpu::rmsnorm::backward(x.data(), x.width(), w, rstd.data(), dy.data(), dx.data_mut(), dw);
        }
    }
}

/// The groups of a row.
fn check_groups(x: &Tensor, w: &[f32]) -> usize {
    assert!(
        !w.is_empty() && x.width() > 0 && x.width().is_multiple_of(w.len()),
        "rmsnorm: rows of {} values are no whole groups of {}",
        x.width(),
        w.len()
    );
    x.width() / w.len()
}

fn check(name: &str, x: &Tensor, rows: usize, width: usize) {
    assert!(
        x.rows() == rows && x.width() == width,
        "rmsnorm: {name} is {} x {}, needs {rows} x {width}",
        x.rows(),
        x.width()
    );
}
