//! The speed of collectives, call by call.
//!
//! Bytes are the size of a rank's whole buffer (of the message, for the ring). Seconds are the slowest rank's.
//! Bandwidth is bytes / seconds as the caller sees it, not the traffic on the wire.

use super::args::Args;
use crate::cli::out::say;
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
    suite.say("operation             bytes           us      GB/s");
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

    /// Measures each collective on buffers of about `len` elements.
    fn calls(&self, len: usize) {
        let (group, each) = (self.group, (len / self.group.size()).max(1));
        let whole = each * group.size();
        let ranges: Vec<_> = (0..group.size()).map(|r| r * each..(r + 1) * each).collect();
        let mut x = vec![0.5; len];
        self.measure("all_reduce", len, &mut || group.all_reduce_sum_ordered(&mut x));
        let mut x = vec![0.5; whole];
        self.measure("reduce_scatter", whole, &mut || group.reduce_scatter_sum(&mut x, &ranges));
        let mut x = vec![0.5; whole];
        self.measure("all_gather", whole, &mut || group.all_gather(&mut x, &ranges));
        let (send, mut receive) = (vec![0.5; len], vec![0.5; len]);
        self.measure("ring_exchange", len, &mut || group.shift(&send, &mut receive));
        let (send, mut receive) = (vec![0.5; whole], vec![0.5; whole]);
        self.measure("all_to_all", whole, &mut || group.all_to_all(&send, &ranges, &mut receive, &ranges));
    }

    fn measure(&self, op: &str, len: usize, call: &mut dyn FnMut()) {
        call();
        let calls = (BATCH_S / self.batch(3, call).max(1e-7)).ceil().min(2000.0) as usize;
        let seconds: Vec<f64> = (0..self.repeats).map(|_| self.batch(calls, call)).collect();
        let (bytes, seconds) = (len * size_of::<f32>(), median(&seconds));
        let (us, gbs) = (1e6 * seconds, 1e-9 * bytes as f64 / seconds);
        self.say(&format!("{op:<16} {bytes:>10} {us:>12.2} {gbs:>9.3}"));
        if self.group.rank() == 0 && self.args.json {
            let object = json!({
                "suite": "collectives", "op": op, "ranks": self.group.size(), "bytes": bytes,
                "oversubscribed": self.oversubscribed, "repeats": self.repeats, "calls": calls, "us": us, "gbs": gbs,
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
