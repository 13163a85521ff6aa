//! GFLOP/s of the three GEMMs compared with the multiply-add peak, measured in turn in the same run.
//!
//! `cargo run --release --example bench-products [seconds per figure] [n,k ...]`
//!
//! Reports medians, for a machine without other users. RLHF_BENCH=best reports the best batch instead, for a shared
//! machine. RLHF_ROWS=m measures one batch size only. RLHF_THREADS=1 measures one thread, by its processor time.

use rlhf_hpc::device::cpu::peak;
use rlhf_hpc::device::cpu::pool::{pool, set_threads};
use rlhf_hpc::ops::linear_logprob;
use rlhf_hpc::ops::matmul::{Into, backward_input, backward_weight, forward};
use rlhf_hpc::ops::{adamw, norm};
use rlhf_hpc::tensor::{DType, Layout, Slice, Tensor, Weight, WeightMut, arena::Buffer};
use std::ops::Range;
use std::time::Instant;

const SHAPES: [(usize, usize); 6] = [(256, 256), (688, 256), (512, 512), (1408, 512), (8192, 512), (1024, 1024)];
const ROWS: [usize; 7] = [1, 4, 8, 16, 32, 64, 2048];

fn typical(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    if std::env::var("RLHF_BENCH").as_deref() == Ok("best") { v[v.len() - 1] } else { v[v.len() / 2] }
}

/// Seconds of wall time, or of processor time with a single thread: other processes do not disturb that.
fn seconds() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let clock = if pool().threads() == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    // SAFETY: `now` is a valid timespec.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// The median rate of `f` (`flops` a call), and of the peak measured between its batches, in GFLOP/s.
fn rate(budget: f64, flops: f64, bf16: bool, f: &mut dyn FnMut()) -> (f64, f64) {
    f();
    let start = seconds();
    f();
    let calls = (3e-4 / (seconds() - start).max(1e-7)).ceil();
    let (mut rates, mut peaks) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < budget || rates.len() < 5 {
        let batch = seconds();
        for _ in 0..calls as usize {
            f();
        }
        rates.push(flops * calls / (seconds() - batch) * 1e-9);
        let bf16 = if bf16 { peak::bf16_gflops(20_000) } else { None };
        peaks.push(bf16.unwrap_or_else(|| peak::fma_gflops(20_000)));
    }
    (typical(rates), typical(peaks))
}

/// Measures the head, and operations that only stream memory: shares of the multiply-add peak, and bytes per second.
fn others(budget: f64) {
    for (t, k, v) in [(2048, 256, 2048), (2048, 512, 8192), (512, 512, 151_936)] {
        let w = filled(Layout::Panel.len(v, k));
        let weight = Weight { n: v, k, layout: Layout::Panel, values: Slice::F32(&w) };
        let h = Tensor::from_slice(t, k, &filled(t * k));
        let targets: Vec<u32> = (0..t).map(|i| (i * 31 % v) as u32).collect();
        let (mut logprobs, mut entropy) = (vec![0.0; t], vec![0.0; t]);
        let flops = 2.0 * (t * k * v) as f64;
        let (score, peak) = rate(budget, flops, false, &mut || {
            linear_logprob::forward(&h, weight, &targets, 1.0, &mut logprobs, &mut entropy);
        });
        let mut dh = Tensor::zeros(t, k);
        let mut dw = Buffer::zeros(w.len());
        let mut loss =
            |_: Range<usize>, _: &[f32], _: &[f32], dlogprobs: &mut [f32], _: &mut [f32]| dlogprobs.fill(1e-3);
        let (train, _) = rate(budget, 3.0 * flops, false, &mut || {
            let dw = WeightMut { n: v, k, layout: Layout::Panel, values: (&mut dw).into() };
            linear_logprob::forward_backward(
                &h,
                weight,
                &targets,
                1.0,
                &mut loss,
                &mut logprobs,
                &mut entropy,
                &mut dh,
                dw,
            );
        });
        let (score, train) = (100.0 * score / peak, 100.0 * train / peak);
        println!("head t {t} k {k} v {v}: scoring {score:.0} %, training {train:.0} % of peak");
    }
    let len = 16 << 20;
    let (mut p, g, mut m, mut v) = (filled(len), filled(len), Buffer::zeros(len), Buffer::zeros(len));
    let update =
        adamw::Update { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, bias1: 0.1, bias2: 0.05, grad_scale: 1.0 };
    let bytes = 4.0 * len as f64;
    let (step, _) = rate(budget, 7.0 * bytes, false, &mut || adamw::step(&mut p, &g, &mut m, &mut v, &update, 0.1));
    let (norm, _) = rate(budget, bytes, false, &mut || assert!(norm::sums_of_squares(&g, 4096).len() == len / 4096));
    println!("adamw {step:.1} GB/s, sums of squares {norm:.1} GB/s, memory read {:.1} GB/s", peak::read_gbs(&g));
}

