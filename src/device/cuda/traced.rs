//! Spans of a GPU's streams in a trace of a step. An event is recorded at each begin and each end. After the step, the
//! times between them become times of the host's clock.

use super::gpu::gpu;
use super::staging::Event;
use super::streams::Stream;
use crate::device::{Device, null};
use crate::error::Result;
use crate::sys::lock::lock;
use crate::sys::trace::{self, NUMBERS};
use std::sync::Mutex;

/// A span, with the indices of its two events.
struct Spanned {
    name: &'static str,
    labels: &'static str,
    numbers: [u64; NUMBERS],
    stream: Stream,
    events: [usize; 2],
}

/// The spans of the current step.
#[derive(Default)]
struct Log {
    /// The first event, and the host's time then, in ns.
    base: Option<(Event, u64)>,
    /// The events, in the order in which each stream passes them.
    events: Vec<(Stream, Event)>,
    spans: Vec<Spanned>,
}

static LOG: Mutex<Log> = Mutex::new(Log { base: None, events: Vec::new(), spans: Vec::new() });

/// A span of the stream on which this thread starts work, until it is dropped.
#[must_use = "the span ends when this is dropped"]
pub struct Traced(Option<Spanned>);

/// Begins a span of work on `device` if a step is traced: none on a CPU, or in a capture, which records no times.
#[inline]
pub fn span<const N: usize>(
    device: Device,
    name: &'static str,
    labels: &'static str,
    numbers: impl FnOnce() -> [usize; N],
) -> Traced {
    if !trace::is_on() || device == Device::Cpu {
        return Traced(None);
    }
    Traced(begun(name, labels, numbers().as_slice()))
}

fn begun(name: &'static str, labels: &'static str, given: &[usize]) -> Option<Spanned> {
    if null::is_active() || gpu().is_capturing() {
        return None;
    }
    let mut numbers = [0; NUMBERS];
    numbers.iter_mut().zip(given).for_each(|(to, number)| *to = *number as u64);
    let stream = Stream::Compute.here();
    Some(Spanned { name, labels, numbers, stream, events: [record(stream)?, 0] })
}

/// Records an event on a stream. Returns its index, or none without a begin.
fn record(stream: Stream) -> Option<usize> {
    let mut log = lock(&LOG);
    log.base.as_ref()?;
    log.events.push((stream, timed(stream)));
    Some(log.events.len() - 1)
}

fn timed(stream: Stream) -> Event {
    let recorded = || Event::timed()?.recorded(gpu().stream(stream));
    gpu().must(|| "an event of a trace".into(), recorded)
}

impl Drop for Traced {
    fn drop(&mut self) {
        if let Some(mut span) = self.0.take()
            && let Some(end) = record(span.stream)
        {
            span.events[1] = end;
            lock(&LOG).spans.push(span);
        }
    }
}

/// An event that the GPU passes now, while it has nothing else to do, and the host's time then.
fn now() -> (Event, u64) {
    gpu().wait();
    let before = trace::now();
    let event = timed(Stream::Compute);
    gpu().must(|| "waiting for an event of a trace".into(), || event.wait());
    (event, before.midpoint(trace::now()))
}

/// Begins the spans of a step. The GPU has nothing to do.
pub fn begin() {
    *lock(&LOG) = Log { base: Some(now()), ..Log::default() };
}

/// Ends the spans of a step, and adds them to its trace.
pub fn end() {
    let (last, end) = now();
    let log = std::mem::take(&mut *lock(&LOG));
    let Some((base, start)) = &log.base else { return };
    let times = gpu().must(|| "the times of a trace".into(), || times(base, &log.events));
    let whole = gpu().must(|| "the time of a trace".into(), || last.seconds_since(base));
    // The clocks may run at different speeds.
    let speed = if whole > 0.0 { (end - start) as f64 / (whole * 1e9) } else { 1.0 };
    let at = |event: usize| start + (times[event] * 1e9 * speed).max(0.0) as u64;
    for Spanned { name, labels, numbers, stream, events } in log.spans {
        let row = format!("GPU stream {}", format!("{stream:?}").to_lowercase());
        trace::of_gpu(&row, name, labels, numbers, events.map(at));
    }
}

/// Seconds from `base` to each event. They are sums of times between neighbors on a stream, because a long time has
/// only the 24 bits of an f32.
fn times(base: &Event, events: &[(Stream, Event)]) -> Result<Vec<f64>> {
    let mut before: Vec<(Stream, &Event, f64)> = Vec::new();
    let mut times = Vec::with_capacity(events.len());
    for (stream, event) in events {
        event.wait()?;
        let known = before.iter_mut().find(|(known, ..)| known == stream);
        let (last, since) = known.as_ref().map_or((base, 0.0), |(_, last, since)| (*last, *since));
        let time = since + event.seconds_since(last)?.max(0.0);
        match known {
            Some(known) => (known.1, known.2) = (event, time),
            None => before.push((*stream, event, time)),
        }
        times.push(time);
    }
    Ok(times)
}
