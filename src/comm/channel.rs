//! The building blocks of a group's collectives: messages between two ranks and MPI's own calls, on a separate
//! communicator.

use super::raw::{COUNT_MAX, Comm, Element, Request};
use std::ops::Range;

/// f32 elements in one message of a sum: 1 MiB, so that adding one overlaps with receiving the next.
pub(super) const CHUNK: usize = 1 << 18;
const TAG: i32 = 7;
/// The largest gather, in bytes, whose messages are all posted together.
const AT_ONCE: usize = 1 << 18;
/// The largest message, in bytes, that is sent in one blocking call: a request would cost more than the copy.
const SHORT: usize = 1024;

pub(super) struct Channel {
    pub(super) comm: Comm,
    /// Memory for two chunks: one is received while the other is added.
    scratch: Vec<f32>,
    /// The number of collectives so far, the same on all ranks.
    calls: u64,
}

impl Channel {
    pub(super) fn from_comm(comm: Comm) -> Self {
        Self { comm, scratch: Vec::new(), calls: 0 }
    }

    /// The number of the next collective.
    pub(super) fn next_call(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }

    /// Sends `x[give]` to one rank and adds the values from another rank to `x[keep]`, chunk by chunk. Every rank goes
    /// through its exchanges in the same order, so the peer always sends the chunk that this rank waits for.
    pub(super) fn exchange_adding(&mut self, x: &mut [f32], give: (usize, Range<usize>), keep: (usize, Range<usize>)) {
        let Self { comm, scratch, .. } = self;
        let ((to, give), (from, keep)) = (give, keep);
        let (mut even, mut odd) = room(scratch, 2 * CHUNK).split_at_mut(CHUNK);
        let mut outstanding = None;
        // In the last iteration both are empty: it only finishes the previous one.
        for i in 0..=give.len().max(keep.len()).div_ceil(CHUNK) {
            let (out, into) = (chunk(&give, i, CHUNK), chunk(&keep, i, CHUNK));
            // SAFETY: both requests are waited for in the next iteration, before `x` and `scratch` are released; `give`
            // and `keep` do not overlap (`check`), so values in transfer are not added to; `even` is not touched until
            // its request was waited for, because the halves swap in each iteration.
            let requests = unsafe {
                let receive = (!into.is_empty()).then(|| comm.receive(from, TAG, &mut even[..into.len()]));
                let send = (!out.is_empty()).then(|| comm.send(to, TAG, &x[out]));
                (receive, send)
            };
            if let Some(((receive, send), range)) = outstanding.replace((requests, into)) {
                receive.into_iter().for_each(Request::wait);
                add(&mut x[range], odd);
                send.into_iter().for_each(Request::wait);
            }
            std::mem::swap(&mut even, &mut odd);
        }
    }

    pub(super) fn reduce_scatter(&mut self, x: &mut [f32], ranges: &[Range<usize>], rank: usize) {
        let size = ranges.len();
        for s in 1..size {
            let (to, from) = ((rank + s) % size, (rank + size - s) % size);
            self.exchange_adding(x, (to, ranges[to].clone()), (from, ranges[rank].clone()));
        }
    }

    /// Sends every rank's range to every other rank: one distance after another, or all at once if little is sent.
    pub(super) fn gather<T: Element>(&self, x: &mut [T], ranges: &[Range<usize>], rank: usize) {
        let at_once = if size_of_val(x) <= AT_ONCE { ranges.len() - 1 } else { 1 };
        let mut parts = disjoint(x, ranges);
        let mine = &*std::mem::take(&mut parts[rank]);
        self.to_all(|_| mine, &mut parts, rank, at_once);
    }

    /// Sends `send(r)` to every other rank r, and receives `parts[r]` from it: at distance 1, 2, ..., with `at_once`
    /// ranks at a time.
    pub(super) fn to_all<'a, T: Element + 'a>(
        &self,
        send: impl Fn(usize) -> &'a [T],
        parts: &mut [&mut [T]],
        rank: usize,
        at_once: usize,
    ) {
        let size = parts.len();
        let mut requests = Vec::new();
        for first in (1..size).step_by(at_once) {
            let distances = first..size.min(first + at_once);
            for from in distances.clone().map(|s| (rank + size - s) % size) {
                // SAFETY: all requests are waited for below, before the borrows end.
                unsafe { self.post_receive(from, parts[from], &mut requests) };
            }
            for to in distances.map(|s| (rank + s) % size) {
                // SAFETY: as above.
                unsafe { self.post_send(to, send(to), &mut requests) };
            }
            requests.drain(..).for_each(Request::wait);
        }
    }

    /// # Safety
    /// `data` lives and is not touched until the requests were waited for.
    pub(super) unsafe fn post_receive<T: Element>(&self, peer: usize, data: &mut [T], requests: &mut Vec<Request>) {
        for part in data.chunks_mut(COUNT_MAX) {
            // SAFETY: the caller's promise.
            requests.push(unsafe { self.comm.receive(peer, TAG, part) });
        }
    }

