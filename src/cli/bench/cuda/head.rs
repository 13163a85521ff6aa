//! Log-probabilities fused with the head: logits are never stored.

use super::bench::{Bench, Cost, Target};
use crate::device::cuda::{Memory, linear_logprob, linear_logprob_fused};
use crate::tensor::DType::Bf16;

pub(super) fn run(bench: &Bench) {
    for v in [32000, 128_256] {
        let (t, d, v) = (bench.n(4096), bench.n(4096), bench.n(v));
        let places = linear_logprob::places(&(0..t).map(|i| i * 31 % v).collect::<Vec<_>>(), v);
        let mut stats = linear_logprob::stats_room(t);
        let [h, w] = [t * d, v * d].map(|len| bench.random(len));
        let mut scratch = Memory::scratch(linear_logprob_fused::scratch_bytes(t, v));
        let cost = Cost::of(2.0 * (t * d + v * d) as f64, 2.0 * (t * d * v) as f64).with(Target::Product(0.7));
        bench.measure(&format!("log-softmax fused with the head, {t} x {d} x {v}"), &cost, || {
            let (h, w) = (h.view(Bf16), w.view(Bf16));
            linear_logprob_fused::stats(h, w, d, 1.0, &places, &mut scratch, &mut stats);
        });
    }
}
