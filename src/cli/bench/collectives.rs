//! Our collectives compared with MPI's own on the same communicator, call by call in the same run; and how much of a gather in
//! the background computing hides.
//!
//! Bytes are of the whole buffer of a rank (of the message, for the ring). Seconds are the slowest rank's. Bandwidth is
//! bytes / seconds, the caller's view, not the wire's.

use super::measure::median;
use crate::cli::out::say;
use crate::comm::accounting::{Totals, accounting};
use crate::comm::mpi_baseline::MpiBaseline;
use crate::comm::{Group, Stream, World};
use crate::device::cpu::peak;
use crate::sys::{affinity, host};
use serde_json::json;
use std::ops::Range;
use std::time::Instant;

/// Buffers from 4 B to 64 MiB; a rank's part is at least one element.
const BYTES: [usize; 10] = [4, 64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26];
/// Gathers that are hidden behind computing.
const OVERLAP_BYTES: [usize; 3] = [1 << 20, 1 << 23, 1 << 26];
/// A measured batch of calls lasts about this long, in seconds.
const BATCH_S: f64 = 4e-3;
/// How late the other ranks are where a stream waits for them, about, in seconds.
const LATE_S: f64 = 0.02;
/// Multiply-adds of one sample of this rank's speed.
const ROUNDS: usize = 100_000;

pub struct Options {
    pub repeats: usize,
    pub json: bool,
}

struct Suite<'a> {
    group: &'a Group,
    options: &'a Options,
    oversubscribed: bool,
}

/// A collective, ours or the MPI baseline, on buffers that it holds.
type Call<'a> = Box<dyn FnMut() + 'a>;

/// All ranks call this.
pub fn run(world: &World, options: &Options) {
    let group = world.group();
    let oversubscribed = world.local_size > affinity::cores();
    let suite = Suite { group: &group, options, oversubscribed };
    if group.rank() == 0 && !options.json {
        let (ranks, cores) = (group.size(), affinity::cores());
        let note = if oversubscribed {
            "; more ranks than cores, so that every wait is for a turn of the core too"
        } else {
            ""
        };
        say!("collectives: {ranks} ranks, {cores} cores, medians of {}{note}", options.repeats);
        say!(
            "{:<16} {:>10} {:>12} {:>12} {:>9} {:>9} {:>12}",
            "operation",
            "bytes",
            "ours us",
            "MPI us",
            "ours GB/s",
            "MPI GB/s",
            "ours / MPI"
        );
    }
    for bytes in BYTES {
        let each = (bytes / size_of::<f32>() / group.size()).max(1);
        suite.all_reduce(bytes / size_of::<f32>());
        suite.reduce_scatter(each);
        suite.all_gather(each);
        suite.shift(bytes / size_of::<f32>());
        suite.all_to_all(each);
    }
    if group.rank() == 0 && !options.json {
        say!(
            "{:<16} {:>10} {:>12} {:>12} {:>12} {:>9} {:>12}",
            "background",
            "bytes",
            "gather us",
            "compute us",
            "both us",
            "hidden",
            "exposed us"
        );
    }
    let stream = Stream::new("bench", &[&group]);
    for bytes in OVERLAP_BYTES {
        suite.overlap(&stream, bytes);
    }
    suite.waiting(&stream);
}

