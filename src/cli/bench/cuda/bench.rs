//! The measurements of `bench cuda`: each workload is compared with the GPU's own copy and GEMM, and with its target.

use crate::cli::bench::args::Args;
use crate::cli::out::say;
use crate::device::cuda::{Gpu, Memory, View, ViewMut};
pub(super) use crate::model::cost::Work;
use crate::sys::host::median;
use crate::tensor::DType::{Bf16, F32};
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::Write;

/// The shortest measured batch of calls, in seconds: much longer than the overhead of the timer's events.
const BATCH_S: f64 = 0.03;
/// Bytes of the inputs that take turns, so that no call reads its data from the GPU's cache.
const ROTATED_BYTES: usize = 512 << 20;

/// The target of a kernel, as a share of a peak.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Copy(f64),
    Product(f64),
    /// The rate of PyTorch, which is measured elsewhere.
    PyTorch,
}

pub(super) struct Bench<'a> {
    pub gpu: &'static Gpu,
    pub args: &'a Args,
    pub record: Option<RefCell<File>>,
    /// Bytes/s of a large copy, read and written; FLOP/s of a large GEMM.
    pub copy: f64,
    pub product: f64,
    /// The peaks that the manufacturer declares for both, if known.
    pub declared: Option<[f64; 2]>,
    pub has_fast: bool,
    /// bf16 values in -1..1, f32 values in 0..1, and bf16 values as large as typical weights.
    pub noise: [Memory; 3],
    /// The number of evaluated targets, and of reached ones.
    pub judged: Cell<[usize; 2]>,
}

/// Seconds of one call: the median, the least and the most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timed {
    pub median: f64,
    pub range: [f64; 2],
}

