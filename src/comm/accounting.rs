//! The cost of collectives: calls, bytes and seconds by axis and operation. Also keeps track of collectives in
//! progress.
//!
//! *Exposed* is the time for which a compute thread was blocked. For a collective that it called itself, this is the
//! whole time. For one on a stream it is only the time in `Pending::wait`, booked under (axis of the stream, name of
//! the stream).
//!
//! A collective between GPUs is only launched by the host. Its exposed time is the time for which the compute stream
//! waited, by the GPU's own clock. The clock is read after both streams have finished, so the last collectives of a
//! phase may be booked in the next. Their `seconds` are not measured.

use super::background;
use crate::device::cuda::gpu;
use crate::device::cuda::work::Marks;
use crate::device::null;
use crate::sys::lock::lock;
use crate::sys::trace::{self, Category};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Sums over all calls of one operation on one axis since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    pub calls: u64,
    /// Bytes of the caller's buffer, not on the wire.
    pub bytes: u64,
    /// Seconds inside the call, including the wait for other ranks. Zero for waits for a stream, whose collectives are
    /// counted under their own names.
    pub seconds: f64,
    /// Seconds for which a compute thread was blocked.
    pub exposed: f64,
}

/// A collective that a thread of this process has entered and not left.
#[derive(Clone, Debug)]
pub struct Entered {
    pub axis: &'static str,
    pub op: &'static str,
    pub bytes: usize,
    pub since: Instant,
    /// The stream whose thread entered it.
    pub stream: Option<&'static str>,
    id: u64,
}

struct Ledger {
    totals: BTreeMap<(&'static str, &'static str), Totals>,
    under_way: Vec<Entered>,
    last: Option<Entered>,
    next_id: u64,
}

static LEDGER: Mutex<Ledger> =
    Mutex::new(Ledger { totals: BTreeMap::new(), under_way: Vec::new(), last: None, next_id: 0 });

/// The cost so far by (axis, operation). Subtract two snapshots to get the cost of a phase.
pub fn accounting() -> BTreeMap<(&'static str, &'static str), Totals> {
    book_done();
    lock(&LEDGER).totals.clone()
}

/// Exposed seconds since the process started, over all axes. Subtract two values to get those of a phase.
pub fn exposed_seconds() -> f64 {
    book_done();
    lock(&LEDGER).totals.values().map(|t| t.exposed).sum()
}

/// Books the time that a thread waited for a job on a stream. A stream that waits for another one blocks no compute
/// thread.
pub(super) fn waited(axis: &'static str, stream: &'static str, seconds: f64) {
    if background::current().is_some() || null::is_active() {
        return;
    }
    let mut ledger = lock(&LEDGER);
    let totals = ledger.totals.entry((axis, stream)).or_default();
    totals.calls += 1;
    totals.exposed += seconds;
}

/// Books the time since `since`, as `waited`, and adds the wait to a trace.
pub(super) fn waited_since(axis: &'static str, stream: &'static str, since: Instant) {
    trace::since(Category::Wait, || format!("stream {stream}"), since);
    waited(axis, stream, since.elapsed().as_secs_f64());
}

/// The collective entered last, relabeled as one of a stream over `axis`.
pub(super) fn as_of(axis: &'static str, stream: &'static str) -> Entered {
    let (op, bytes) = last_entered().map_or(("a job", 0), |last| (last.op, last.bytes));
    Entered { axis, op, bytes, since: Instant::now(), stream: Some(stream), id: u64::MAX }
}

/// The collective that this rank's host has been in for the longest time.
pub(super) fn oldest_of_host() -> Option<Entered> {
    lock(&LEDGER).under_way.first().cloned()
}

/// The collective entered last, in progress or not.
pub(super) fn last_entered() -> Option<Entered> {
    lock(&LEDGER).last.clone()
}

impl std::fmt::Display for Entered {
    /// `all_gather over zero (4194304 bytes) on stream zero`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} over {} ({} bytes)", self.op, self.axis, self.bytes)?;
        self.stream.map_or(Ok(()), |stream| write!(f, " on stream {stream}"))
    }
}

/// Counts a collective of `bytes` over `size` ranks for a plan. An all-reduce is a reduce-scatter and an all-gather,
/// each of which sends all but a rank's own share.
pub(super) fn note(op: &'static str, axis: &'static str, [size, stride]: [usize; 2], bytes: usize) {
    let (bytes, others) = (bytes as f64, (size - 1) as f64);
    let shared = bytes * others / size as f64;
    let (sent, messages) = match op {
        "barrier" => (0.0, others),
        "shift" | "send" => (bytes, 1.0),
        "broadcast" | "broadcast_bytes" => (bytes, others),
        // The bytes are this rank's own.
        "all_gather_bytes" => (bytes * others, others),
        _ if op.starts_with("all_reduce") || op == "sum_ordered" => (2.0 * shared, 2.0 * others),
        _ => (shared, others),
    };
    null::note_collective(op, axis, [size, stride], sent, messages);
}

/// A guard that lives as long as one call of a collective.
pub(super) struct Call {
    pub(super) entered: Entered,
    /// Whether the call returns when the collective is launched instead of done.
    launches: bool,
    of: Of,
}

/// What a call belongs to in a trace.
#[derive(Clone, Copy)]
enum Of {
    /// A wait that is no collective.
    Wait,
    /// A call of a group, by its id and number.
    Group(u32, u64),
    /// A question to a world rank.
    Rank(usize),
}

impl Call {
    /// The same as call `number` of a group.
    pub(super) fn numbered(mut self, group: u32, number: u64) -> Self {
        self.of = Of::Group(group, number);
        self
    }

