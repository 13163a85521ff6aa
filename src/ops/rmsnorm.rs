//! y = x * rstd * (w + offset) with rstd = 1 / sqrt(mean(x^2) + eps), over groups of w.len() values (arXiv:1910.07467).
//!
//! `offset` is 0 or, in families whose norms start at w = 0, 1. A row of x may hold several groups (qk-norm: one per head); rstd has one value per group.

use crate::device::{Device, cpu, cuda};
use crate::tensor::{Slice, SliceMut, Tensor};

/// x, y (t, groups * w.len()); rstd (t, groups).
pub fn forward<'a>(x: &Tensor, w: impl Into<Slice<'a>>, offset: f32, eps: f32, y: &mut Tensor, rstd: &mut Tensor) {
    let w = w.into();
    let groups = check_groups(x, w);
    check("y", y, x.rows(), x.width());
    check("rstd", rstd, x.rows(), groups);
    match x.device() {
        Device::Cpu => cpu::rmsnorm::forward(x.data(), w.f32(), offset, eps, y.data_mut(), rstd.data_mut()),
        Device::Cuda => cuda::rmsnorm::forward(x.cuda(), w.cuda(), [offset, eps], y.cuda_mut(), rstd.cuda_mut()),
    }
}

/// With v = w + offset: dx += rstd (v dy - x rstd^2 mean(v dy x)), dw += sum_t dy x rstd. `dx` must not alias.
pub fn backward<'a, 'b>(
    x: &Tensor,
    w: impl Into<Slice<'a>>,
    offset: f32,
    rstd: &Tensor,
    dy: &Tensor,
    dx: &mut Tensor,
    dw: impl Into<SliceMut<'b>>,
) {
    let (w, dw) = (w.into(), dw.into());
    let groups = check_groups(x, w);
    check("rstd", rstd, x.rows(), groups);
    check("dy", dy, x.rows(), x.width());
    check("dx", dx, x.rows(), x.width());
    assert_eq!(dw.len(), w.len(), "rmsnorm: dw has {} values, but w has {}", dw.len(), w.len());
    match x.device() {
        Device::Cpu => {
            let w = (w.f32(), offset);
            cpu::rmsnorm::backward(x.data(), x.width(), w, rstd.data(), dy.data(), dx.data_mut(), dw.f32());
        }
        Device::Cuda => {
            let w = (w.cuda(), offset);
            cuda::rmsnorm::backward(x.cuda(), w, rstd.cuda(), dy.cuda(), dx.cuda_mut(), dw.cuda());
        }
    }
}

/// The number of groups in a row.
fn check_groups(x: &Tensor, w: Slice) -> usize {
    assert!(
        !w.is_empty() && x.width() > 0 && x.width().is_multiple_of(w.len()),
        "rmsnorm: rows of {} values must be a multiple of the group size {}",
        x.width(),
        w.len()
    );
    x.width() / w.len()
}

fn check(name: &str, x: &Tensor, rows: usize, width: usize) {
    super::check("rmsnorm", name, x, rows, width);
}
