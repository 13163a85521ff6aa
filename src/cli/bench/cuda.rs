//! `bench cuda`: the kernels on a GPU, beside the copy and the product that the same GPU does best, and beside their targets.

mod attention;
mod decode;
mod head;
mod products;
mod streaming;
mod train;

use super::measure::median;
use crate::cli::out::say;
use crate::comm::World;
use crate::comm::gpus;
use crate::device::cuda::{self, Gpu, Memory, View, ViewMut, devices, fast};
use crate::error::{self, Error};
use crate::tensor::DType::{Bf16, F32};
use products::Products;
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

/// Shortest measured batch of calls, in seconds: far more than the marks of the clock cost.
const BATCH_S: f64 = 0.03;
/// What is read in turn, so that no call finds its data in the GPU's cache.
const ROTATED_BYTES: usize = 512 << 20;
/// Values that look random, which larger runs repeat.
const NOISE: usize = 1 << 22;

/// What is asked for.
#[derive(Debug)]
pub struct Options {
    pub repeats: usize,
    pub json: bool,
    /// Sizes for a machine that only tries the way.
    pub is_small: bool,
    /// Some of `PARTS`; none: all.
    pub parts: Vec<String>,
    /// Where results also go, a JSON object a line.
    pub record: Option<PathBuf>,
}

/// A name that `--part` takes, and what it measures.
type Part = (&'static str, fn(&Bench) -> error::Result<()>);

const PARTS: [Part; 6] = [
    ("attention", |bench| {
        attention::run(bench);
        Ok(())
    }),
    ("streaming", |bench| {
        streaming::run(bench);
        Ok(())
    }),
    ("head", |bench| {
        head::run(bench);
        Ok(())
    }),
    ("decode", decode::run),
    ("train", train::run),
    ("products", |bench| {
        products::run(bench);
        Ok(())
    }),
];

/// What a kernel has to reach, as a share of a peak.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Copy(f64),
    Product(f64),
    /// The rate of PyTorch, which is measured elsewhere.
    PyTorch,
}

/// What a work moves and computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub bytes: f64,
    pub flops: f64,
    pub target: Option<Target>,
}

impl Cost {
    pub fn of(bytes: f64, flops: f64) -> Self {
        Self { bytes, flops, target: None }
    }

    pub fn with(self, target: Target) -> Self {
        Self { target: Some(target), ..self }
    }
}

/// Measures, and shows each result at once.
pub(super) struct Bench {
    gpu: &'static Gpu,
    options: Options,
    record: Option<RefCell<File>>,
    /// Bytes/s of a large copy, read and written; FLOP/s of a large product.
    copy: f64,
    product: f64,
    has_fast: bool,
    /// bf16 in -1..1, f32 in 0..1, bf16 of the size that weights have.
    noise: [Memory; 3],
    /// Targets that were looked at, and those that were reached.
    judged: Cell<[usize; 2]>,
}

/// # Errors
/// `Usage` where there is no GPU, or no such part.
pub fn run(options: Options) -> error::Result<()> {
    let unknown = options.parts.iter().find(|part| PARTS.iter().all(|(name, _)| name != part));
    if let Some(part) = unknown {
        let names = PARTS.map(|(name, _)| name).join(", ");
        return Err(Error::usage(format!("bench cuda has no part {part}")).hint(format!("parts: {names}")));
    }
    let gpu = open()?;
    let record = match &options.record {
        None => None,
        Some(path) => Some(RefCell::new(File::create(path).map_err(|e| Error::io("write", path, &e))?)),
    };
    let noise = noise(if options.is_small { 1 << 12 } else { NOISE });
    let fast = fast::open();
    let [copy, product] = [f64::NAN; 2];
    let (has_fast, judged) = (fast.is_ok(), Cell::new([0; 2]));
    let mut bench = Bench { gpu, options, record, copy, product, has_fast, noise, judged };
    bench.peaks(&fast);
    for (name, part) in PARTS {
        if bench.options.parts.is_empty() || bench.options.parts.iter().any(|wanted| wanted == name) {
            part(&bench)?;
        }
    }
    let [judged, reached] = bench.judged.get();
    if judged > 0 && !bench.options.json {
        say!("{reached} of {judged} targets reached");
    }
    Ok(())
}

