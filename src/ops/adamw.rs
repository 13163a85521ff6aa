//! AdamW with decoupled weight decay (arXiv:1711.05101), fused over flat slices.

pub use crate::device::cpu::adamw::Update;
use crate::device::{cpu, null};

/// m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m/bias1 / (sqrt(v/bias2) + eps) + weight_decay p)
///
/// The update is elementwise: the result is bitwise the same for any division of a parameter into slices.
pub fn step(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], update: &Update, weight_decay: f32) {
    let len = p.len();
    assert!(
        g.len() == len && m.len() == len && v.len() == len,
        "adamw::step: the lengths must be equal ({len} parameters, {} gradients, {} first and {} second moments)",
        g.len(),
        m.len(),
        v.len()
    );
    null::note(null::OPTIMIZER, 0.0, (28 * len) as f64);
    cpu::adamw::step(p, g, m, v, update, weight_decay);
}

/// average = beta average + (1 - beta) p
pub fn average(p: &[f32], beta: f32, average: &mut [f32]) {
    assert_eq!(p.len(), average.len(), "adamw::average: the lengths must be equal");
    null::note(null::OPTIMIZER, 0.0, (12 * p.len()) as f64);
    cpu::adamw::average(p, beta, average);
}