    /// The same as a question to a world rank.
    pub(super) fn asking(mut self, rank: usize) -> Self {
        self.of = Of::Rank(rank);
        self
    }
}

pub(super) fn begin_call(axis: &'static str, op: &'static str, bytes: usize) -> Call {
    let mut ledger = lock(&LEDGER);
    let entered = Entered { axis, op, bytes, since: Instant::now(), stream: background::current(), id: ledger.next_id };
    ledger.next_id += 1;
    ledger.under_way.push(entered.clone());
    ledger.last = Some(entered.clone());
    Call { entered, launches: false, of: Of::Wait }
}

/// Begins the call of a collective that GPUs run asynchronously to the host.
pub(super) fn launch(axis: &'static str, op: &'static str, bytes: usize) -> Call {
    let mut call = begin_call(axis, op, bytes);
    call.launches = true;
    call
}

impl Drop for Call {
    fn drop(&mut self) {
        let Entered { axis, op, bytes, since, stream, id } = self.entered;
        let seconds = if self.launches { 0.0 } else { since.elapsed().as_secs_f64() };
        match self.of {
            Of::Group(group, number) => trace::collective(op, since, (group, number), bytes),
            Of::Rank(rank) => trace::wait_for(rank, op, since),
            Of::Wait => trace::since(if self.launches { Category::Operation } else { Category::Wait }, || op, since),
        }
        let mut ledger = lock(&LEDGER);
        ledger.under_way.retain(|e| e.id != id);
        let totals = ledger.totals.entry((axis, op)).or_default();
        totals.calls += 1;
        totals.bytes += bytes as u64;
        totals.seconds += seconds;
        totals.exposed += if stream.is_some() { 0.0 } else { seconds };
    }
}

/// The collectives in flight on GPUs.
static IN_FLIGHT: Mutex<VecDeque<(Entered, Arc<Marks>)>> = Mutex::new(VecDeque::new());

/// Adds a launched collective to those in flight.
pub(super) fn begin_async(entered: Entered, marks: Option<Arc<Marks>>) {
    let Some(marks) = marks.filter(|_| !null::is_active()) else { return };
    let mut in_flight = lock(&IN_FLIGHT);
    in_flight.push_back((entered, marks));
    // Two are booked for each that begins, so that there are never many more than the GPU has yet to do.
    let mut done = Vec::with_capacity(2);
    for _ in 0..2 {
        let Some(waited) = in_flight.front().and_then(|(_, marks)| marks.waited()) else { break };
        done.extend(in_flight.pop_front().map(|(entered, _)| (entered, waited)));
    }
    drop(in_flight);
    book(done);
}

/// Books the time that the compute streams waited for finished collectives.
fn book_done() {
    let mut done = Vec::new();
    lock(&IN_FLIGHT).retain(|(entered, marks)| {
        let waited = marks.waited();
        done.extend(waited.map(|seconds| (entered.clone(), seconds)));
        waited.is_none()
    });
    book(done);
}

fn book(done: Vec<(Entered, f64)>) {
    for (entered, seconds) in done {
        match entered.stream {
            Some(stream) => waited(entered.axis, stream, seconds),
            // The call itself was booked when it was launched.
            None => lock(&LEDGER).totals.entry((entered.axis, entered.op)).or_default().exposed += seconds,
        }
    }
}

/// The collective between GPUs that has been in flight for the longest time.
pub(super) fn oldest_async() -> Option<Entered> {
    // Marks are looked at without the lock: a GPU that hangs may answer late.
    let all = lock(&IN_FLIGHT).clone();
    all.into_iter().find(|(_, marks)| !marks.is_done()).map(|(entered, _)| entered)
}

/// The collectives of a graph at each launch: the number of calls and their bytes by (axis, operation). They are called
/// during the capture, and run at each launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calls(BTreeMap<(&'static str, &'static str), (u64, u64)>);

thread_local! {
    /// The calls in this thread's current capture.
    static CAPTURED: RefCell<Calls> = RefCell::default();
}

/// Notes a collective that is being captured.
pub(super) fn note_captured(axis: &'static str, op: &'static str, bytes: usize) {
    CAPTURED.with_borrow_mut(|captured| {
        let (calls, sum) = captured.0.entry((axis, op)).or_default();
        (*calls, *sum) = (*calls + 1, *sum + bytes as u64);
    });
}

impl Calls {
    /// The collectives that `work` captures.
    pub fn capture<T>(work: impl FnOnce() -> T) -> (T, Self) {
        CAPTURED.take();
        let value = work();
        (value, CAPTURED.take())
    }

    /// Books the calls after the launch of their graph. The graph is in flight until the GPU has finished it, and the
    /// watchdog watches it. Waits of a compute stream within a graph are not measured.
    pub fn launched(&self) {
        let Some(((axis, _), _)) = self.0.first_key_value() else { return };
        let marks = gpu().mark_here();
        if null::is_active() {
            return;
        }
        let bytes: u64 = self.0.values().map(|(_, bytes)| bytes).sum();
        let (op, bytes) = ("a graph of collectives", bytes as usize);
        let entered = Entered { axis, op, bytes, since: Instant::now(), stream: None, id: u64::MAX };
        let mut ledger = lock(&LEDGER);
        ledger.last = Some(entered.clone());
        for (key, (calls, bytes)) in &self.0 {
            let totals = ledger.totals.entry(*key).or_default();
            (totals.calls, totals.bytes) = (totals.calls + calls, totals.bytes + bytes);
        }
        drop(ledger);
        begin_async(entered, Some(marks));
    }
}
