//! AdamW with decoupled weight decay (arXiv:1711.05101), fused over flat slices.

/// The numbers of one update; t counts updates from 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    /// 1 - beta1^t
    pub bias1: f32,
    /// 1 - beta2^t
    pub bias2: f32,
    /// Multiplies the gradient first (clipping).
    pub grad_scale: f32,
}

/// m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m/bias1 / (sqrt(v/bias2) + eps) + weight_decay p)
pub fn step(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], hyper: &Hyper) {
    assert!(p.len() == g.len() && p.len() == m.len() && p.len() == v.len(), "adamw: slices of one length");
    let Hyper { lr, beta1, beta2, eps, weight_decay, bias1, bias2, grad_scale } = *hyper;
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let g = g * grad_scale;
        *m = beta1 * *m + (1.0 - beta1) * g;
        *v = beta2 * *v + (1.0 - beta2) * (g * g);
        *p -= lr * (*m / bias1 / ((*v / bias2).sqrt() + eps) + weight_decay * *p);
    }
}
