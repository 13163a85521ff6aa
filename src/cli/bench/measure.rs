//! The timer: medians of repeats with the machine's peaks sampled between them, and the lines that show them.

use super::args::Args;
use crate::cli::out::say;
use crate::device::cpu::peak;
use crate::device::cpu::pool::pool;
use crate::error::Result;
use crate::model::cost::Work;
use crate::sys::host::median;
use crate::tensor::DType;
use crate::tensor::arena::Buffer;
use serde_json::json;
use std::time::Instant;

/// Multiply-adds of one sample of the peak, in 16 vectors per thread: about a millisecond.
const PEAK_ROUNDS: usize = 400_000;
/// Bytes that are read to measure memory: more than the caches hold.
const READ_BYTES: usize = 256 << 20;
/// Shortest measured batch of calls, in seconds.
const BATCH_S: f64 = 2e-3;

pub struct Meter {
    pub dtype: DType,
    repeats: usize,
    json: bool,
    processor_time: bool,
    suite: String,
    memory: Buffer,
}

/// The seconds of the repeats of one workload, and the peaks between them.
#[derive(Default)]
pub struct Measured {
    seconds: Vec<f64>,
    fma_gflops: Vec<f64>,
    bf16_gflops: Vec<f64>,
    read_gbs: Vec<f64>,
}

/// The median of each part in milliseconds, with its name, over `parts` of the repeats after the warm-up.
pub fn medians_ms<const N: usize>(names: [&'static str; N], parts: &[[f64; N]]) -> Vec<(&'static str, f64)> {
    let part = |i: usize| 1e3 * median(parts[1..].iter().map(|parts| parts[i]));
    names.into_iter().enumerate().map(|(i, name)| (name, part(i))).collect()
}

impl Meter {
    pub fn new(args: &Args) -> Self {
        let Args { dtype, repeats, json, processor_time, .. } = *args;
        Self { dtype, repeats, json, processor_time, suite: String::new(), memory: Buffer::scratch(0) }
    }

    pub fn begin(&mut self, suite: &str) {
        self.suite = suite.to_string();
        if !self.json {
            let (device, threads) = (crate::device::describe(), pool().threads());
            say!("{suite}: {}, {threads} threads, {device}, medians of {}", self.dtype.name(), self.repeats);
            say!("{:<42}   median ms   tokens/s   GFLOP/s     GB/s    bound ms  share", "work");
        }
    }

    /// Returns the wall-clock seconds, or the CPU seconds of this thread.
    pub fn now(&self) -> f64 {
        let clock = if self.processor_time { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
        crate::sys::host::clock_s(clock)
    }

    /// Measures a workload of many milliseconds: `repeats` calls after one warm-up.
    pub fn long(&mut self, mut work: impl FnMut(&Self) -> Result<()>) -> Result<Measured> {
        self.hold_memory();
        work(self)?;
        let mut measured = Measured::default();
        self.sample_peaks(&mut measured, 3);
        for _ in 0..self.repeats {
            let start = self.now();
            work(self)?;
            measured.seconds.push(self.now() - start);
            self.sample_peaks(&mut measured, 3);
        }
        Ok(measured)
    }

    /// Measures and shows a workload of microseconds in batches of calls. A call before each batch reloads the caches.
    pub fn short(&mut self, name: &str, tokens: Option<usize>, cost: Work, mut work: impl FnMut()) {
        self.hold_memory();
        work();
        let start = self.now();
        work();
        let calls = (BATCH_S / (self.now() - start).max(1e-8)).ceil();
        let mut measured = Measured::default();
        for _ in 0..self.repeats {
            self.sample_peaks(&mut measured, 1);
            work();
            let start = self.now();
            for _ in 0..calls as usize {
                work();
            }
            measured.seconds.push((self.now() - start) / calls);
        }
        self.sample_peaks(&mut measured, 1);
        self.show(name, &measured, tokens, cost, &[]);
    }

    fn hold_memory(&mut self) {
        if self.memory.is_empty() {
            self.memory = Buffer::zeros(READ_BYTES / size_of::<f32>());
            self.memory.fill(1.0);
        }
    }

    /// Samples the peaks, by the timer in use.
    fn sample_peaks(&self, measured: &mut Measured, times: usize) {
        for _ in 0..times {
            measured.fma_gflops.push(self.by_clock(|| peak::fma_gflops(PEAK_ROUNDS)));
            if self.dtype == DType::Bf16 {
                // Without such instructions bf16 is multiplied as f32.
                let peak = || peak::bf16_gflops(PEAK_ROUNDS).unwrap_or_else(|| peak::fma_gflops(PEAK_ROUNDS));
                measured.bf16_gflops.push(self.by_clock(peak));
            }
            measured.read_gbs.push(self.by_clock(|| peak::read_gbs(&self.memory)));
        }
    }

    /// Converts a rate by the wall clock into one by the timer in use.
    fn by_clock(&self, rate: impl Fn() -> f64) -> f64 {
        let (wall, own) = (Instant::now(), self.now());
        let rate = rate();
        rate * wall.elapsed().as_secs_f64() / (self.now() - own).max(1e-9)
    }

    /// Shows a result: seconds, rates, and the share of the roofline.
    pub fn show(&self, work: &str, measured: &Measured, tokens: Option<usize>, cost: Work, more: &[(&str, f64)]) {
        let median_s = median(&measured.seconds);
        let (fma, read) = (median(&measured.fma_gflops), median(&measured.read_gbs));
        let products = if self.dtype == DType::Bf16 { median(&measured.bf16_gflops) } else { fma };
        let flops_s = 1e-9 * (cost.products / products + cost.attention / fma);
        let bytes_s = 1e-9 * cost.bytes / read;
        let bound_s = flops_s.max(bytes_s);
        let tokens_per_s = tokens.map(|t| t as f64 / median_s);
        let bound = if flops_s >= bytes_s { "flops" } else { "bytes" };
        if self.json {
            let mut line = json!({
                "suite": self.suite, "work": work, "dtype": self.dtype.name(), "threads": pool().threads(),
                "repeats": measured.seconds.len(), "median_s": median_s,
                "best_s": measured.seconds.iter().copied().fold(f64::INFINITY, f64::min), "tokens_per_s": tokens_per_s,
                "gflops": 1e-9 * cost.flops() / median_s, "gbs": 1e-9 * cost.bytes / median_s,
                "bound": bound, "bound_s": bound_s, "share": bound_s / median_s,
                "peak_gflops": products, "read_gbs": read,
            });
            for &(key, value) in more {
                line[key] = json!(value);
            }
            say!("{line}");
            return;
        }
        say!(
            "{work:<42} {:>11.3} {:>10} {:>9.1} {:>8.1} {:>11.3} {:>4.0} % {bound}",
            1e3 * median_s,
            tokens_per_s.map_or(String::new(), |t| format!("{t:.0}")),
            1e-9 * cost.flops() / median_s,
            1e-9 * cost.bytes / median_s,
            1e3 * bound_s,
            100.0 * bound_s / median_s,
        );
        for (name, value) in more {
            say!("    {name:<38} {value:>11.3}");
        }
    }

    pub fn show_peaks(&self, measured: &Measured) {
        if !self.json {
            let bf16 = if measured.bf16_gflops.is_empty() {
                String::new()
            } else {
                format!(", bf16 {:.0} GFLOP/s", median(&measured.bf16_gflops))
            };
            let (fma, read) = (median(&measured.fma_gflops), median(&measured.read_gbs));
            say!("    peaks here: f32 {fma:.0} GFLOP/s{bf16}, read {read:.0} GB/s");
        }
    }
}
