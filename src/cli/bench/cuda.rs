//! `bench cuda`: the kernels on a GPU, beside the copy and the product that the same GPU does best.

use super::measure::median;
use crate::comm::World;
use crate::comm::gpus;
use crate::device::Device;
use crate::device::cpu::attention::{AttentionShape, PAGE, PagedSequence, Span};
use crate::device::cuda::kv_cache::{KvPages, SequenceTable};
use crate::device::cuda::linear_logprob::{self, Logits};
use crate::device::cuda::matmul::{self, Matrix, MatrixMut};
use crate::device::cuda::{self, Gpu, Memory, adamw, attention, devices, fast, linear_logprob_fused};
use crate::device::cuda::{paged_attention, rmsnorm};
use crate::error::{self, Error};
use crate::ops::ring_attention::{self, Backward, Step};
use crate::tensor::DType::{Bf16, F32};
use crate::tensor::Tensor;
use serde_json::json;
use std::path::Path;
use std::time::Instant;

/// Shortest measured batch of launches, in seconds: far more than the clock and the wait cost.
const BATCH_S: f64 = 0.03;

/// What a work moves and computes.
pub(super) struct Cost {
    pub bytes: f64,
    pub flops: f64,
}

/// Measures, and shows each result at once.
pub(super) struct Bench {
    gpu: &'static Gpu,
    repeats: usize,
    json: bool,
    /// Sizes on a played GPU, where only the way is tried, are 1/32 along each dim.
    pub is_played: bool,
    /// Bytes/s of a large copy, read and written; FLOP/s of a large product.
    copy: f64,
    product: f64,
}

/// # Errors
/// `Usage` where there is no GPU.
pub fn run(repeats: usize, json: bool) -> error::Result<()> {
    let gpu = open()?;
    let is_played = gpu.properties().is_none();
    let mut bench = Bench { gpu, repeats, json, is_played, copy: f64::NAN, product: f64::NAN };
    let fast = fast::open();
    bench.peaks(&fast);
    bench.products(fast.is_ok());
    bench.attention();
    bench.ring_step();
    bench.decode();
    bench.streaming();
    bench.head();
    super::decode::run(&bench)
}

