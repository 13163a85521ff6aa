//! What ranks of a group send to chosen others: to the next in the ring, to everyone, from one to all.

use super::accounting::enter;
use super::group::{Channel, Group, TAG};
use super::raw::{COUNT_MAX, Element, Request};
use std::ops::Range;

/// Bytes of a message that is sent in one call: making and waiting for a request costs more than the copy.
const SHORT: usize = 1024;

impl Group {
    /// Around the ring: `send` goes to rank + 1, `receive` comes from rank - 1. Lengths may differ between ranks; the
    /// receiver knows its own. In a group of one, `receive` = `send`.
    pub fn shift(&self, send: &[f32], receive: &mut [f32]) {
        let (rank, size) = (self.rank(), self.size());
        let Some(channel) = self.channel() else { return receive.copy_from_slice(send) };
        let _call = enter(self.axis(), "shift", size_of_val(send));
        channel.swap(Some(((rank + size - 1) % size, receive)), Some(((rank + 1) % size, send)));
    }

    /// `send[to[r]]` goes to rank r, `receive[from[r]]` comes from rank r. Ranges may be empty and of any lengths, those of
    /// `to` may overlap; `from[r]` here is as long as `to[this rank]` there. The rest of `receive` stays.
    ///
    /// # Panics
    /// If a range is outside its buffer, two of `from` overlap, or this rank's own two differ in length.
    pub fn all_to_all(&self, send: &[f32], to: &[Range<usize>], receive: &mut [f32], from: &[Range<usize>]) {
        self.elements_to_all("all_to_all", send, to, receive, from);
    }

    /// As `all_to_all`, for bf16 weights.
    ///
    /// # Panics
    /// As `all_to_all`.
    pub fn all_to_all_u16(&self, send: &[u16], to: &[Range<usize>], receive: &mut [u16], from: &[Range<usize>]) {
        self.elements_to_all("all_to_all_u16", send, to, receive, from);
    }

    fn elements_to_all<T: Element>(
        &self,
        op: &'static str,
        send: &[T],
        to: &[Range<usize>],
        receive: &mut [T],
        from: &[Range<usize>],
    ) {
        let (rank, size) = (self.rank(), self.size());
        assert_eq!((to.len(), from.len()), (size, size), "one range a rank of axis {}", self.axis());
        receive[from[rank].clone()].copy_from_slice(&send[to[rank].clone()]);
        let Some(channel) = self.channel() else { return };
        let _call = enter(self.axis(), op, size_of_val(send));
        let mut requests = Vec::new();
        let mut parts = disjoint(receive, from);
        for s in 1..size {
            let peer = (rank + size - s) % size;
            // SAFETY: all requests are waited for below, before the borrows end.
            unsafe { channel.post_receive(peer, std::mem::take(&mut parts[peer]), &mut requests) };
        }
        for s in 1..size {
            let peer = (rank + s) % size;
            // SAFETY: as above.
            unsafe { channel.post_send(peer, &send[to[peer].clone()], &mut requests) };
        }
        requests.into_iter().for_each(Request::wait);
    }

    /// x = the root's x.
    pub fn broadcast(&self, root: usize, x: &mut [f32]) {
        self.broadcast_elements("broadcast", root, x);
    }

    /// As `broadcast`, for bf16 weights.
    pub fn broadcast_u16(&self, root: usize, x: &mut [u16]) {
        self.broadcast_elements("broadcast_u16", root, x);
    }

    fn broadcast_elements<T: Element>(&self, op: &'static str, root: usize, x: &mut [T]) {
        let Some(channel) = self.channel() else { return };
        let _call = enter(self.axis(), op, size_of_val(x));
        x.chunks_mut(COUNT_MAX).for_each(|chunk| channel.comm.broadcast(root, chunk));
    }
}

/// The parts of `x` that `ranges` name, which do not overlap but may stand in any order.
fn disjoint<'a, T>(x: &'a mut [T], ranges: &[Range<usize>]) -> Vec<&'a mut [T]> {
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

impl Channel {
    /// # Safety
    /// `data` lives and is not touched until the requests were waited for.
    pub(super) unsafe fn post_receive<T: Element>(&self, peer: usize, data: &mut [T], requests: &mut Vec<Request>) {
        for part in data.chunks_mut(COUNT_MAX) {
            // SAFETY: the caller's promise.
            requests.push(unsafe { self.comm.receive(peer, TAG, part) });
        }
    }

    /// What all ranks of an exchange post after all their receives.
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

    /// x = sum over ranks of x by recursive doubling: at distance 1, 2, 4 ... two ranks exchange and both add, which gives
    /// equal bits since addition commutes. Ranks beyond the largest power of two add to a rank before and copy after.
    pub(super) fn sum_short(&mut self, x: &mut [f32], rank: usize, size: usize) {
        let whole = 1 << size.ilog2();
        let mut theirs = std::mem::take(&mut self.scratch);
        if theirs.len() < x.len() {
            theirs.resize(x.len(), 0.0);
        }
        let other = &mut theirs[..x.len()];
        let add = |x: &mut [f32], other: &[f32]| x.iter_mut().zip(other).for_each(|(a, b)| *a += b);
        if rank >= whole {
            self.swap(None, Some((rank - whole, x)));
            self.swap(Some((rank - whole, x)), None);
        } else {
            let lonely = (rank + whole < size).then_some(rank + whole);
            if let Some(peer) = lonely {
                self.swap(Some((peer, other)), None);
                add(x, other);
            }
            let mut bit = 1;
            while bit < whole {
                self.swap(Some((rank ^ bit, other)), Some((rank ^ bit, x)));
                add(x, other);
                bit <<= 1;
            }
            if let Some(peer) = lonely {
                self.swap(None, Some((peer, x)));
            }
        }
        self.scratch = theirs;
    }

    /// Receives from one rank and sends to another, either of which may be left out.
    fn swap(&self, receive: Option<(usize, &mut [f32])>, send: Option<(usize, &[f32])>) {
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
}
