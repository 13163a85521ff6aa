//! Collectives between GPUs that have joined NCCL, which `host_staged` otherwise runs through the host. Ordered sums
//! have the same bits.

use super::accounting::{begin_async, launch, note, note_captured};
use super::channel::chunk;
use super::communicator::{Communicator, Op};
use crate::device::cuda::rank_sum::{self, Parts};
use crate::device::cuda::{Memory, Stream, View, ViewMut, gpu, traced};
use crate::device::{Device, null};
use std::ops::Range;

/// The bytes over all ranks up to which every rank gets all values and sums them itself: one round instead of two.
const WHOLE_MAX: usize = 1 << 19;
/// The bytes exchanged at a time, which limits the memory for the others' values.
const PIECE: usize = 32 << 20;
/// Shares start at multiples of this many values, so that kernels read sixteen bytes at once.
const SHARE_ALIGN: usize = 8;

/// The NCCL communicator of a group, and the stream of its collectives.
pub(super) struct NcclGroup {
    /// The distance in world ranks from one member to the next.
    pub stride: usize,
    pub communicator: Communicator,
    /// The GPU stream of collectives that are called outside of stream jobs.
    pub stream: Stream,
}

impl NcclGroup {
    /// Launches a collective. In a job of a stream it uses the job's stream. Otherwise it uses this group's stream, and
    /// the compute stream waits for it.
    fn run(&self, op: &'static str, bytes: usize, body: impl FnOnce(&Communicator)) {
        let body = |communicator: &Communicator| {
            let _span = traced::span(Device::Cuda, op, "bytes", || [bytes]);
            body(communicator);
        };
        if null::is_active() {
            note(op, self.communicator.axis, [self.communicator.size, self.stride], bytes);
        }
        if gpu().is_capturing() {
            note_captured(self.communicator.axis, op, bytes);
            return gpu().beside(self.stream, || body(&self.communicator)).1.join();
        }
        // On a null device it is not counted for this process.
        let call = (!null::is_active()).then(|| launch(self.communicator.axis, op, bytes));
        if gpu().is_beside() {
            return body(&self.communicator);
        }
        let ((), work) = gpu().beside(self.stream, || body(&self.communicator));
        if let Some(call) = call {
            begin_async(call.entered.clone(), work.marks());
        }
        work.join();
    }

    /// x = the sum over ranks in rank order, rounded once for bf16. All ranks get equal bits.
    pub fn sum_ordered(&self, x: &mut ViewMut) {
        let (len, dtype) = (x.len(), x.dtype());
        let bytes = len * dtype.bytes();
        self.run("sum_ordered", bytes, |ranks| {
            if bytes * ranks.size <= WHOLE_MAX {
                return sum_whole(ranks, x);
            }
            let piece = PIECE / dtype.bytes();
            for start in (0..len).step_by(piece) {
                sum_in_shares(ranks, &mut x.reborrow().part(start..len.min(start + piece)));
            }
        });
    }

    /// On return `x[ranges[rank]]` contains the sum over ranks, in NCCL's order.
    ///
    /// # Panics
    /// If ranges differ in length.
    pub fn sum_scattered(&self, x: &mut ViewMut, ranges: &[Range<usize>]) {
        self.run("sum_scattered", x.len() * x.dtype().bytes(), |ranks| {
            let (all, own) = (x.as_view(), ranges[ranks.rank].clone());
            match equal(ranges) {
                Some(whole) => ranks.share(Op::ReduceScatter, all.part(own), all.part(whole)),
                None => assert!(ranges.iter().all(Range::is_empty), "sum_scattered: {ranges:?} must be equally long"),
            }
        });
    }

    /// Does the same as `sum_scattered`, but sums every element in a binary tree over ranks.
    pub fn sum_tree(&self, x: &mut ViewMut, ranges: &[Range<usize>]) {
        self.run("sum_tree", x.len() * x.dtype().bytes(), |ranks| {
            let longest = ranges.iter().map(Range::len).max().unwrap_or(0);
            let piece = (PIECE / size_of::<f32>() / ranks.size).max(1);
            let stride = piece.min(longest);
            let mut parts = Memory::scratch(ranks.size * stride * size_of::<f32>());
            for i in 0..longest.div_ceil(piece) {
                let pieces: Vec<Range<usize>> = ranges.iter().map(|range| chunk(range, i, piece)).collect();
                add_pieces(ranks, x, &pieces, &mut parts, stride, rank_sum::in_tree);
            }
        });
    }

