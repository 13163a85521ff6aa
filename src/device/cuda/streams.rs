//! Operations in progress on the streams of the GPU: work on other streams than the compute stream, copies from memory
//! that is already free, and a capture.

use super::null_driver;
use super::staging::Event;
use crate::error::Result;
use crate::sys::lock::lock;
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

/// Streams of work that run at the same time. Memory belongs to the compute stream: a user on another stream orders the
/// two before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// All kernels and copies.
    Compute,
    /// Collectives of the tensor axis, before other work.
    Tensor,
    /// Gathers and sums of ZeRO.
    Zero,
    /// The keys that are passed around the sequence axis.
    Ring,
    /// Copies of offloaded values from host memory.
    Up,
    /// Copies of values to host memory.
    Down,
}

thread_local! {
    /// The stream on which this thread starts work now, and the id of that work; `None`: the compute stream.
    static ACTIVE: Cell<Option<(Stream, u64)>> = const { Cell::new(None) };
}

impl Stream {
    /// The stream of this name. For `Compute`, the stream on which this thread starts work now.
    pub(super) fn here(self) -> Self {
        ACTIVE.get().filter(|_| self == Self::Compute).map_or(self, |(stream, _)| stream)
    }
}

/// The end of some work, and the point at which the compute stream began to wait for it.
#[derive(Debug)]
pub struct Marks {
    /// The second one is recorded when the work is joined.
    events: Vec<Event>,
    joined: AtomicBool,
}

/// Events of dropped marks, for reuse.
static SPARE: Mutex<Vec<Event>> = Mutex::new(Vec::new());

impl Marks {
    /// Marks that are not yet recorded.
    pub(super) fn unrecorded() -> Result<Self> {
        // A null GPU does not reuse events of the real one.
        let kept = || if null_driver::is_active() { None } else { lock(&SPARE).pop() };
        let event = || kept().map_or_else(Event::timed, Ok);
        Ok(Self { events: vec![event()?, event()?], joined: AtomicBool::new(false) })
    }

    pub(super) fn done(&self) -> &Event {
        &self.events[0]
    }

    pub(super) fn arrived(&self) -> &Event {
        &self.events[1]
    }

    pub(super) fn is_joined(&self) -> bool {
        self.joined.load(Ordering::SeqCst)
    }

    /// Notes that the compute stream waits for it.
    pub(super) fn join(&self) {
        self.joined.store(true, Ordering::SeqCst);
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        // A stream that already waits for an event is not affected when the event is recorded again.
        if !null_driver::is_active() {
            lock(&SPARE).append(&mut self.events);
        }
    }
}

/// Work that is not joined.
#[derive(Debug)]
struct Open {
    id: u64,
    /// Addresses that its kernels and collectives use.
    uses: Vec<u64>,
    /// Memory that was dropped meanwhile.
    dropped: Vec<u64>,
}

/// All work that is not joined.
#[derive(Debug, Default)]
pub(super) struct Works(Mutex<(u64, Vec<Open>)>);

impl Works {
    pub(super) fn clear(&self) {
        lock(&self.0).1.clear();
    }

    pub(super) fn open(&self) -> u64 {
        let mut all = lock(&self.0);
        all.0 += 1;
        let id = all.0;
        all.1.push(Open { id, uses: Vec::new(), dropped: Vec::new() });
        id
    }

    /// Notes that the work that this thread is starting uses the memory at `addresses`.
    pub(super) fn note(&self, addresses: impl IntoIterator<Item = u64>) {
        let Some((_, id)) = ACTIVE.get() else { return };
        if let Some(open) = lock(&self.0).1.iter_mut().find(|open| open.id == id) {
            open.uses.extend(addresses);
        }
    }

    /// Whether some work still uses the memory `run`, which is being dropped. It is then freed when that work is
    /// joined.
    pub(super) fn keep(&self, run: Range<u64>) -> bool {
        let mut all = lock(&self.0);
        let own = ACTIVE.get().map(|(_, id)| id);
        let uses = |open: &Open| own == Some(open.id) || open.uses.iter().any(|used| run.contains(used));
        let Some(open) = all.1.iter_mut().find(|open| uses(open)) else { return false };
        open.dropped.push(run.start);
        true
    }

    /// Removes some work. Returns the memory that was dropped while it was under way.
    pub(super) fn close(&self, id: u64) -> Vec<u64> {
        let mut all = lock(&self.0);
        let at = all.1.iter().position(|open| open.id == id).expect("work is joined once");
        all.1.remove(at).dropped
    }
}

/// Lets this thread start the work `id` on `stream` until the guard is dropped.
pub(super) fn active(stream: Stream, id: u64) -> Active {
    Active(ACTIVE.replace(Some((stream, id))))
}

/// Whether this thread is starting such work.
pub(super) fn is_active() -> bool {
    ACTIVE.get().is_some()
}

/// A guard that restores the previous stream, also after a panic.
pub(super) struct Active(Option<(Stream, u64)>);

impl Drop for Active {
    fn drop(&mut self) {
        ACTIVE.set(self.0);
    }
}

/// Runs that copies read, and the ends of these.
pub(super) type InFlight = Mutex<Vec<(Range<u64>, Arc<Event>)>>;

/// The capture that is under way, if any.
#[derive(Debug, Default)]
pub(super) struct Capture {
    pub is_on: AtomicBool,
    /// The capturing thread, and the first failure.
    pub under_way: Mutex<Option<(ThreadId, Option<String>)>>,
}

impl Capture {
    pub(super) fn begin(&self) {
        *lock(&self.under_way) = Some((std::thread::current().id(), None));
        self.is_on.store(true, Ordering::SeqCst);
    }

    /// Ends the capture. Returns the first failure.
    pub(super) fn end(&self) -> Option<String> {
        self.is_on.store(false, Ordering::SeqCst);
        lock(&self.under_way).take().and_then(|(_, failed)| failed)
    }
}
