//! How long the GPU takes for work.

use super::gpu::{Backend, Gpu, Stream, must};
use super::staging::Event;
use crate::error::Result;
use std::time::Instant;

impl Gpu {
    /// Seconds that the compute stream is at what `work` starts there, between two of its own marks: without what the host
    /// takes to start and to wait. A played GPU is done when `work` returns: then they are the host's. The host waits.
    ///
    /// # Panics
    /// If a graph is being captured.
    pub fn seconds(&self, work: impl FnOnce()) -> f64 {
        self.outside_captures("a measurement");
        let start = Instant::now();
        let Backend::Driver(driver) = &self.backend else {
            work();
            return start.elapsed().as_secs_f64();
        };
        let mark = || -> Result<Event> {
            driver.enter()?;
            let event = Event::timed()?;
            event.record(driver.stream(Stream::Compute))?;
            Ok(event)
        };
        let begun = must(mark(), || "a mark".into());
        work();
        let ended = must(mark(), || "a mark".into());
        self.wait();
        must(ended.seconds_since(&begun), || "the time between two marks".into())
    }
}
