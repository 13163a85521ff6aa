//! Messages between two ranks of a group. Unlike collectives, two threads may each wait for one.

use super::accounting::{begin_call, note};
use super::group::Group;
use super::raw::{COUNT_MAX, Element, Request};

const TAG: i32 = 31;

impl Group {
    /// Counts a message of `bytes` for a plan.
    pub(super) fn note_send(&self, bytes: usize) {
        note("send", self.axis(), [self.size(), self.stride()], bytes);
    }

    /// Counts a broadcast of `bytes` for a plan.
    pub(super) fn note_broadcast(&self, bytes: usize) {
        note("broadcast", self.axis(), [self.size(), self.stride()], bytes);
    }

    /// Counts a gather of `bytes` in all for a plan.
    pub(super) fn note_all_gather(&self, bytes: usize) {
        note("all_gather", self.axis(), [self.size(), self.stride()], bytes);
    }

    /// Sends `data` to rank `to`, which receives as many values. Messages to a rank arrive in order. Does nothing in a
    /// null group.
    pub(super) fn send_to<T: Element>(&self, to: usize, data: &[T]) {
        let bytes = size_of_val(data);
        let Some(comm) = self.channel().map(|channel| channel.comm) else { return };
        let _call = begin_call(self.axis(), "send", bytes).asking(self.member(to).world_rank);
        // SAFETY: all requests are waited for below, before the borrow ends.
        let requests: Vec<Request> = data.chunks(COUNT_MAX).map(|part| unsafe { comm.send(to, TAG, part) }).collect();
        requests.into_iter().for_each(Request::wait);
    }

    /// Receives `data` from rank `from`. In a null group it stays as it is.
    pub(super) fn receive_from<T: Element>(&self, from: usize, data: &mut [T]) {
        let Some(comm) = self.channel().map(|channel| channel.comm) else { return };
        let _call = begin_call(self.axis(), "receive", size_of_val(data)).asking(self.member(from).world_rank);
        // SAFETY: all requests are waited for below, before the borrow ends.
        let requests: Vec<Request> =
            data.chunks_mut(COUNT_MAX).map(|part| unsafe { comm.receive(from, TAG, part) }).collect();
        requests.into_iter().for_each(Request::wait);
    }
}
