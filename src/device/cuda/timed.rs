//! How long the GPU takes for work.

use super::gpu::{Gpu, Stream, must};
use super::staging::Event;
use crate::error::Result;

impl Gpu {
    /// Seconds that the compute stream is at what `work` starts there, between two of its own marks: without what the host
    /// takes to start and to wait. The host waits.
    ///
    /// # Panics
    /// If a graph is being captured.
    pub fn seconds(&self, work: impl FnOnce()) -> f64 {
        self.outside_captures("a measurement");
        let mark = || -> Result<Event> {
            self.driver.enter()?;
            let event = Event::timed()?;
            event.record(self.driver.stream(Stream::Compute))?;
            Ok(event)
        };
        let begun = must(mark(), || "a mark".into());
        work();
        let ended = must(mark(), || "a mark".into());
        self.wait();
        must(ended.seconds_since(&begun), || "the time between two marks".into())
    }
}