/// The first GPU that this process sees, or the played one that a test names.
fn open() -> error::Result<&'static Gpu> {
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
    pub fn measure(&self, name: &str, cost: &Cost, work: impl FnMut()) -> f64 {
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
    fn peaks(&mut self, fast: &Result<String, String>) {
        let len = self.n(1 << 14).pow(2);
        let (from, mut to) = (Memory::zeros(4 * len), Memory::scratch(4 * len));
        let cost = Cost { bytes: 8.0 * len as f64, flops: 0.0 };
        self.copy = cost.bytes / self.seconds(|| to.view_mut(F32).copy_from(from.view(F32)));
        let n = self.n(8192);
        let flops = 2.0 * (n as f64).powi(3);
        let mut large = Products::of(n, n, n);
        let exact = self.seconds(|| large.forward(false));
        let fast = fast.as_ref().map(|library| (self.seconds(|| large.forward(true)), library));
        self.product = flops / fast.as_ref().map_or(exact, |(fast, _)| fast.min(exact));
        if !self.json {
            let name = self.gpu.properties().map_or("a GPU played on the CPU", |p| p.name.as_str());
            println!("cuda: {name}, kernels from {}, medians of {}", self.gpu.origin(), self.repeats);
            match &fast {
                Ok((seconds, library)) => {
                    let faster = if *seconds < exact { "the fast one" } else { "the exact one" };
                    println!("products: exact and fast, by {library}; shares are of {faster} of {n} x {n} x {n}");
                }
                Err(why) => println!("products: exact alone, {why}; shares are of the exact one of {n} x {n} x {n}"),
            }
            println!("{:<46} {:>11} {:>9} {:>9} {:>6} {:>6}", "work", "median ms", "GB/s", "TFLOP/s", "copy", "prod.");
        }
        self.measure("copy", &cost, || to.view_mut(F32).copy_from(from.view(F32)));
    }

    /// Products of a 7B shape and their gradients, in both modes.
    fn products(&self, has_fast: bool) {
        let (n, k) = (self.n(11008), self.n(4096));
        let modes = if has_fast { &[("exact", false), ("fast", true)][..] } else { &[("exact", false)] };
        let large = self.n(8192);
        for m in [1, 16, 64, 128, large] {
            let mut products = Products::of(m, n, k);
            let cost = products.cost();
            for (mode, fast) in modes {
                self.measure(&format!("product, {mode}, {m} x {n} x {k}"), &cost, || products.forward(*fast));
            }
        }
        let products = Products::of(large, n, k);
        let cost = products.cost();
        let mut slopes =
            Slopes { dy: made_up(large * n), dx: Memory::scratch(2 * large * k), dw: Memory::zeros(4 * n * k) };
        for (mode, fast) in modes {
            self.measure(&format!("product, {mode}, gradient of the input"), &cost, || {
                products.backward_input(&mut slopes, *fast);
            });
            self.measure(&format!("product, {mode}, gradient of the weight"), &cost, || {
                products.backward_weight(&mut slopes, *fast);
            });
        }
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

    /// A step of a ring: half of the rows of a rank, those of its late pieces, over the keys of another one.
    fn ring_step(&self) {
        let (t, heads, kv_heads, e) = (self.n(8192), if self.is_played { 1 } else { 16 }, 1, 128);
        let kv_heads = if self.is_played { kv_heads } else { 8 };
        let shape = AttentionShape { heads, kv_heads, head_dim: e, window: None, scale: 1.0 / (e as f32).sqrt() };
        let late = Span { row: t / 2, tokens: t - t / 2, past: t, key_row: 0, keys: t };
        let step = Step::new(Device::Cuda, vec![vec![late]], &shape, t, false);
        let made_up = |rows: usize, heads: usize, seed: u32| {
            let values = (0..rows * heads * e).map(|i| f32::from((i as u32).wrapping_mul(seed) as u16) / 32768.0 - 1.0);
            Tensor::from_slice(rows, heads * e, &values.collect::<Vec<f32>>()).to(Device::Cuda)
        };
        let (q, d_o, block) = (made_up(t, heads, 40503), made_up(t, heads, 30011), made_up(2 * t, kv_heads, 50021));
        let [mut sum, mut lse, mut dq] = [e, 1, e].map(|each| Tensor::zeros(t, heads * each).in_f32_on(Device::Cuda));
        let (of_q, of_k) = (t * heads * e, t * kv_heads * e);
        let flops = 4.0 * (heads * e) as f64 * (t as f64).powi(2) / 2.0;
        // q, o read and written, k and v.
        let cost = Cost { bytes: (of_q / 2 * (2 + 8) + 2 * of_k * 2) as f64, flops };
        self.measure(&format!("attention, a step of a ring, {} x {t}", t / 2), &cost, || {
            ring_attention::forward(&q, &block, &step, &mut sum, &mut lse);
        });
        let o = ring_attention::rounded(sum.clone());
        let cost = Cost { bytes: (of_q / 2 * (2 + 2 + 8) + 2 * of_k * (2 + 4)) as f64, flops: 2.5 * flops };
        let backward = Backward::new([&q, &o, &lse, &d_o], &shape);
        self.measure("attention backward, a step of a ring", &cost, || drop(backward.step(&block, &step, &mut dq)));
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

/// The products of one shape: y (m, n) = x (m, k) W (n, k)^T and its gradients.
struct Products {
    mnk: [usize; 3],
    x: Memory,
    w: Memory,
    y: Memory,
}

struct Slopes {
    dy: Memory,
    dx: Memory,
    dw: Memory,
}

impl Products {
    fn of(m: usize, n: usize, k: usize) -> Self {
        Self { mnk: [m, n, k], x: made_up(m * k), w: made_up(n * k), y: Memory::scratch(2 * m * n) }
    }

    fn cost(&self) -> Cost {
        let [m, n, k] = self.mnk;
        Cost { bytes: 2.0 * (n * k + m * (n + k)) as f64, flops: 2.0 * (m * n * k) as f64 }
    }

    fn forward(&mut self, fast: bool) {
        let [m, n, k] = self.mnk;
        let (x, w) = (Matrix::new(self.x.view(Bf16), m, k), Matrix::new(self.w.view(Bf16), n, k));
        let y = MatrixMut::new(self.y.view_mut(Bf16), m, n);
        let forward = if fast { matmul::forward_fast } else { matmul::forward };
        forward(x, w, None, y, false);
    }

    fn backward_input(&self, slopes: &mut Slopes, fast: bool) {
        let [m, n, k] = self.mnk;
        let (dy, dx) = (Matrix::new(slopes.dy.view(Bf16), m, n), MatrixMut::new(slopes.dx.view_mut(Bf16), m, k));
        let backward = if fast { matmul::backward_input_fast } else { matmul::backward_input };
        backward(dy, Matrix::new(self.w.view(Bf16), n, k), dx, false);
    }

    fn backward_weight(&self, slopes: &mut Slopes, fast: bool) {
        let [m, n, k] = self.mnk;
        let (dy, dw) = (Matrix::new(slopes.dy.view(Bf16), m, n), MatrixMut::new(slopes.dw.view_mut(F32), n, k));
        let backward = if fast { matmul::backward_weight_fast } else { matmul::backward_weight };
        backward(dy, Matrix::new(self.x.view(Bf16), m, k), dw);
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