    /// Posts a send. All ranks of an exchange post their sends after all their receives.
    ///
    /// # Safety
    /// `data` lives and is not written until the requests were waited for.
    pub(super) unsafe fn post_send<T: Element>(&self, peer: usize, data: &[T], requests: &mut Vec<Request>) {
        if !data.is_empty() && size_of_val(data) <= SHORT {
            return self.comm.send_short(peer, TAG, data);
        }
        for part in data.chunks(COUNT_MAX) {
            // SAFETY: the caller's promise.
            requests.push(unsafe { self.comm.send(peer, TAG, part) });
        }
    }

    /// Receives from one rank and sends to another, either of which may be left out.
    pub(super) fn swap(&self, receive: Option<(usize, &mut [f32])>, send: Option<(usize, &[f32])>) {
        let mut requests = Vec::with_capacity(2);
        // SAFETY: all requests are waited for below, before the borrows end.
        unsafe {
            if let Some((from, data)) = receive {
                self.post_receive(from, data, &mut requests);
            }
            if let Some((to, data)) = send {
                self.post_send(to, data, &mut requests);
            }
        }
        requests.into_iter().for_each(Request::wait);
    }

    /// Every rank gets the x of all ranks, and adds them in rank order.
    pub(super) fn sum_whole(&mut self, x: &mut [f32], size: usize) {
        let all = room(&mut self.scratch, size * x.len());
        self.comm.all_gather(x, all);
        let (first, rest) = all.split_at(x.len());
        x.copy_from_slice(first);
        rest.chunks_exact(x.len().max(1)).for_each(|part| add(x, part));
    }

    /// Every rank gets all ranks' values of its own share of x, adds them in rank order while the next ones arrive, and
    /// sends the sums to all.
    pub(super) fn sum_ordered(&mut self, x: &mut [f32], rank: usize, size: usize) {
        let (shares, piece) = (shares(x.len(), size), CHUNK.div_ceil(size));
        let scratch = room(&mut self.scratch, 2 * size * piece);
        let (mut even, mut odd) = scratch.split_at_mut(size * piece);
        let mut outstanding: Option<(Vec<Request>, Range<usize>)> = None;
        for i in 0..x.len().div_ceil(size).div_ceil(piece) {
            let mine = chunk(&shares[rank], i, piece);
            let mut requests = Vec::with_capacity(2 * size);
            for s in 1..size {
                let (to, from) = ((rank + s) % size, (rank + size - s) % size);
                // SAFETY: all are waited for in the next iteration or after the loop, before `x` and the scratch are
                // released; only this rank's share of x is written, and that is never sent here; `even` is not touched
                // until its requests were waited for, because the halves swap in each iteration; each rank has its own
                // part of it.
                unsafe {
                    requests.push(self.comm.receive(from, TAG, &mut even[from * piece..from * piece + mine.len()]));
                    requests.push(self.comm.send(to, TAG, &x[chunk(&shares[to], i, piece)]));
                }
            }
            if let Some((requests, range)) = outstanding.replace((requests, mine)) {
                requests.into_iter().for_each(Request::wait);
                add_in_order(&mut x[range], rank, odd, piece);
            }
            std::mem::swap(&mut even, &mut odd);
        }
        if let Some((requests, range)) = outstanding {
            requests.into_iter().for_each(Request::wait);
            add_in_order(&mut x[range], rank, odd, piece);
        }
        self.gather(x, &shares, rank);
    }
}

/// Splits `len` values into parts that are as equal as possible, one per rank.
fn shares(len: usize, size: usize) -> Vec<Range<usize>> {
    (0..size).map(|rank| rank * len / size..(rank + 1) * len / size).collect()
}

/// The values `i * len` to `(i + 1) * len` of a range, cut off at its end.
pub(super) fn chunk(range: &Range<usize>, i: usize, len: usize) -> Range<usize> {
    let at = |i: usize| (range.start + i * len).min(range.end);
    at(i)..at(i + 1)
}

/// to += from, up to the shorter length.
fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(a, b)| *a += b);
}

/// Adds, in rank order, the others' values to x, the values of rank `rank`. The others' start at multiples of `piece`.
fn add_in_order(x: &mut [f32], rank: usize, others: &mut [f32], piece: usize) {
    let (before, behind) = others.split_at_mut(rank * piece);
    if let Some((first, more)) = before.split_at_mut_checked(piece) {
        more.chunks_exact(piece).for_each(|other| add(first, &other[..x.len()]));
        // A sum of two does not depend on their order.
        add(x, first);
    }
    behind.chunks_exact(piece).skip(1).for_each(|other| add(x, other));
}

fn room(scratch: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    &mut scratch[..len]
}

/// The parts of `x` at `ranges`, which do not overlap but may be in any order.
pub(super) fn disjoint<'a, T>(x: &'a mut [T], ranges: &[Range<usize>]) -> Vec<&'a mut [T]> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|&r| !ranges[r].is_empty()).collect();
    order.sort_by_key(|&r| ranges[r].start);
    let mut parts: Vec<&mut [T]> = ranges.iter().map(|_| Default::default()).collect();
    let (mut rest, mut done) = (x, 0);
    for r in order {
        assert!(ranges[r].start >= done, "ranges {ranges:?} overlap");
        let (part, behind) = std::mem::take(&mut rest)[ranges[r].start - done..].split_at_mut(ranges[r].len());
        (parts[r], rest, done) = (part, behind, ranges[r].end);
    }
    parts
}