impl Bench<'_> {
    pub(super) fn repeats(&self) -> usize {
        self.args.repeats.max(1)
    }

    /// A size, small for `--small`.
    pub(super) fn n(&self, real: usize) -> usize {
        if self.args.small { (real / 32).clamp(8, 64) } else { real }
    }

    pub(super) fn pick<T>(&self, real: T, small: T) -> T {
        if self.args.small { small } else { real }
    }

    /// The number of copies of a workload's inputs, of `bytes` each, that take turns.
    pub(super) fn copies(&self, bytes: usize) -> usize {
        self.pick(ROTATED_BYTES.div_ceil(bytes), 2)
    }

    /// Backends of GEMM on this machine: the name, and whether it is cuBLASLt.
    pub(super) fn modes(&self) -> &'static [(&'static str, bool)] {
        if self.has_fast { &[("exact", false), ("fast", true)] } else { &[("exact", false)] }
    }

    /// Whether the GPU has `bytes` free; prints a line if not.
    pub(super) fn has_room(&self, name: &str, bytes: usize) -> bool {
        let free = self.gpu.free_bytes();
        let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
        let has_room = free >= bytes || self.args.small;
        if !has_room && !self.args.json {
            say!("skipped: {name} needs {:.0} GiB of GPU memory, {:.0} GiB are free", gib(bytes), gib(free));
        }
        has_room
    }

    /// Random bf16 values in -1..1.
    pub(super) fn random(&self, len: usize) -> Memory {
        let mut memory = Memory::scratch(2 * len);
        fill(memory.view_mut(Bf16), self.noise[0].view(Bf16));
        memory
    }

    /// Random f32 values in 0..1.
    pub(super) fn random_f32(&self, len: usize) -> Memory {
        let mut memory = Memory::scratch(4 * len);
        fill(memory.view_mut(F32), self.noise[1].view(F32));
        memory
    }

    pub(super) fn fill_weights(&self, weights: ViewMut) {
        fill(weights, self.noise[2].view(Bf16));
    }

    /// Times batches of calls between two CUDA events, after calls that load kernels and raise the clocks.
    pub(super) fn seconds(&self, mut work: impl FnMut()) -> Timed {
        let mut batch = |calls: usize| self.gpu.seconds(|| (0..calls).for_each(|_| work())) / calls as f64;
        let _ = batch(1);
        let calls = self.pick((BATCH_S / batch(1).max(1e-7)).ceil() as usize, 1);
        let _ = batch(calls);
        let times: Vec<f64> = (0..self.repeats()).map(|_| batch(calls)).collect();
        let range = [f64::min, f64::max].map(|end| times.iter().copied().reduce(end).unwrap_or(f64::NAN));
        Timed { median: median(&times), range }
    }

    /// Measures a workload and shows its shares of the peaks.
    pub(super) fn measure(&self, name: &str, cost: Work, target: Option<Target>, work: impl FnMut()) {
        self.show(name, cost, target, self.seconds(work));
    }

    pub(super) fn show(&self, name: &str, cost: Work, target: Option<Target>, timed: Timed) {
        let seconds = timed.median;
        let (bytes_s, flops_s) = (cost.bytes / seconds, cost.flops() / seconds);
        let shares = [bytes_s / self.copy, flops_s / self.product];
        let verdict = target.map_or(String::new(), |target| self.verdict(target, shares, [bytes_s, flops_s]));
        let line = json!({
            "suite": "cuda", "work": name, "verdict": verdict, "seconds": seconds, "seconds_range": timed.range, "bytes_per_s": bytes_s,
            "flops_per_s": flops_s, "copy_share": shares[0], "product_share": shares[1],
        });
        if let Some(file) = &self.record {
            // A result that cannot be recorded is still shown.
            let _ = writeln!(file.borrow_mut(), "{line}");
        }
        if self.args.json {
            say!("{line}");
            return;
        }
        let row = format!(
            "{name:<54} {:>10.4} {:>4} {:>8} {:>8} {:>6} {:>6}  {verdict}",
            1e3 * seconds,
            format!("{:.0}%", 100.0 * (timed.range[1] - timed.range[0]) / seconds),
            rate(1e-9 * bytes_s),
            rate(1e-12 * flops_s),
            percent(shares[0]),
            percent(shares[1]),
        );
        say!("{}", row.trim_end());
    }

    /// `target 85 % of copy, measured 91 % (80 % of the declared peak): reached`.
    fn verdict(&self, target: Target, [copy, product]: [f64; 2], [bytes_s, flops_s]: [f64; 2]) -> String {
        let of_declared = |[memory, flops]: [f64; 2]| {
            let share = if matches!(target, Target::Copy(_)) { bytes_s / memory } else { flops_s / flops };
            format!(" ({} of the declared peak)", percent(share))
        };
        let declared = self.declared.map_or(String::new(), of_declared);
        let (share, reached, of) = match target {
            Target::PyTorch => return format!("target PyTorch's rate, if torch is installed{declared}"),
            Target::Copy(share) => (share, copy, "copy"),
            Target::Product(share) => (share, product, "product"),
        };
        let [judged, well] = self.judged.get();
        let is_well = reached >= share;
        let verdict = match (self.args.small, is_well) {
            (true, _) => "too small to judge",
            (false, true) => "reached",
            (false, false) => "missed",
        };
        if !self.args.small {
            self.judged.set([judged + 1, well + usize::from(is_well)]);
        }
        format!("target {:.0} % of {of}, measured {}{declared}: {verdict}", 100.0 * share, percent(reached))
    }
}

/// Fills a tensor with `noise`, repeated.
fn fill(mut to: ViewMut, noise: View) {
    let len = to.len();
    for start in (0..len).step_by(noise.len()) {
        let end = len.min(start + noise.len());
        to.reborrow().part(start..end).copy_from(noise.part(0..end - start));
    }
}

fn percent(share: f64) -> String {
    if share > 0.0 && share.is_finite() { format!("{:.0} %", 100.0 * share) } else { "-".into() }
}

fn rate(value: f64) -> String {
    if value > 0.0 { format!("{value:.*}", if value < 10.0 { 2 } else { 0 }) } else { "-".into() }
}
