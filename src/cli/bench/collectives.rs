//! Our collectives compared with MPI's own on the same communicator, call by call in the same run.
//!
//! Bytes are the size of a rank's whole buffer (of the message, for the ring). Seconds are the slowest rank's.
//! Bandwidth is bytes / seconds as the caller sees it, not what travels on the wire.

use super::args::Args;
use crate::cli::out::say;
use crate::comm::mpi_baseline::MpiBaseline;
use crate::comm::{Group, World};
use crate::sys::affinity;
use crate::sys::host::median;
use serde_json::json;
use std::time::Instant;

/// Buffers from 4 B to 64 MiB; a rank's part is at least one element.
const BYTES: [usize; 10] = [4, 64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26];
/// A measured batch of calls lasts about this long, in seconds.
const BATCH_S: f64 = 4e-3;

struct Suite<'a> {
    group: &'a Group,
    args: &'a Args,
    repeats: usize,
    oversubscribed: bool,
}

/// Runs the suite. All ranks call this.
pub fn run(world: &World, args: &Args) {
    let group = world.group();
    let (ranks, cores) = (group.size(), affinity::cores());
    let oversubscribed = world.local_size > cores;
    let suite = Suite { group: &group, args, repeats: args.repeats.max(1), oversubscribed };
    let note = if oversubscribed { "; more ranks than cores: each wait includes waiting for a core" } else { "" };
    suite.say(&format!("collectives: {ranks} ranks, {cores} cores, medians of {}{note}", suite.repeats));
    suite.say("operation             bytes      ours us       MPI us ours GB/s  MPI GB/s   ours / MPI");
    for bytes in BYTES {
        suite.calls(bytes / size_of::<f32>());
    }
}

impl Suite<'_> {
    fn say(&self, line: &str) {
        if self.group.rank() == 0 && !self.args.json {
            say!("{line}");
        }
    }

    /// Compares each collective on buffers of about `len` elements.
    fn calls(&self, len: usize) {
        let (group, each) = (self.group, (len / self.group.size()).max(1));
        let whole = each * group.size();
        let ranges: Vec<_> = (0..group.size()).map(|r| r * each..(r + 1) * each).collect();
        let values = |len: usize| (vec![0.5; len], vec![0.5; len], vec![0.0; len]);
        let (mut x, from, mut into) = values(len);
        let ours = &mut || group.all_reduce_sum_ordered(&mut x);
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

    /// Measures batches of our calls and of MPI's calls in turn.
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
        self.say(&format!(
            "{op:<16} {bytes:>10} {own_us:>12.2} {mpi_us:>12.2} {own_gbs:>9.3} {mpi_gbs:>9.3} {ratio:>12.2}"
        ));
        if self.group.rank() == 0 && self.args.json {
            let object = json!({
                "suite": "collectives", "op": op, "ranks": self.group.size(), "bytes": bytes,
                "oversubscribed": self.oversubscribed, "repeats": self.repeats, "calls": calls, "ours_us": own_us,
                "mpi_us": mpi_us, "ours_gbs": own_gbs, "mpi_gbs": mpi_gbs, "ratio": ratio,
            });
            say!("{object}");
        }
    }

    /// Returns the seconds of one of `calls` calls on the slowest rank.
    fn batch(&self, calls: usize, call: &mut dyn FnMut()) -> f64 {
        self.group.barrier();
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        self.group.max(start.elapsed().as_secs_f64() / calls as f64)
    }
}
