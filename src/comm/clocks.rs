//! The clocks of hosts, compared with that of the first rank.
//!
//! A rank answers a ping of the first rank with its own time. With t0 and t1, the first rank's times before and after
//! the ping, its clock showed (t0 + t1) / 2 when the other one showed the answer, up to (t1 - t0) / 2. The fastest of
//! several pings counts. A second reading later shows how much faster one of the clocks is.

use super::accounting::begin_call;
use super::group::Group;
use crate::sys::trace::now;

const PING: i32 = 31;
const PONG: i32 = 32;
/// The number of pings of each rank.
const PINGS: usize = 32;

/// A comparison of this rank's clock with that of the first rank, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// The time of this rank.
    pub at: u64,
    /// This rank's time less that of the first rank.
    pub offset: i64,
    /// The most by which the offset may be wrong.
    pub doubt: u64,
}

/// The relation of this rank's clock to that of the first rank between two readings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clock {
    first: Reading,
    /// The change of the offset, in ns per ns.
    drift: f64,
}

impl Clock {
    /// The offset changes linearly from `first` to `last`, unless the difference is within their doubt. Then it is the
    /// more certain one; it is 0 if that is possible, as for ranks of one host, which share a clock.
    pub fn between(first: Reading, last: Reading) -> Self {
        let doubt = first.doubt + last.doubt;
        let (change, time) = (last.offset - first.offset, last.at.saturating_sub(first.at));
        if change.unsigned_abs() > doubt && time > 0 {
            return Self { first, drift: change as f64 / time as f64 };
        }
        let best = if last.doubt < first.doubt { last } else { first };
        let offset = if best.offset.unsigned_abs() <= best.doubt { 0 } else { best.offset };
        Self { first: Reading { offset, ..best }, drift: 0.0 }
    }

    /// The time of the first rank when this rank's clock shows `at`.
    pub fn of_first_rank(&self, at: u64) -> u64 {
        let since = at as i64 - self.first.at as i64;
        let offset = self.first.offset + (self.drift * since as f64).round() as i64;
        at.saturating_add_signed(-offset)
    }

    /// The most by which its times may be wrong, in ns.
    pub fn doubt(&self) -> u64 {
        if self.first.offset == 0 { 0 } else { self.first.doubt }
    }
}

impl Group {
    /// Compares the clock of this rank with that of the first rank. All ranks call this.
    pub fn compare_clocks(&self) -> Reading {
        let comm = self.channel().map(|channel| channel.comm);
        let Some(comm) = comm else { return Reading { at: now(), ..Reading::default() } };
        let _call = begin_call(self.axis(), "compare_clocks", 0);
        // SAFETY: the buffer lives until the request was waited for.
        let receive = |from, tag, message: &mut [u64]| unsafe { comm.receive(from, tag, message) }.wait();
        let mut reading = [now(), 0, 0];
        if self.rank() > 0 {
            for _ in 0..PINGS {
                receive(0, PING, &mut [0]);
                comm.send_short(0, PONG, &[now()]);
            }
            receive(0, PING, &mut reading);
        }
        for rank in 1..if self.rank() == 0 { self.size() } else { 0 } {
            let ping = || {
                let (before, mut there) = (now(), [0]);
                comm.send_short(rank, PING, &[0u64]);
                receive(rank, PONG, &mut there);
                let after = now();
                [there[0], before.midpoint(after), (after - before).div_ceil(2)]
            };
            // The first ping waits until the rank is there.
            let fastest = (0..PINGS).map(|_| ping()).min_by_key(|[.., doubt]| *doubt).expect("several pings");
            comm.send_short(rank, PING, &fastest);
        }
        let [at, here, doubt] = reading;
        let offset = if self.rank() == 0 { 0 } else { at as i64 - here as i64 };
        Reading { at, offset, doubt }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_shifted_clock_that_runs_fast_become_those_of_the_first_rank() {
        // The clock is 5 s ahead, and gains 1 ms in 10 s.
        let theirs = |first: u64| first + 5_000_000_000 + first / 10_000;
        let reading = |first: u64| {
            let at = theirs(first);
            Reading { at, offset: at as i64 - first as i64, doubt: 3_000 }
        };
        let clock = Clock::between(reading(1_000_000_000), reading(11_000_000_000));
        for first in [1_000_000_000, 4_321_000_000, 11_000_000_000] {
            assert!(clock.of_first_rank(theirs(first)).abs_diff(first) <= 2, "{first}");
        }
        assert_eq!(clock.doubt(), 3_000);
        let times: Vec<u64> = (0..1000).map(|ns| clock.of_first_rank(theirs(2_000_000_000) + ns)).collect();
        assert!(times.is_sorted(), "the order of times stays");
    }

    #[test]
    fn offsets_within_their_doubt_do_not_move_times() {
        let [first, last] =
            [(100, -40, 50), (10_000_000, 90, 100)].map(|(at, offset, doubt)| Reading { at, offset, doubt });
        let clock = Clock::between(first, last);
        assert_eq!((clock.of_first_rank(77_777), clock.doubt()), (77_777, 0));
        let far = Clock::between(Reading { offset: 1_000, ..first }, Reading { offset: 1_100, ..last });
        assert_eq!((far.of_first_rank(5_000), far.doubt()), (4_000, 50), "the more certain offset");
    }
}
