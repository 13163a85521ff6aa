//! A rollout of long responses through the real scheduler, with made-up lengths and the seconds of a rate model.
//!
//! `cargo run --release --example bench-admission [lengths ...]`, lengths: lognormal, bimodal, capped, equal; all without
//! any. `cost` measures the scheduler's own time instead.
//!
//! GRPO of Qwen3-8B on 8 x H100: 512 prompts x 8 samples from one queue, 144 KiB of keys and values for a token, 380,000
//! tokens of cache and 15.1 GB of weights on each GPU. A forward takes
//!
//!     15.1 GB / (3.35 TB/s x share) + cached bytes read / (3.35 TB/s x 0.75) + prompt tokens x 16.4 GFLOP / (989 TFLOP/s x 0.44)
//!
//! The share is 0.45 up to 64 rows and 0.42 above, as planned for sm_90. The tokens of attention while prompts are read
//! count as read once.

use rlhf_hpc::model::Kept;
use rlhf_hpc::ops::attention::PAGE;
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::blocks::GroupPages;
use rlhf_hpc::rollout::scheduler::{Limits, Scheduler, Spec};
use std::time::Instant;

const GPUS: usize = 8;
const PROMPTS: usize = 512;
const SAMPLES: usize = 8;
const CAP: usize = 16_384;
const CACHE_TOKENS: usize = 380_000;
const KV_BYTES: f64 = 147_456.0;
const WEIGHT_BYTES: f64 = 15.1e9;
const BYTES_PER_S: f64 = 3.35e12;
const FLOPS_PER_S: f64 = 989e12 * 0.44;
const FLOPS: f64 = 16.4e9;

/// A sample of the standard normal distribution.
fn normal(rng: Rng, i: u32) -> f64 {
    let uniform = |what| (rng.below(1 << 32, [i, what, 0, 0]) as f64 + 0.5) / (1u64 << 32) as f64;
    (-2.0 * uniform(0).ln()).sqrt() * (std::f64::consts::TAU * uniform(1)).cos()
}

/// New tokens of each sample. Lognormal: 8,081 on average under the cap. Bimodal: half around 2,000, half around 14,000.
/// Capped: two of three reach the cap. Equal: all reach it.
fn lengths(name: &str) -> Vec<usize> {
    let rng = Rng::new(51, Purpose::Shuffle);
    let log = |i, median: f64, sigma: f64| (median * (sigma * normal(rng, i)).exp()) as usize;
    let one = |i: u32| match name {
        "lognormal" => log(i, 7_290.0, 0.6),
        "bimodal" => log(i, if normal(rng, 100_000 + i) < 0.0 { 2_000.0 } else { 14_000.0 }, 0.1),
        "capped" => log(i, 20_000.0, 0.5),
        _ => CAP,
    };
    (0..(PROMPTS * SAMPLES) as u32).map(|i| one(i).clamp(1, CAP)).collect()
}

fn specs() -> Vec<Spec> {
    let rng = Rng::new(52, Purpose::Shuffle);
    let prompt_tokens = |group: usize| 100 + rng.below(401, [group as u32, 0, 0, 0]) as usize;
    let of_group =
        |group| std::iter::repeat_n(Spec { group, prompt_tokens: prompt_tokens(group), new_tokens_max: CAP }, SAMPLES);
    (0..PROMPTS).flat_map(of_group).collect()
}

/// A GPU with its scheduler.
struct Gpu {
    scheduler: Scheduler,
    drawn: Vec<usize>,
    pages: usize,
    clock_s: f64,
    /// The time of its last token.
    end_s: f64,
    forwards: usize,
    fed: usize,
    rows: usize,
    rows_max: usize,
    /// Used share of the cache times seconds, and the seconds, until the queue is empty.
    used: [f64; 2],
    own_s: f64,
}

impl Gpu {
    fn new(specs: &[Spec], new_tokens_before: Option<usize>, batch_max: usize, cache_tokens: usize) -> Self {
        let pages = cache_tokens / PAGE;
        let all = vec![GroupPages { kept: Kept::All, pages }];
        let limits = Limits { batch_max, prefill_tokens_max: 8192, pages: all, new_tokens_before };
        Self {
            scheduler: Scheduler::new(specs.iter().copied(), limits).expect("each fits"),
            drawn: vec![0; specs.len()],
            pages,
            clock_s: 0.0,
            end_s: 0.0,
            forwards: 0,
            fed: 0,
            rows: 0,
            rows_max: 0,
            used: [0.0; 2],
            own_s: 0.0,
        }
    }

    /// Samples a token. Returns whether the sequence ends.
    fn draws(&mut self, s: usize, lengths: &[usize]) -> bool {
        self.scheduler.accept(s);
        self.drawn[s] += 1;
        let ends = self.drawn[s] == lengths[s];
        if ends {
            self.scheduler.finish(s);
        }
        ends
    }