impl Suite<'_> {
    fn parts(&self, each: usize) -> Vec<Range<usize>> {
        (0..self.group.size()).map(|r| r * each..(r + 1) * each).collect()
    }

    fn all_reduce(&self, len: usize) {
        let (mut x, from, mut into) = (vec![0.5; len], vec![0.5; len], vec![0.0; len]);
        let ours: Call = Box::new(|| self.group.all_reduce_sum(&mut x));
        self.compare("all_reduce", len, ours, &mut |plain| plain.all_reduce_sum(&from, &mut into));
    }

    fn reduce_scatter(&self, each: usize) {
        let ranges = self.parts(each);
        let len = each * ranges.len();
        let (mut x, from, mut into) = (vec![0.5; len], vec![0.5; len], vec![0.0; each]);
        let ours: Call = Box::new(|| self.group.reduce_scatter_sum(&mut x, &ranges));
        self.compare("reduce_scatter", len, ours, &mut |plain| plain.reduce_scatter_sum(&from, &mut into));
    }

    fn all_gather(&self, each: usize) {
        let ranges = self.parts(each);
        let len = each * ranges.len();
        let (mut x, from, mut into) = (vec![0.5; len], vec![0.5; each], vec![0.0; len]);
        let ours: Call = Box::new(|| self.group.all_gather(&mut x, &ranges));
        self.compare("all_gather", len, ours, &mut |plain| plain.all_gather(&from, &mut into));
    }

    fn shift(&self, len: usize) {
        let (send, mut receive, mut into) = (vec![0.5; len], vec![0.0; len], vec![0.0; len]);
        let ours: Call = Box::new(|| self.group.shift(&send, &mut receive));
        self.compare("ring_exchange", len, ours, &mut |plain| plain.shift(&send, &mut into));
    }

    fn all_to_all(&self, each: usize) {
        let ranges = self.parts(each);
        let len = each * ranges.len();
        let (send, mut receive, mut into) = (vec![0.5; len], vec![0.0; len], vec![0.0; len]);
        let ours: Call = Box::new(|| self.group.all_to_all(&send, &ranges, &mut receive, &ranges));
        self.compare("all_to_all", len, ours, &mut |plain| plain.all_to_all(&send, &mut into));
    }

    /// Batches of ours and of MPI's calls in turn.
    fn compare(&self, op: &str, len: usize, mut ours: Call, plain: &mut dyn FnMut(&MpiBaseline)) {
        let mut theirs = || plain(&MpiBaseline::of(self.group).expect("a group of several ranks"));
        ours();
        theirs();
        let calls = (BATCH_S / self.batch(3, &mut ours).max(1e-7)).ceil().min(2000.0) as usize;
        let (mut own, mut mpi) = (Vec::new(), Vec::new());
        for _ in 0..self.options.repeats {
            own.push(self.batch(calls, &mut ours));
            mpi.push(self.batch(calls, &mut theirs));
        }
        if self.group.rank() != 0 {
            return;
        }
        let bytes = len * size_of::<f32>();
        let (own, mpi) = (median(&own), median(&mpi));
        let rate = |seconds: f64| 1e-9 * bytes as f64 / seconds;
        if self.options.json {
            let line = json!({
                "suite": "collectives", "op": op, "ranks": self.group.size(), "bytes": bytes,
                "oversubscribed": self.oversubscribed, "repeats": self.options.repeats, "calls": calls,
                "ours_us": 1e6 * own, "mpi_us": 1e6 * mpi, "ours_gbs": rate(own), "mpi_gbs": rate(mpi), "ratio": own / mpi,
            });
            say!("{line}");
        } else {
            let (own_us, mpi_us, ratio) = (1e6 * own, 1e6 * mpi, own / mpi);
            let (own_gbs, mpi_gbs) = (rate(own), rate(mpi));
            say!("{op:<16} {bytes:>10} {own_us:>12.2} {mpi_us:>12.2} {own_gbs:>9.3} {mpi_gbs:>9.3} {ratio:>12.2}");
        }
    }

    /// Seconds of one of `calls` calls, on the slowest rank.
    fn batch(&self, calls: usize, call: &mut dyn FnMut()) -> f64 {
        self.group.barrier();
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        self.slowest(start.elapsed().as_secs_f64() / calls as f64)
    }

    fn slowest(&self, seconds: f64) -> f64 {
        let mut seconds = [seconds];
        self.group.all_reduce_max_f64(&mut seconds);
        seconds[0]
    }

    /// Seconds of one round of computing.
    fn round_s(&self) -> f64 {
        let batches: Vec<f64> = (0..5).map(|_| self.batch(10, &mut || compute(1))).collect();
        median(&batches).max(1e-7)
    }

    /// What a stream takes of a core while it waits for a rank that is late: its thread's processor time over the wall's.
    fn waiting(&self, stream: &Stream) {
        let rounds = (LATE_S / self.round_s()).ceil() as usize;
        let mut shares = Vec::new();
        for _ in 0..self.options.repeats {
            let submit = || {
                stream.submit(|groups| {
                    let cpu = || host::clock_s(libc::CLOCK_THREAD_CPUTIME_ID);
                    let (wall, own) = (Instant::now(), cpu());
                    groups[0].shift(&[1.0; 1000], &mut [0.0; 1000]);
                    (cpu() - own) / wall.elapsed().as_secs_f64()
                })
            };
            self.group.barrier();
            let early = (self.group.rank() == 0).then(submit);
            if early.is_some() {
                compute(rounds);
            }
            // The other ranks begin when rank 0 has computed.
            self.group.barrier();
            shares.push(early.unwrap_or_else(submit).wait());
        }
        if self.group.rank() != 0 {
            return;
        }
        let share = median(&shares);
        if self.options.json {
            let line = json!({
                "suite": "collectives", "op": "background_wait", "ranks": self.group.size(), "bytes": 4000,
                "oversubscribed": self.oversubscribed, "repeats": self.options.repeats, "core_share": share,
            });
            say!("{line}");
        } else {
            say!("a stream that waits for a late rank takes {:.1} % of a core", 100.0 * share);
        }
    }

    /// A gather alone, computing alone for about as long, and both at once. Hidden is the share of the gather's own time,
    /// both at once, that the computing thread did not wait; exposed is what it did.
    fn overlap(&self, stream: &Stream, bytes: usize) {
        let ranges = self.parts(bytes / size_of::<f32>() / self.group.size());
        let mut x = Some(vec![0.5f32; bytes / size_of::<f32>()]);
        let mut gather = |compute: &dyn Fn()| {
            let (mut held, ranges) = (x.take().expect("put back below"), ranges.clone());
            let pending = stream.submit(move |groups| {
                groups[0].all_gather(&mut held, &ranges);
                held
            });
            compute();
            x = Some(pending.wait());
        };
        gather(&|| {});
        let alone = self.batch(3, &mut || gather(&|| {}));
        let rounds = (alone / self.round_s()).ceil() as usize;
        let [mut gathers, mut computes, mut boths, mut exposed, mut hidden] = [const { Vec::new() }; 5];
        let calls = (5.0 * BATCH_S / alone).ceil().min(200.0) as usize;
        for _ in 0..self.options.repeats {
            gathers.push(self.batch(calls, &mut || gather(&|| {})));
            computes.push(self.batch(calls, &mut || compute(rounds)));
            let before = background();
            boths.push(self.batch(calls, &mut || gather(&|| compute(rounds))));
            let after = background();
            let (own, waited) = (after.0 - before.0, after.1 - before.1);
            exposed.push(self.slowest(waited / calls as f64));
            hidden.push(1.0 - self.slowest((waited / own).min(1.0)));
        }
        if self.group.rank() != 0 {
            return;
        }
        let us = |seconds: &[f64]| 1e6 * median(seconds);
        let (gather, compute, both, exposed) = (us(&gathers), us(&computes), us(&boths), us(&exposed));
        let hidden = median(&hidden);
        if self.options.json {
            let line = json!({
                "suite": "collectives", "op": "background_all_gather", "ranks": self.group.size(), "bytes": bytes,
                "oversubscribed": self.oversubscribed, "repeats": self.options.repeats, "calls": calls,
                "gather_us": gather, "compute_us": compute, "both_us": both, "hidden": hidden, "exposed_us": exposed,
            });
            say!("{line}");
        } else {
            let op = "all_gather";
            let hidden = 100.0 * hidden;
            say!("{op:<16} {bytes:>10} {gather:>12.1} {compute:>12.1} {both:>12.1} {hidden:>7.0} % {exposed:>12.1}");
        }
    }
}

/// Multiply-adds in registers on all threads of this rank: they want cores alone, no memory.
fn compute(rounds: usize) {
    for _ in 0..rounds {
        std::hint::black_box(peak::fma_gflops(ROUNDS / 100));
    }
}

/// Seconds inside gathers so far, and seconds that the stream of this suite was waited for.
fn background() -> (f64, f64) {
    let accounting = accounting();
    let of = |wanted: &str, seconds: fn(&Totals) -> f64| -> f64 {
        accounting.iter().filter(|((_, op), _)| *op == wanted).map(|(_, totals)| seconds(totals)).sum()
    };
    (of("all_gather", |t| t.seconds), of("bench", |t| t.exposed))
}
