//! Memory of the GPU whose values are on their way to the host: free already, but whoever gets it works behind the copy. Nobody
//! waits before that, neither the host nor the compute stream.

use super::gpu::{Gpu, must};
use super::staging::Event;
use super::streams::{Stream, stream as current};
use std::ops::Range;
use std::sync::Arc;

impl Gpu {
    /// Frees memory that the copy before `end` reads.
    pub(super) fn free_behind(&self, address: u64, end: &Arc<Event>) {
        let bytes = self.pool().size_of(address) as u64;
        let run = address..address + bytes;
        if self.works.keep(run.clone()) {
            // It is given back when a work is joined, and then to work on the compute stream.
            return self.hold(end);
        }
        self.in_flight.all().push((run, end.clone()));
        self.pool().give_in_flight(address, &self.driver);
    }

    /// Lets `stream`, which gets the memory `run`, wait for what copies of it are under way.
    pub(super) fn behind_copies(&self, run: Range<u64>, stream: Stream) {
        let mut all = self.in_flight.all();
        if all.is_empty() {
            return;
        }
        let stream = if stream == Stream::Compute { current() } else { stream };
        all.retain(|(_, end)| !self.is_past(end));
        for (_, end) in all.iter().filter(|(other, _)| other.start < run.end && run.start < other.end) {
            self.hold_on(stream, end);
        }
    }

    /// Lets the compute stream wait for all copies that are under way.
    pub(super) fn settle_copies(&self) {
        for (_, end) in self.in_flight.all().drain(..) {
            self.hold(&end);
        }
        self.pool().settle();
    }

    /// What is started on `stream` from now on waits for a copy.
    pub(super) fn hold_on(&self, stream: Stream, end: &Event) {
        must(self.driver.hold_on(stream, end), || format!("the {stream:?} stream behind a copy"));
    }
}
