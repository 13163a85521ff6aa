//! Our collectives compared with MPI's own on the same communicator, call by call in the same run; and how much of a gather in
//! the background computing hides.
//!
//! Bytes are of the whole buffer of a rank (of the message, for the ring). Seconds are the slowest rank's. Bandwidth is
//! bytes / seconds, the caller's view, not the wire's.

use super::args::Args;
use crate::cli::out::say;
use crate::comm::accounting::{Totals, accounting};
use crate::comm::mpi_baseline::MpiBaseline;
use crate::comm::{Group, Stream, World};
use crate::device::cpu::peak;
use crate::sys::host::median;
use crate::sys::{affinity, host};
use serde_json::{Value, json};
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

struct Suite<'a> {
    group: &'a Group,
    args: &'a Args,
    repeats: usize,
    oversubscribed: bool,
}

/// All ranks call this.
pub fn run(world: &World, args: &Args) {
    let group = world.group();
    let (ranks, cores) = (group.size(), affinity::cores());
    let oversubscribed = world.local_size > cores;
    let suite = Suite { group: &group, args, repeats: args.repeats.max(1), oversubscribed };
    let note =
        if oversubscribed { "; more ranks than cores, so that every wait is for a turn of the core too" } else { "" };
    suite.say(&format!("collectives: {ranks} ranks, {cores} cores, medians of {}{note}", suite.repeats));
    suite.say("operation             bytes      ours us       MPI us ours GB/s  MPI GB/s   ours / MPI");
    for bytes in BYTES {
        suite.calls(bytes / size_of::<f32>());
    }
    suite.say("background            bytes    gather us   compute us      both us    hidden   exposed us");
    let stream = Stream::new("bench", &[&group]);
    for bytes in OVERLAP_BYTES {
        suite.overlap(&stream, bytes);
    }
    suite.waiting(&stream);
}

impl Suite<'_> {
    fn say(&self, line: &str) {
        if self.group.rank() == 0 && !self.args.json {
            say!("{line}");
        }
    }

    /// Shows a result: an object with `more` in it, or a line.
    fn show(&self, op: &str, bytes: usize, more: &Value, line: &str) {
        self.say(line);
        if self.group.rank() == 0 && self.args.json {
            let mut object = json!({
                "suite": "collectives", "op": op, "ranks": self.group.size(), "bytes": bytes,
                "oversubscribed": self.oversubscribed, "repeats": self.repeats,
            });
            more.as_object().into_iter().flatten().for_each(|(key, value)| object[key] = value.clone());
            say!("{object}");
        }
    }

    fn parts(&self, each: usize) -> Vec<Range<usize>> {
        (0..self.group.size()).map(|r| r * each..(r + 1) * each).collect()
    }

    /// Each collective on buffers of about `len` elements.
    fn calls(&self, len: usize) {
        let (group, each) = (self.group, (len / self.group.size()).max(1));
        let (ranges, whole) = (self.parts(each), each * self.group.size());
        let values = |len: usize| (vec![0.5; len], vec![0.5; len], vec![0.0; len]);
        let (mut x, from, mut into) = values(len);
        let ours = &mut || group.all_reduce_sum(&mut x);
        self.compare("all_reduce", len, ours, &mut |plain| plain.all_reduce_sum(&from, &mut into));
        let (mut x, from, mut into) = values(whole);
        let ours = &mut || group.reduce_scatter_sum(&mut x, &ranges);
        self.compare("reduce_scatter", whole, ours, &mut |plain| plain.reduce_scatter_sum(&from, &mut into[..each]));
        let (mut x, from, mut into) = values(whole);
        let ours = &mut || group.all_gather(&mut x, &ranges);
        self.compare("all_gather", whole, ours, &mut |plain| plain.all_gather(&from[..each], &mut into));
        let (mut receive, send, mut into) = values(len);
        let ours = &mut || group.shift(&send, &mut receive);
        self.compare("ring_exchange", len, ours, &mut |plain| plain.shift(&send, &mut into));
        let (mut receive, send, mut into) = values(whole);
        let ours = &mut || group.all_to_all(&send, &ranges, &mut receive, &ranges);
        self.compare("all_to_all", whole, ours, &mut |plain| plain.all_to_all(&send, &mut into));
    }

    /// Batches of ours and of MPI's calls in turn.
    fn compare(&self, op: &str, len: usize, ours: &mut dyn FnMut(), plain: &mut dyn FnMut(&MpiBaseline)) {
        let mut theirs = || plain(&MpiBaseline::of(self.group).expect("a group of several ranks"));
        ours();
        theirs();
        let calls = (BATCH_S / self.batch(3, ours).max(1e-7)).ceil().min(2000.0) as usize;
        let (mut own, mut mpi) = (Vec::new(), Vec::new());
        for _ in 0..self.repeats {
            own.push(self.batch(calls, ours));
            mpi.push(self.batch(calls, &mut theirs));
        }
        let bytes = len * size_of::<f32>();
        let (own, mpi) = (median(&own), median(&mpi));
        let (own_us, mpi_us, ratio) = (1e6 * own, 1e6 * mpi, own / mpi);
        let [own_gbs, mpi_gbs] = [own, mpi].map(|seconds| 1e-9 * bytes as f64 / seconds);
        let more = json!({
            "calls": calls, "ours_us": own_us, "mpi_us": mpi_us, "ours_gbs": own_gbs, "mpi_gbs": mpi_gbs, "ratio": ratio,
        });
        let line =
            format!("{op:<16} {bytes:>10} {own_us:>12.2} {mpi_us:>12.2} {own_gbs:>9.3} {mpi_gbs:>9.3} {ratio:>12.2}");
        self.show(op, bytes, &more, &line);
    }

    /// Seconds of one of `calls` calls, on the slowest rank.
    fn batch(&self, calls: usize, call: &mut dyn FnMut()) -> f64 {
        self.group.barrier();
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        self.slowest(start.elapsed().as_secs_f64() / calls as f64)
    }

    fn slowest(&self, seconds: f64) -> f64 {
        self.group.max(seconds)
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
        for _ in 0..self.repeats {
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
        let share = median(&shares);
        let line = format!("a stream that waits for a late rank takes {:.1} % of a core", 100.0 * share);
        self.show("background_wait", 4000, &json!({"core_share": share}), &line);
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
        for _ in 0..self.repeats {
            gathers.push(self.batch(calls, &mut || gather(&|| {})));
            computes.push(self.batch(calls, &mut || compute(rounds)));
            let before = background();
            boths.push(self.batch(calls, &mut || gather(&|| compute(rounds))));
            let after = background();
            let (own, waited) = (after.0 - before.0, after.1 - before.1);
            exposed.push(self.slowest(waited / calls as f64));
            hidden.push(1.0 - self.slowest((waited / own).min(1.0)));
        }
        let us = |seconds: &[f64]| 1e6 * median(seconds);
        let (gather, compute, both, exposed) = (us(&gathers), us(&computes), us(&boths), us(&exposed));
        let (hidden, op) = (median(&hidden), "all_gather");
        let more = json!({
            "calls": calls, "gather_us": gather, "compute_us": compute, "both_us": both, "hidden": hidden,
            "exposed_us": exposed,
        });
        let percent = 100.0 * hidden;
        let line = format!(
            "{op:<16} {bytes:>10} {gather:>12.1} {compute:>12.1} {both:>12.1} {percent:>7.0} % {exposed:>12.1}"
        );
        self.show("background_all_gather", bytes, &more, &line);
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