/// The first GPU that this process sees.
fn open() -> error::Result<&'static Gpu> {
    let none = |why| Error::usage(format!("bench cuda: {why}")).hint("run it on a machine with a GPU");
    let (_, seen) = devices::devices().map_err(none)?;
    let index = gpus::mine(&World::start()?, &seen).ok_or_else(|| none("no GPU is seen".into()))?;
    Ok(cuda::gpu::start(Gpu::open(index)?))
}

/// Products and copies of zeros would draw less power, and clocks follow power.
fn noise(len: usize) -> [Memory; 3] {
    let mut state = 1u32;
    let values: Vec<f32> = (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        })
        .collect();
    let narrow = |size: f32| values.iter().map(|x| half::bf16::from_f32(size * (2.0 * x - 1.0)).to_bits()).collect();
    let [large, small]: [Vec<u16>; 2] = [1.0, 0.04].map(narrow);
    [Memory::of(&large), Memory::of(&values), Memory::of(&small)]
}

/// Seconds of one call: the median, the least and the most.
#[derive(Clone, Copy, Debug)]
struct Timed {
    median: f64,
    range: [f64; 2],
}

impl Bench {
    /// A size, small where only the way is tried.
    fn n(&self, real: usize) -> usize {
        if self.options.is_small { (real / 32).clamp(8, 64) } else { real }
    }

    fn pick<T>(&self, real: T, small: T) -> T {
        if self.options.is_small { small } else { real }
    }

    /// How many of a work's inputs, of `bytes` each, are taken in turn.
    fn copies(&self, bytes: usize) -> usize {
        self.pick(ROTATED_BYTES.div_ceil(bytes), 2)
    }

