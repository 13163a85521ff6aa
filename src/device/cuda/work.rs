//! Work that runs beside the compute stream: collectives that are under way while kernels compute.
//!
//! What is started within `Gpu::beside` goes to another stream, behind all that the compute stream was given until then.
//! `Work::join` lets the compute stream wait for it; the host waits for neither. Memory that the work uses is not given to
//! anybody else before it is joined, whoever drops it meanwhile.

use super::gpu::{Gpu, Stream, gpu, must};
use super::staging::Event;
use super::{View, ViewMut};
use crate::error::Result;
use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

thread_local! {
    /// Where this thread starts things now, and the work that they belong to; none: on the compute stream.
    static ACTIVE: Cell<Option<(Stream, u64)>> = const { Cell::new(None) };
}

/// The stream to which this thread starts kernels and copies.
pub(super) fn stream() -> Stream {
    ACTIVE.get().map_or(Stream::Compute, |(stream, _)| stream)
}

/// Work that the compute stream does not wait for yet. Dropped, it is joined.
#[derive(Debug)]
#[must_use = "memory stays with the work until it is joined"]
pub struct Work {
    id: u64,
    marks: Option<Arc<Marks>>,
    /// The stream that is joined to the compute stream within a capture, where nothing is marked.
    captured: Option<Stream>,
    joined: bool,
}

/// When a work ended, and when the compute stream came to wait for it.
#[derive(Debug)]
pub struct Marks {
    done: Option<Event>,
    /// Recorded when the work is joined.
    arrived: Option<Event>,
    joined: Mutex<bool>,
}

/// Events of marks that are gone: they are recorded again.
static SPARE: Mutex<Vec<Event>> = Mutex::new(Vec::new());

fn spare() -> MutexGuard<'static, Vec<Event>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Marks {
    /// Marks that were recorded nowhere yet.
    pub(super) fn unrecorded() -> Result<Self> {
        let event = || spare().pop().map_or_else(Event::timed, Ok);
        Ok(Self { done: Some(event()?), arrived: Some(event()?), joined: Mutex::new(false) })
    }

    pub(super) fn done(&self) -> &Event {
        self.done.as_ref().expect("there until it is dropped")
    }

    pub(super) fn arrived(&self) -> &Event {
        self.arrived.as_ref().expect("there until it is dropped")
    }

    /// Notes that the compute stream was told to wait.
    pub(super) fn join(&self) {
        *self.joined() = true;
    }

    fn joined(&self) -> MutexGuard<'_, bool> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the work has ended. Where the GPU failed it has: whoever waits for the GPU says why.
    pub fn is_done(&self) -> bool {
        gpu().is_past(self.done())
    }

    /// Seconds for which the compute stream stood still for the work, when both have come there.
    pub fn waited(&self) -> Option<f64> {
        let known = *self.joined() && self.is_done() && gpu().is_past(self.arrived());
        known.then(|| self.done().seconds_since(self.arrived()).unwrap_or(0.0).max(0.0))
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        // Who waits for one waits for where it was, also when it is recorded elsewhere.
        spare().extend(self.done.take().into_iter().chain(self.arrived.take()));
    }
}

/// One work that is not joined.
#[derive(Debug)]
struct Open {
    id: u64,
    /// Addresses that its kernels and collectives got.
    uses: Vec<u64>,
    /// Memory that was dropped meanwhile.
    dropped: Vec<u64>,
}

/// All works that are not joined.
#[derive(Debug, Default)]
pub(super) struct Works(Mutex<(u64, Vec<Open>)>);

impl Works {
    fn all(&self) -> MutexGuard<'_, (u64, Vec<Open>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> u64 {
        let mut all = self.all();
        all.0 += 1;
        let id = all.0;
        all.1.push(Open { id, uses: Vec::new(), dropped: Vec::new() });
        id
    }

    /// Notes that the work which this thread is starting uses the memory at `addresses`.
    pub(super) fn note(&self, addresses: impl IntoIterator<Item = u64>) {
        let Some((_, id)) = ACTIVE.get() else { return };
        if let Some(open) = self.all().1.iter_mut().find(|open| open.id == id) {
            open.uses.extend(addresses);
        }
    }

    /// Whether a work keeps the memory `run` that was dropped now; then it is given back when that is joined.
    pub(super) fn keep(&self, run: Range<u64>) -> bool {
        let mut all = self.all();
        let own = ACTIVE.get().map(|(_, id)| id);
        let uses = |open: &Open| own == Some(open.id) || open.uses.iter().any(|used| run.contains(used));
        let Some(open) = all.1.iter_mut().find(|open| uses(open)) else { return false };
        open.dropped.push(run.start);
        true
    }

    /// Forgets a work; what was dropped while it was under way.
    fn close(&self, id: u64) -> Vec<u64> {
        let mut all = self.all();
        let at = all.1.iter().position(|open| open.id == id).expect("a work is joined once");
        all.1.remove(at).dropped
    }
}

/// Restores what was active before, where a panic passes, too.
struct Active(Option<(Stream, u64)>);

impl Drop for Active {
    fn drop(&mut self) {
        ACTIVE.set(self.0);
    }
}

impl Gpu {
    /// Runs `body`, and lets all that it starts run on `stream`, behind what was started until now. Where a graph is captured it
    /// is a part of that: `stream` parts from the captured one here, and the work is joined before the capture ends.
    pub fn beside<T>(&self, stream: Stream, body: impl FnOnce() -> T) -> (T, Work) {
        self.order(self::stream(), stream);
        let id = self.works.open();
        let active = Active(ACTIVE.replace(Some((stream, id))));
        let value = body();
        drop(active);
        let captured = self.is_capturing().then_some(stream);
        // An event of a capture says nothing of when a replay comes there.
        let marks = captured.is_none().then(|| Arc::new(self.mark(stream)));
        (value, Work { id, marks, captured, joined: false })
    }

    /// Marks the end of what `stream` was given.
    pub(super) fn mark(&self, stream: Stream) -> Marks {
        must(self.driver.marks(stream), || format!("a mark on {stream:?}"))
    }

    /// Lets what this thread starts from now on wait for a mark.
    pub(super) fn wait_on(&self, marks: &Marks) -> Result<()> {
        self.driver.wait_on(marks)
    }

    /// Whether the GPU has come by an event, or has failed.
    pub(super) fn is_past(&self, event: &Event) -> bool {
        self.driver.is_past(event).unwrap_or(true)
    }

    /// Whether this thread is starting work beside the compute stream.
    pub fn is_beside(&self) -> bool {
        ACTIVE.get().is_some()
    }

    /// Notes that the work which is being started uses these values, by a library of CUDA.
    pub fn uses(&self, values: &View) {
        self.works.note([values.address()]);
    }

    /// As `uses`, of values that are written.
    pub fn uses_mut(&self, values: &ViewMut) {
        self.works.note([values.address()]);
    }
}

impl Work {
    /// When it ended; none in a capture.
    pub fn marks(&self) -> Option<Arc<Marks>> {
        self.marks.clone()
    }

    /// Lets the compute stream wait for it.
    pub fn join(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.joined, true) {
            return;
        }
        if let Some(stream) = self.captured {
            gpu().order(stream, Stream::Compute);
        }
        if let Some(marks) = &self.marks {
            gpu().wait_on(marks).unwrap_or_else(|error| std::panic::panic_any(error.within("a work beside the host")));
            marks.join();
        }
        for address in gpu().works.close(self.id) {
            gpu().free(address);
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.end();
        }
    }
}
