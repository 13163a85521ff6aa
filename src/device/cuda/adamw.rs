//! AdamW with decoupled weight decay over flat runs. Writes the bf16 weights in the same pass.

use super::gpu::{Arg, gpu};
use super::memory::{Memory, View, ViewMut};
use super::shape::{THREADS, count, grid_of_eights};
pub use crate::device::cpu::adamw::Update;
use crate::device::null;
use crate::dtype::DType::{Bf16, F32};

/// Parts of a flat run with a weight decay each; made once, used by every update.
#[derive(Debug)]
pub struct Decays {
    ends: Memory,
    values: Memory,
    parts: usize,
    len: usize,
}

impl Decays {
    /// Parts as (end, weight decay), in order: each begins at the end of the previous one, the first at 0.
    pub fn from_parts(parts: &[(usize, f32)]) -> Self {
        assert!(parts.is_sorted_by_key(|(end, _)| *end), "adamw: the ends of the parts must ascend");
        let ends: Vec<u64> = parts.iter().map(|(end, _)| *end as u64).collect();
        let values: Vec<f32> = parts.iter().map(|(_, decay)| *decay).collect();
        let len = parts.last().map_or(0, |(end, _)| *end);
        Self { ends: Memory::from_values(&ends), values: Memory::from_values(&values), parts: parts.len(), len }
    }
}

/// g scaled; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m/bias1 / (sqrt(v/bias2) + eps) + decay p); w = p
/// rounded. p, g, m, v f32 and w bf16, all of the length of `decays`, in one launch. Elementwise, with the CPU's bits:
/// the result does not depend on the division of a parameter. Any alignment; fast if all begin at multiples of 16
/// bytes.
pub fn step(mut p: ViewMut, g: View, mut m: ViewMut, mut v: ViewMut, mut w: ViewMut, decays: &Decays, update: &Update) {
    const OP: &str = "adamw::step";
    let len = decays.len;
    assert!(
        [p.len(), g.len(), m.len(), v.len(), w.len()] == [len; 5],
        "{OP}: {} parameters, {} gradients, {} first and {} second moments, {} weights, parts of {len}",
        p.len(),
        g.len(),
        m.len(),
        v.len(),
        w.len()
    );
    null::note(null::OPTIMIZER, 0.0, (30 * len) as f64);
    let runs = [p.arg(F32), g.arg(F32), m.arg(F32), v.arg(F32), w.arg(Bf16), len.into()];
    let parts = [decays.ends.arg(), decays.values.arg(), count(OP, decays.parts)];
    let u = update;
    let (step_size, inverse_sqrt_bias2) = (u.lr / u.bias1, 1.0 / u.bias2.sqrt());
    let numbers = [u.lr, u.grad_scale, u.beta1, u.beta2, step_size, inverse_sqrt_bias2, u.eps].map(Arg::F32);
    gpu().launch("adamw_step", grid_of_eights(len), THREADS, 0, &[&runs[..], &parts, &numbers].concat());
}

/// average = beta average + (1 - beta) p, f32, with the CPU's bits. Any alignment.
pub fn average(p: View, beta: f32, mut average: ViewMut) {
    let len = p.len();
    assert!(average.len() == len, "adamw::average: {len} parameters, but an average of {}", average.len());
    null::note(null::OPTIMIZER, 0.0, (12 * len) as f64);
    let arguments = [p.arg(F32), average.arg(F32), len.into(), Arg::F32(beta)];
    gpu().launch("adamw_average", grid_of_eights(len), THREADS, 0, &arguments);
}
