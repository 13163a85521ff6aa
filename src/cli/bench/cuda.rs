//! `bench cuda`: the kernels on a GPU, beside the copy and the product that the same GPU does best.

use super::measure::median;
use crate::comm::World;
use crate::comm::gpus;
use crate::device::cpu::attention::{AttentionShape, PAGE, PagedSequence};
use crate::device::cuda::kv_cache::{KvPages, SequenceTable};
use crate::device::cuda::linear_logprob::{self, Logits};
use crate::device::cuda::matmul::{self, Matrix, MatrixMut};
use crate::device::cuda::{self, Gpu, Memory, adamw, attention, cublaslt, devices, linear_logprob_fused};
use crate::device::cuda::{paged_attention, rmsnorm};
use crate::error::{Error, Result};
use crate::tensor::DType::{Bf16, F32};
use serde_json::json;
use std::path::Path;
use std::time::Instant;

/// Shortest measured batch of launches, in seconds: far more than the clock and the wait cost.
const BATCH_S: f64 = 0.03;

/// What a work moves and computes.
struct Cost {
    bytes: f64,
    flops: f64,
}

/// Measures, and shows each result at once.
struct Bench {
    gpu: &'static Gpu,
    repeats: usize,
    json: bool,
    /// Sizes on a played GPU, where only the way is tried, are 1/32 along each dim.
    is_played: bool,
    /// Bytes/s of a large copy, read and written; FLOP/s of a large product.
    copy: f64,
    product: f64,
}

/// # Errors
/// `Usage` where there is no GPU.
pub fn run(repeats: usize, json: bool) -> Result<()> {
    let gpu = open()?;
    let is_played = gpu.properties().is_none();
    let mut bench = Bench { gpu, repeats, json, is_played, copy: f64::NAN, product: f64::NAN };
    bench.peaks();
    bench.products();
    bench.attention();
    bench.decode();
    bench.streaming();
    bench.head();
    Ok(())
}

/// The first GPU that this process sees, or the played one that a test names.
fn open() -> Result<&'static Gpu> {
    if let Some(library) = std::env::var_os("RLHF_HPC_PLAYED_GPU") {
        return Ok(cuda::gpu::start(Gpu::emulated(Path::new(&library))?));
    }
    let none = |why| Error::usage(format!("bench cuda: {why}")).hint("run it on a machine with a GPU");
    let (_, seen) = devices::devices().map_err(none)?;
    let index = gpus::mine(&World::start()?, &seen).ok_or_else(|| none("no GPU is seen".into()))?;
    Ok(cuda::gpu::start(Gpu::open(index)?))
}

impl Bench {
    /// A size, small on a played GPU.
    fn n(&self, real: usize) -> usize {
        if self.is_played { (real / 32).clamp(8, 64) } else { real }
    }

    /// Seconds of one call: medians of batches that the GPU does without waiting for the host.
    fn seconds(&self, mut work: impl FnMut()) -> f64 {
        let mut batch = |calls: usize| {
            self.gpu.wait();
            let start = Instant::now();
            (0..calls).for_each(|_| work());
            self.gpu.wait();
            start.elapsed().as_secs_f64()
        };
        let _ = batch(1);
        let calls = if self.is_played { 1 } else { (BATCH_S / (batch(3) / 3.0).max(1e-7)).ceil() as usize };
        median(&(0..self.repeats).map(|_| batch(calls) / calls as f64).collect::<Vec<_>>())
    }

    /// Measures a work and shows its shares of the peaks. Gives its seconds.
    fn measure(&self, name: &str, cost: &Cost, work: impl FnMut()) -> f64 {
        let seconds = self.seconds(work);
        let (bytes_s, flops_s) = (cost.bytes / seconds, cost.flops / seconds);
        let shares = [bytes_s / self.copy, flops_s / self.product];
        if self.json {
            let line = json!({
                "suite": "cuda", "work": name, "seconds": seconds, "bytes_per_s": bytes_s, "flops_per_s": flops_s,
                "copy_share": shares[0], "product_share": shares[1],
            });
            println!("{line}");
        } else {
            println!(
                "{name:<46} {:>11.4} {:>9.1} {:>9.1} {:>6} {:>6}",
                1e3 * seconds,
                1e-9 * bytes_s,
                1e-12 * flops_s,
                percent(shares[0]),
                percent(shares[1])
            );
        }
        seconds
    }

    /// A large copy, and a large product by whoever does it faster: the denominators.
    fn peaks(&mut self) {
        if !self.json {
            let name = self.gpu.properties().map_or("a GPU played on the CPU", |p| p.name.as_str());
            println!("cuda: {name}, kernels from {}, medians of {}", self.gpu.origin(), self.repeats);
            println!("{:<46} {:>11} {:>9} {:>9} {:>6} {:>6}", "work", "median ms", "GB/s", "TFLOP/s", "copy", "prod.");
        }
        let len = self.n(1 << 14).pow(2);
        let (from, mut to) = (Memory::zeros(4 * len), Memory::scratch(4 * len));
        let cost = Cost { bytes: 8.0 * len as f64, flops: 0.0 };
        self.copy = cost.bytes / self.seconds(|| to.view_mut(F32).copy_from(from.view(F32)));
        let n = self.n(8192);
        let flops = 2.0 * (n as f64).powi(3);
        let exact = self.product(n, n, n, false);
        let fast = cublaslt::available().is_ok().then(|| self.product(n, n, n, true));
        self.product = flops / fast.map_or(exact, |fast| fast.min(exact));
        self.measure("copy", &cost, || to.view_mut(F32).copy_from(from.view(F32)));
    }