fn filled(len: usize) -> Buffer {
    let mut buffer = Buffer::scratch(len);
    for (i, x) in buffer.iter_mut().enumerate() {
        *x = ((i * 7919) % 1009) as f32 / 1009.0 - 0.5;
    }
    buffer
}

fn main() {
    let mut args = std::env::args().skip(1);
    let budget = args.next().map_or(0.1, |s| s.parse().expect("seconds"));
    let chosen: Vec<(usize, usize)> = args
        .map(|s| {
            let (n, k) = s.split_once(',').expect("n,k");
            (n.parse().expect("n"), k.parse().expect("k"))
        })
        .collect();
    let shapes = if chosen.is_empty() { SHAPES.to_vec() } else { chosen };
    if let Ok(threads) = std::env::var("RLHF_THREADS") {
        set_threads(threads.parse().expect("threads"));
    }
    let rows = match std::env::var("RLHF_ROWS") {
        Ok(m) => vec![m.parse().expect("rows")],
        Err(_) => ROWS.to_vec(),
    };
    let memory = filled(64 << 20);
    let reads: Vec<f64> = (0..7).map(|_| peak::read_gbs(&memory)).collect();
    drop(memory);
    println!("{} threads, memory read {:.1} GB/s", pool().threads(), typical(reads));
    others(budget);
    for dtype in [DType::F32, DType::Bf16] {
        for &(n, k) in &shapes {
            println!(
                "{dtype:?} W[{n}][{k}]: GFLOP/s (share of peak)\n{:>6} {:>16} {:>16} {:>16}",
                "M", "y", "dx", "dW"
            );
            let len = Layout::Panel.len(n, k);
            let values = filled(len);
            let halves: Vec<u16> = values.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect();
            let values = match dtype {
                DType::F32 => Slice::F32(&values),
                DType::Bf16 => Slice::Bf16(&halves),
            };
            let w = Weight { n, k, layout: Layout::Panel, values };
            let mut dw = Buffer::zeros(len);
            for m in rows.iter().copied() {
                let x = Tensor::from_slice(m, k, &filled(m * k));
                let mut y = Tensor::from_slice(m, n, &filled(m * n));
                let mut dx = Tensor::zeros(m, k);
                let flops = 2.0 * (m * n * k) as f64;
                let dy = y.clone();
                let bf16 = dtype == DType::Bf16;
                let figures = [
                    rate(budget, flops, bf16, &mut || forward(&x, w, None, &mut y, Into::Overwrite)),
                    rate(budget, flops, bf16, &mut || backward_input(&dy, w, &mut dx, Into::Overwrite)),
                    rate(budget, flops, bf16, &mut || {
                        let dw = WeightMut { n, k, layout: Layout::Panel, values: (&mut dw).into() };
                        backward_weight(&dy, &x, dw, dtype);
                    }),
                ];
                print!("{m:>6}");
                for (rate, peak) in figures {
                    print!(" {rate:>8.0} ({:>3.0} %)", 100.0 * rate / peak);
                }
                println!();
            }
        }
    }
}
