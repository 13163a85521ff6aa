//! y = (x - mean) rstd w + b with rstd = 1 / sqrt(mean((x - mean)^2) + eps), over rows (arXiv:1607.06450). No GPU kernel
//! supports it.

use crate::device::cpu;
use crate::tensor::Tensor;

/// x, y (t, n); w, b (n); stats (t, 2): mean and rstd of each row.
pub fn forward(x: &Tensor, w: &[f32], b: &[f32], eps: f32, y: &mut Tensor, stats: &mut Tensor) {
    check("y", y, x.rows(), w.len());
    check("x", x, y.rows(), b.len());
    check("stats", stats, x.rows(), 2);
    cpu::layernorm::forward(x.data(), [w, b], eps, y.data_mut(), stats.data_mut());
}

/// With n = (x - mean) rstd: dx += rstd (w dy - mean(w dy) - n mean(w dy n)), dw += sum_t dy n, db += sum_t dy.
pub fn backward(x: &Tensor, w: &[f32], stats: &Tensor, dy: &Tensor, dx: &mut Tensor, dw: &mut [f32], db: &mut [f32]) {
    check("x", x, x.rows(), w.len());
    check("stats", stats, x.rows(), 2);
    check("dy", dy, x.rows(), x.width());
    check("dx", dx, x.rows(), x.width());
    cpu::layernorm::backward([x.data(), w, stats.data(), dy.data()], dx.data_mut(), dw, db);
}

fn check(name: &str, x: &Tensor, rows: usize, width: usize) {
    super::check("layernorm", name, x, rows, width);
}