    /// Seconds of y (m, n) = x (m, k) W^T, by cuBLASLt or by the exact kernels.
    fn product(&self, m: usize, n: usize, k: usize, fast: bool) -> f64 {
        let [x, w] = [m * k, n * k].map(made_up);
        let mut y = Memory::scratch(2 * m * n);
        self.seconds(|| {
            let (x, w) = (x.view(Bf16), w.view(Bf16));
            if fast {
                cublaslt::forward((x, k), (w, k), None, (&mut y.view_mut(Bf16), n), [m, n, k]);
            } else {
                let y = MatrixMut::new(y.view_mut(Bf16), m, n);
                matmul::forward(Matrix::new(x, m, k), Matrix::new(w, n, k), None, y, false);
            }
        })
    }

    /// Products of a 7B shape in both modes, and the gradients of the exact one.
    fn products(&self) {
        let (n, k) = (self.n(11008), self.n(4096));
        for m in [1, 16, 64, self.n(8192)] {
            let cost = Cost { bytes: 2.0 * (n * k + m * (n + k)) as f64, flops: 2.0 * (m * n * k) as f64 };
            let [x, w] = [m * k, n * k].map(made_up);
            let mut y = Memory::scratch(2 * m * n);
            self.measure(&format!("product, exact, {m} x {n} x {k}"), &cost, || {
                let (x, w) = (Matrix::new(x.view(Bf16), m, k), Matrix::new(w.view(Bf16), n, k));
                matmul::forward(x, w, None, MatrixMut::new(y.view_mut(Bf16), m, n), false);
            });
            if cublaslt::available().is_ok() {
                self.measure(&format!("product, cuBLASLt, {m} x {n} x {k}"), &cost, || {
                    let (x, w) = ((x.view(Bf16), k), (w.view(Bf16), k));
                    cublaslt::forward(x, w, None, (&mut y.view_mut(Bf16), n), [m, n, k]);
                });
            }
        }
        let m = self.n(8192);
        let [dy, x, w] = [m * n, m * k, n * k].map(made_up);
        let (mut dx, mut dw) = (Memory::scratch(2 * m * k), Memory::zeros(4 * n * k));
        let cost = Cost { bytes: 2.0 * (n * k + m * (n + k)) as f64, flops: 2.0 * (m * n * k) as f64 };
        self.measure("product, gradient of the input", &cost, || {
            let (dy, w) = (Matrix::new(dy.view(Bf16), m, n), Matrix::new(w.view(Bf16), n, k));
            matmul::backward_input(dy, w, MatrixMut::new(dx.view_mut(Bf16), m, k), false);
        });
        self.measure("product, gradient of the weight", &cost, || {
            let (dy, x) = (Matrix::new(dy.view(Bf16), m, n), Matrix::new(x.view(Bf16), m, k));
            matmul::backward_weight(dy, x, MatrixMut::new(dw.view_mut(F32), n, k));
        });
    }

    /// Causal attention of one long sequence.
    fn attention(&self) {
        let (t, heads, kv_heads, e) = (self.n(8192), if self.is_played { 1 } else { 16 }, 1, 128);
        let kv_heads = if self.is_played { kv_heads } else { 8 };
        let scale = 1.0 / (e as f32).sqrt();
        let shape = AttentionShape { heads, kv_heads, head_dim: e, window: None, scale };
        let table = attention::SpanTable::packed(&[0, t], &shape);
        let (q, kv) = (t * heads * e, t * kv_heads * e);
        let [query, d_o] = [q, q].map(made_up);
        let [key, value] = [kv, kv].map(made_up);
        let (mut o, mut lse, mut delta) =
            (Memory::zeros(2 * q), Memory::zeros(4 * t * heads), Memory::zeros(4 * t * heads));
        // Half of all pairs are masked.
        let flops = 2.0 * (heads * e) as f64 * (t as f64).powi(2);
        let cost = Cost { bytes: 2.0 * (2 * q + 2 * kv) as f64, flops };
        self.measure(&format!("attention, causal, {t} tokens, head dim {e}"), &cost, || {
            let (q, k, v) = (query.view(Bf16), key.view(Bf16), value.view(Bf16));
            attention::forward(q, k, v, &table, false, o.view_mut(Bf16), lse.view_mut(F32));
        });
        let [mut dq, mut dk, mut dv] = [q, kv, kv].map(|len| Memory::scratch(2 * len));
        let cost = Cost { bytes: 2.0 * (4 * q + 4 * kv) as f64, flops: 2.5 * flops };
        self.measure("attention backward", &cost, || {
            attention::delta(o.view(Bf16), d_o.view(Bf16), &shape, delta.view_mut(F32));
            let inputs = [query.view(Bf16), key.view(Bf16), value.view(Bf16)];
            let slopes = [lse.view(F32), delta.view(F32), d_o.view(Bf16)];
            let gradients = [dk.view_mut(Bf16), dv.view_mut(Bf16)];
            attention::backward(inputs, slopes, &table, dq.view_mut(Bf16), gradients);
        });
    }

