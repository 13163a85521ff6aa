//! Memory-bound kernels: norms, the optimizer, log-probabilities from logits.

use super::bench::{Bench, Target, Work};
use crate::device::cuda::linear_logprob;
use crate::device::cuda::matmul::Matrix;
use crate::device::cuda::{Memory, adamw, glu, linear_logprob_fused, rmsnorm};
use crate::ops::glu::Activation;
use crate::plan::synthetic::UPDATE;
use crate::tensor::DType::{Bf16, F32};

const OF_COPY: Option<Target> = Some(Target::Copy(0.85));

pub(super) fn run(bench: &Bench) {
    norms(bench);
    optimizer(bench);
    log_softmax(bench);
    activation(bench);
}

fn norms(bench: &Bench) {
    let (t, d) = (bench.n(16384), bench.n(4096));
    let [x, w, dy] = [t * d, d, t * d].map(|len| bench.random(len));
    let (mut y, mut rstd) = (Memory::scratch(2 * t * d), Memory::scratch(4 * t));
    let cost = |runs: usize| Work::from_bytes((2 * runs * t * d) as f64, 0.0);
    bench.measure(&format!("rmsnorm, {t} x {d}"), cost(2), OF_COPY, || {
        rmsnorm::forward(x.view(Bf16), w.view(Bf16), [0.0, 1e-5], y.view_mut(Bf16), rstd.view_mut(F32));
    });
    let (mut dx, mut dw) = (Memory::zeros(2 * t * d), Memory::zeros(4 * d));
    bench.measure(&format!("rmsnorm backward, {t} x {d}"), cost(4), OF_COPY, || {
        let (dx, dw) = (dx.view_mut(Bf16), dw.view_mut(F32));
        rmsnorm::backward(x.view(Bf16), (w.view(Bf16), 0.0), rstd.view(F32), dy.view(Bf16), dx, dw);
    });
}

fn optimizer(bench: &Bench) {
    let len = bench.n(8192).pow(2);
    let [mut p, mut m, mut v, g] = [(); 4].map(|()| bench.random_f32(len));
    let mut weights = Memory::zeros(2 * len);
    let decays = adamw::Decays::from_parts(&[(len, 0.01)]);
    let cost = Work::from_bytes(30.0 * len as f64, 0.0);
    bench.measure(&format!("adamw, {len} parameters"), cost, OF_COPY, || {
        let [p, m, v] = [p.view_mut(F32), m.view_mut(F32), v.view_mut(F32)];
        adamw::step(p, g.view(F32), m, v, weights.view_mut(Bf16), &decays, &UPDATE);
    });
}

fn log_softmax(bench: &Bench) {
    let (t, v) = (bench.n(4096), bench.n(32000));
    let places = linear_logprob::places(&(0..t).map(|i| i * 31 % v).collect::<Vec<_>>(), v);
    let (mut stats, mut logprobs) = (linear_logprob::stats_room(t), Memory::scratch(4 * t));
    for dtype in [F32, Bf16] {
        let logits = if dtype == F32 { bench.random_f32(t * v) } else { bench.random(t * v) };
        let cost = Work::from_bytes((dtype.bytes() * t * v) as f64, 0.0);
        bench.measure(&format!("log-softmax, {t} x {v} {}", dtype.name()), cost, OF_COPY, || {
            let logits = Matrix { values: logits.view(dtype), rows: t, width: v, stride: v };
            linear_logprob::stats(logits, 1.0, &places, &mut stats);
            linear_logprob::read(&stats, 1.0, logprobs.view_mut(F32), None);
        });
    }
}

/// Log-probabilities fused with the head: logits are never stored.
pub(super) fn head(bench: &Bench) {
    for v in [32000, 128_256] {
        let (t, d, v) = (bench.n(4096), bench.n(4096), bench.n(v));
        let places = linear_logprob::places(&(0..t).map(|i| i * 31 % v).collect::<Vec<_>>(), v);
        let mut stats = linear_logprob::stats_room(t);
        let [h, w] = [t * d, v * d].map(|len| bench.random(len));
        let mut scratch = Memory::scratch(linear_logprob_fused::scratch_bytes(t, v));
        let cost = Work::from_bytes(2.0 * (t * d + v * d) as f64, 2.0 * (t * d * v) as f64);
        let work = format!("log-softmax fused with the head, {t} x {d} x {v}");
        bench.measure(&work, cost, Some(Target::Product(0.7)), || {
            let (h, w) = (h.view(Bf16), w.view(Bf16));
            linear_logprob_fused::stats(h, w, d, 1.0, &places, &mut scratch, &mut stats);
        });
    }
}

fn activation(bench: &Bench) {
    let (t, f) = (bench.n(8192), bench.n(11008));
    let [gate, up] = [(); 2].map(|()| bench.random(t * f));
    let mut act = Memory::scratch(2 * t * f);
    bench.measure(&format!("swiglu, {t} x {f}"), Work::from_bytes((6 * t * f) as f64, 0.0), None, || {
        glu::forward(Activation::Silu, gate.view(Bf16), up.view(Bf16), act.view_mut(Bf16));
    });
}