    /// Modes of products that this machine has: the name, and whether it is the fast one.
    fn modes(&self) -> &'static [(&'static str, bool)] {
        if self.has_fast { &[("exact", false), ("fast", true)] } else { &[("exact", false)] }
    }

    /// Whether the GPU has as many bytes free; where not, that is said.
    fn has_room(&self, name: &str, bytes: usize) -> bool {
        let free = self.gpu.free_bytes();
        let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
        let has_room = free >= bytes || self.options.is_small;
        if !has_room && !self.options.json {
            say!("skipped: {name}, which takes {:.0} GiB of the GPU, where {:.0} are free", gib(bytes), gib(free));
        }
        has_room
    }

    /// bf16 values in -1..1 that look random.
    fn made_up(&self, len: usize) -> Memory {
        let mut memory = Memory::scratch(2 * len);
        fill(memory.view_mut(Bf16), self.noise[0].view(Bf16));
        memory
    }

    /// f32 values in 0..1 that look random.
    fn made_up_f32(&self, len: usize) -> Memory {
        let mut memory = Memory::scratch(4 * len);
        fill(memory.view_mut(F32), self.noise[1].view(F32));
        memory
    }

    fn fill_weights(&self, weights: ViewMut) {
        fill(weights, self.noise[2].view(Bf16));
    }

    /// Batches of calls between two marks of the GPU's clock, after calls that load kernels and bring clocks up.
    fn seconds(&self, mut work: impl FnMut()) -> Timed {
        let mut batch = |calls: usize| self.gpu.seconds(|| (0..calls).for_each(|_| work())) / calls as f64;
        let _ = batch(1);
        let calls = self.pick((BATCH_S / batch(1).max(1e-7)).ceil() as usize, 1);
        let _ = batch(calls);
        let times: Vec<f64> = (0..self.options.repeats).map(|_| batch(calls)).collect();
        let range = [f64::min, f64::max].map(|end| times.iter().copied().reduce(end).unwrap_or(f64::NAN));
        Timed { median: median(&times), range }
    }

    /// Measures a work and shows its shares of the peaks. Gives its seconds.
    fn measure(&self, name: &str, cost: &Cost, work: impl FnMut()) -> f64 {
        let timed = self.seconds(work);
        self.show(name, cost, timed);
        timed.median
    }

    fn show(&self, name: &str, cost: &Cost, timed: Timed) {
        let seconds = timed.median;
        let (bytes_s, flops_s) = (cost.bytes / seconds, cost.flops / seconds);
        let shares = [bytes_s / self.copy, flops_s / self.product];
        let verdict = cost.target.map_or(String::new(), |target| self.verdict(target, shares));
        let line = json!({
            "suite": "cuda", "work": name, "verdict": verdict, "seconds": seconds, "seconds_range": timed.range, "bytes_per_s": bytes_s,
            "flops_per_s": flops_s, "copy_share": shares[0], "product_share": shares[1],
        });
        if let Some(file) = &self.record {
            // A result that is shown but not recorded is no reason to end.
            let _ = writeln!(file.borrow_mut(), "{line}");
        }
        if self.options.json {
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

    /// `target 85 % of copy, measured 91 %: reached`.
    fn verdict(&self, target: Target, [copy, product]: [f64; 2]) -> String {
        let (share, reached, of) = match target {
            Target::PyTorch => return "target PyTorch's rate: compared with it where there is torch".into(),
            Target::Copy(share) => (share, copy, "copy"),
            Target::Product(share) => (share, product, "product"),
        };
        let [judged, well] = self.judged.get();
        let is_well = reached >= share;
        let words = match (self.options.is_small, is_well) {
            (true, _) => "too small to tell",
            (false, true) => "reached",
            (false, false) => "missed",
        };
        if !self.options.is_small {
            self.judged.set([judged + 1, well + usize::from(is_well)]);
        }
        format!("target {:.0} % of {of}, measured {}: {words}", 100.0 * share, percent(reached))
    }

    /// A large copy, and a large product by whoever does it faster: the denominators.
    fn peaks(&mut self, fast: &Result<String, String>) {
        let len = self.n(1 << 14).pow(2);
        let (from, mut to) = (self.made_up_f32(len), Memory::scratch(4 * len));
        let copied = self.seconds(|| to.view_mut(F32).copy_from(from.view(F32)));
        let copy_cost = Cost::of(8.0 * len as f64, 0.0);
        self.copy = copy_cost.bytes / copied.median;
        let n = self.n(8192);
        let mut large = Products::of(self, n, n, n, 1);
        let cost = large.cost();
        let done: Vec<(&str, Timed)> =
            self.modes().iter().map(|(mode, fast)| (*mode, self.seconds(|| large.forward(*fast)))).collect();
        let best = done.iter().map(|(_, timed)| timed.median).fold(f64::INFINITY, f64::min);
        self.product = cost.flops / best;
        if !self.options.json {
            let name = &self.gpu.properties().name;
            say!("cuda: {name}, kernels from {}, medians of {}", self.gpu.origin(), self.options.repeats);
            match fast {
                Ok(library) => {
                    let faster = done.iter().find(|(_, timed)| timed.median <= best).map_or("exact", |(mode, _)| mode);
                    say!("products: exact and fast, by {library}; shares are of the {faster} one of {n} x {n} x {n}");
                }
                Err(why) => say!("products: exact alone, {why}; shares are of that of {n} x {n} x {n}"),
            }
            say!(
                "{:<54} {:>10} {:>4} {:>8} {:>8} {:>6} {:>6}  target",
                "work",
                "median ms",
                "+-",
                "GB/s",
                "TFLOP/s",
                "copy",
                "prod."
            );
        }
        self.show(&format!("copy of {} MiB", len >> 18), &copy_cost, copied);
        for (mode, timed) in done {
            self.show(&format!("product, {mode}, {n} x {n} x {n}"), &cost, timed);
        }
    }
}

/// Fills a run with `noise`, again and again.
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

/// A rate with as many digits as tell something.
fn rate(value: f64) -> String {
    if value > 0.0 { format!("{value:.*}", if value < 10.0 { 2 } else { 0 }) } else { "-".into() }
}