    /// One token of each of many sequences over the cache; and one sequence alone.
    fn decode(&self) {
        let (heads, kv_heads, e) = (if self.is_played { 4 } else { 32 }, if self.is_played { 1 } else { 8 }, 128);
        let scale = 1.0 / (e as f32).sqrt();
        let shape = AttentionShape { heads, kv_heads, head_dim: e, window: None, scale };
        for (batch, past) in [(if self.is_played { 2 } else { 64 }, self.n(4096)), (1, self.n(32768))] {
            let pages = (past + 1).div_ceil(PAGE);
            let tables: Vec<Vec<u32>> =
                (0..batch).map(|s| (0..pages).map(|p| (s * pages + p) as u32).collect()).collect();
            let sequences: Vec<PagedSequence> =
                tables.iter().map(|blocks| PagedSequence { past, tokens: 1, blocks }).collect();
            let (cache, table) = (KvPages::new(batch * pages, &shape), SequenceTable::new(&sequences, &shape));
            let width = batch * heads * e;
            let (q, mut o) = (made_up(width), Memory::scratch(2 * width));
            let keys = (batch * (past + 1)) as f64;
            let cost = Cost { bytes: 4.0 * keys * (kv_heads * e) as f64, flops: 4.0 * keys * (heads * e) as f64 };
            self.measure(&format!("decode attention, {batch} x {past} keys"), &cost, || {
                paged_attention::forward(q.view(Bf16), &cache, &table, &shape, o.view_mut(Bf16));
            });
        }
    }

    /// Kernels that the memory bounds.
    fn streaming(&self) {
        let (t, d) = (self.n(16384), self.n(4096));
        let [x, w] = [t * d, d].map(made_up);
        let (mut y, mut rstd) = (Memory::scratch(2 * t * d), Memory::scratch(4 * t));
        let cost = Cost { bytes: (4 * t * d) as f64, flops: 0.0 };
        self.measure(&format!("rmsnorm, {t} x {d}"), &cost, || {
            rmsnorm::forward(x.view(Bf16), w.view(Bf16), 1e-5, y.view_mut(Bf16), rstd.view_mut(F32));
        });
        let len = self.n(8192).pow(2);
        let [mut p, mut m, mut v, g] = [(); 4].map(|()| Memory::zeros(4 * len));
        let mut weights = Memory::zeros(2 * len);
        let decays = adamw::Decays::of(&[(len, 0.01)]);
        let update =
            adamw::Update { lr: 1e-6, beta1: 0.9, beta2: 0.95, eps: 1e-8, bias1: 0.1, bias2: 0.05, grad_scale: 1.0 };
        let cost = Cost { bytes: 30.0 * len as f64, flops: 0.0 };
        self.measure(&format!("adamw, {len} parameters"), &cost, || {
            let state = [p.view_mut(F32), m.view_mut(F32), v.view_mut(F32)];
            let [p, m, v] = state;
            adamw::step(p, g.view(F32), m, v, weights.view_mut(Bf16), &decays, &update);
        });
    }

    /// Log-probabilities from logits, and fused with the head.
    fn head(&self) {
        let (t, d, v) = (self.n(4096), self.n(4096), self.n(32000));
        let logits = Memory::zeros(4 * t * v);
        let places = linear_logprob::places(&vec![0; t], v);
        let mut stats = linear_logprob::stats_room(t);
        let cost = Cost { bytes: (4 * t * v) as f64, flops: 0.0 };
        self.measure(&format!("log-softmax statistics, {t} x {v}"), &cost, || {
            let logits = Logits { values: logits.view(F32), rows: t, v, stride: v };
            linear_logprob::stats(logits, 1.0, &places, &mut stats);
        });
        let [h, w] = [t * d, v * d].map(made_up);
        let mut scratch = Memory::scratch(linear_logprob_fused::scratch_bytes(t, v));
        let cost = Cost { bytes: 2.0 * (t * d + v * d) as f64, flops: 2.0 * (t * d * v) as f64 };
        self.measure(&format!("log-softmax fused with the head, {t} x {d} x {v}"), &cost, || {
            let (h, w) = (h.view(Bf16), w.view(Bf16));
            linear_logprob_fused::stats(h, w, d, 1.0, &places, &mut scratch, &mut stats);
        });
    }
}

/// bf16 values in -1..1 that look random: products of zeros would draw less power, and clocks follow power.
fn made_up(len: usize) -> Memory {
    let mut state = 1u32;
    let values = (0..len).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        half::bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0).to_bits()
    });
    Memory::of(&values.collect::<Vec<u16>>())
}

fn percent(share: f64) -> String {
    if share > 0.0 && share.is_finite() { format!("{:.0} %", 100.0 * share) } else { "-".into() }
}