    /// Gathers in place: `x[ranges[rank]]` is this rank's part; afterwards `x` is complete.
    pub fn gather(&self, x: &mut ViewMut, ranges: &[Range<usize>]) {
        self.run("gather", x.len() * x.dtype().bytes(), |ranks| gather(ranks, x, ranges));
    }

    /// Shifts around the ring: sends `send` to rank + 1, and receives `receive` from rank - 1.
    pub fn shift(&self, send: View, receive: &mut ViewMut) {
        self.run("shift", send.len() * send.dtype().bytes(), |ranks| {
            let (rank, size) = (ranks.rank, ranks.size);
            ranks.pass(&[((rank + 1) % size, send)], &[((rank + size - 1) % size, receive.as_view())]);
        });
    }

    /// Sends `send[to[r]]` to rank r, and receives `receive[from[r]]` from rank r.
    pub fn all_to_all(&self, send: View, to: &[Range<usize>], receive: &mut ViewMut, from: &[Range<usize>]) {
        self.run("all_to_all", send.len() * send.dtype().bytes(), |ranks| {
            let own = ranks.rank;
            receive.reborrow().part(from[own].clone()).copy_from(send.part(to[own].clone()));
            ranks.pass(&others(send, to, own), &others(receive.as_view(), from, own));
        });
    }
}

/// Pairs each rank r but this one with part r of the values.
fn others<'a>(values: View<'a>, parts: &[Range<usize>], own: usize) -> Vec<(usize, View<'a>)> {
    let others = parts.iter().enumerate().filter(|(rank, _)| *rank != own);
    others.map(|(rank, part)| (rank, values.part(part.clone()))).collect()
}

/// The run that the ranges cover end to end, if they are equally long and not empty.
fn equal(ranges: &[Range<usize>]) -> Option<Range<usize>> {
    let (first, last) = (ranges.first()?, ranges.last()?);
    let alike = |pair: &[Range<usize>]| pair[0].len() == pair[1].len() && pair[0].end == pair[1].start;
    (!first.is_empty() && ranges.windows(2).all(alike)).then_some(first.start..last.end)
}

fn gather(ranks: &Communicator, x: &mut ViewMut, ranges: &[Range<usize>]) {
    let all = x.as_view();
    match equal(ranges) {
        Some(whole) => ranks.share(Op::AllGather, all.part(ranges[ranks.rank].clone()), all.part(whole)),
        None => ranks.broadcast_each(all, ranges),
    }
}

/// Every rank gets the x of all ranks, and adds them in rank order.
fn sum_whole(ranks: &Communicator, x: &mut ViewMut) {
    let (len, dtype) = (x.len(), x.dtype());
    if len == 0 {
        return;
    }
    let mut all = Memory::scratch(ranks.size * len * dtype.bytes());
    ranks.share(Op::AllGather, x.as_view(), all.view_mut(dtype).as_view());
    let parts = Parts { values: all.view(dtype), stride: len, rank: ranks.rank, ranks: ranks.size };
    rank_sum::in_order(parts, x.reborrow());
}

/// Every rank gets all ranks' values of its own share of x, adds them in rank order, and sends the sums to all.
fn sum_in_shares(ranks: &Communicator, x: &mut ViewMut) {
    let (len, dtype, size) = (x.len(), x.dtype(), ranks.size);
    let stride = len.div_ceil(size).next_multiple_of(SHARE_ALIGN);
    let at = |rank: usize| (rank * stride).min(len);
    let shares: Vec<Range<usize>> = (0..size).map(|rank| at(rank)..at(rank + 1)).collect();
    let mut parts = Memory::scratch(size * stride * dtype.bytes());
    add_pieces(ranks, x, &shares, &mut parts, stride, rank_sum::in_order);
    gather(ranks, x, &shares);
}

/// Sends `x[pieces[r]]` to rank r, and receives part r of `parts` from rank r. Parts are `stride` values apart. `add`
/// adds all of them to this rank's own piece, which stays in x.
fn add_pieces(
    ranks: &Communicator,
    x: &mut ViewMut,
    pieces: &[Range<usize>],
    parts: &mut Memory,
    stride: usize,
    add: fn(Parts, ViewMut),
) {
    let (dtype, mine) = (x.dtype(), pieces[ranks.rank].clone());
    let places: Vec<Range<usize>> = (0..ranks.size).map(|rank| rank * stride..rank * stride + mine.len()).collect();
    let received = parts.view_mut(dtype);
    ranks.pass(&others(x.as_view(), pieces, ranks.rank), &others(received.as_view(), &places, ranks.rank));
    let parts = Parts { values: parts.view(dtype), stride, rank: ranks.rank, ranks: ranks.size };
    add(parts, x.reborrow().part(mine));
}