    /// One forward. `next` is the first prompt that no GPU has taken, if there is a queue.
    fn step(&mut self, lengths: &[usize], next: Option<&mut usize>) {
        let begin = Instant::now();
        let mut fills = false;
        if let Some(next) = next {
            while self.scheduler.wants_more() {
                if *next == PROMPTS {
                    self.scheduler.close();
                } else {
                    self.scheduler.add(*next * SAMPLES..(*next + 1) * SAMPLES);
                    *next += 1;
                }
            }
            fills = *next < PROMPTS;
        }
        for s in self.scheduler.admit().to_vec() {
            if !self.draws(s, lengths) {
                self.scheduler.share(s);
            }
        }
        let feeds = self.scheduler.plan().to_vec();
        self.own_s += begin.elapsed().as_secs_f64();
        if feeds.is_empty() {
            return;
        }
        let rows = feeds.iter().filter(|feed| feed.complete).count();
        let cached: usize = feeds.iter().map(|feed| feed.past + feed.tokens).sum();
        let tokens: usize = feeds.iter().map(|feed| feed.tokens).sum();
        let share = if feeds.len() > 64 { 0.42 } else { 0.45 };
        let read_s = WEIGHT_BYTES / (BYTES_PER_S * share) + cached as f64 * KV_BYTES / (BYTES_PER_S * 0.75);
        let s = read_s + (tokens - rows.min(tokens)) as f64 * FLOPS / FLOPS_PER_S;
        let used = (self.pages - self.scheduler.free_pages()[0]) as f64 / self.pages as f64;
        if fills {
            self.used[0] += used * s;
            self.used[1] += s;
        }
        self.clock_s += s;
        self.end_s = self.clock_s;
        self.forwards += 1;
        self.rows += rows;
        self.rows_max = self.rows_max.max(feeds.len());
        self.fed += tokens;
        for feed in feeds {
            self.scheduler.fed(feed);
            if feed.complete {
                self.draws(feed.sequence, lengths);
            }
        }
    }
}

fn simulate(name: &str, is_first: bool) {
    let (specs, lengths) = (specs(), lengths(name));
    let all: usize = lengths.iter().sum();
    let before = (!is_first).then_some(all / lengths.len());
    let mut gpus: Vec<Gpu> = (0..GPUS).map(|_| Gpu::new(&specs, before, 512, CACHE_TOKENS)).collect();
    for gpu in &mut gpus {
        gpu.scheduler.open();
    }
    let mut next = 0;
    while let Some(gpu) =
        gpus.iter_mut().filter(|gpu| !gpu.scheduler.is_done()).min_by(|a, b| a.clock_s.total_cmp(&b.clock_s))
    {
        gpu.step(&lengths, Some(&mut next));
    }
    let seconds = gpus.iter().map(|gpu| gpu.end_s).fold(0.0, f64::max);
    let sum = |of: &dyn Fn(&Gpu) -> f64| gpus.iter().map(of).sum::<f64>();
    let forwards = sum(&|gpu| gpu.forwards as f64);
    let once: usize = specs.iter().step_by(SAMPLES).map(|spec| spec.prompt_tokens).sum::<usize>() + all - lengths.len();
    println!(
        "| {name}, mean {} | {} | {:.0} | {:.1} | {} | {:.1} % | {} | {:.0} k | {:.0} | {:.0} | {:.0} |",
        all / lengths.len(),
        if is_first { "first" } else { "later" },
        seconds,
        sum(&|gpu| gpu.rows as f64) / forwards,
        gpus.iter().map(|gpu| gpu.rows_max).max().unwrap_or(0),
        100.0 * sum(&|gpu| gpu.used[0]) / sum(&|gpu| gpu.used[1]),
        sum(&|gpu| gpu.scheduler.preemptions() as f64),
        (sum(&|gpu| gpu.fed as f64) - once as f64) / 1e3,
        all as f64 / seconds / GPUS as f64,
        seconds - sum(&|gpu| gpu.end_s) / GPUS as f64,
        1e6 * sum(&|gpu| gpu.own_s) / forwards,
    );
}

/// The scheduler's own time with 512 rows and 4,096 waiting samples: for the first step, and then for each.
fn cost() {
    let specs: Vec<Spec> = specs();
    let lengths: Vec<usize> = lengths("lognormal").into_iter().map(|length| (length / 16).max(1)).collect();
    let mean = lengths.iter().sum::<usize>() / lengths.len();
    // Room for about 500 rows of a sixteenth of the lengths.
    for cache_tokens in [250_000, 10_000_000] {
        let mut gpu = Gpu::new(&specs, Some(mean), 512, cache_tokens);
        gpu.step(&lengths, None);
        let first_s = gpu.own_s;
        while gpu.forwards < 1500 {
            gpu.step(&lengths, None);
        }
        println!(
            "cache of {cache_tokens} tokens, {:.0} rows on average (at most {}), {} preemptions: first step {:.1} ms, then {:.1} us a step",
            gpu.rows as f64 / gpu.forwards as f64,
            gpu.rows_max,
            gpu.scheduler.preemptions(),
            1e3 * first_s,
            1e6 * (gpu.own_s - first_s) / (gpu.forwards - 1) as f64
        );
    }
}

fn main() {
    let mut given: Vec<String> = std::env::args().skip(1).collect();
    if given.iter().any(|name| name == "cost") {
        return cost();
    }
    if given.is_empty() {
        given = ["lognormal", "bimodal", "capped", "equal"].map(str::to_owned).to_vec();
    }
    println!(
        "| lengths | rollout | s | rows, mean | most | cache used | preemptions | read again | tokens/s/GPU | idle s | scheduler us |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for name in &given {
        simulate(name, true);
        simulate(name, false);
    }
}
