//! Spans of a traced step: the work of each thread of this process, with its begin and its end. `metrics.trace_steps`
//! turns it on for a step.
//!
//! While no step is traced, a place of a span costs one relaxed load of a flag.

use super::lock::lock;
use std::borrow::Cow;
use std::cell::OnceCell;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

/// The kind of work of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Category {
    /// A phase of `metrics::Phase`, an evaluation, or the gathering of the step's metrics.
    Phase,
    /// A part of a phase: a micro-batch, a forward, a backward, an optimizer step, a decode step.
    Pass,
    Layer,
    Operation,
    Collective,
    /// A wait for another thread, another process or another rank's answer.
    Wait,
    Reward,
    Environment,
    /// Files that are written or read.
    Io,
    /// Work of a GPU's stream.
    Gpu,
}

impl Category {
    pub const ALL: [Self; 10] = [
        Self::Phase,
        Self::Pass,
        Self::Layer,
        Self::Operation,
        Self::Collective,
        Self::Wait,
        Self::Reward,
        Self::Environment,
        Self::Io,
        Self::Gpu,
    ];

    pub fn name(self) -> &'static str {
        ["phase", "pass", "layer", "operation", "collective", "wait", "reward", "environment", "io", "gpu"]
            [self as usize]
    }
}

/// The most numbers of a span.
pub const NUMBERS: usize = 4;

/// A finished span. Times are in ns by the clock of this host.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub name: Cow<'static, str>,
    pub category: Category,
    /// The index of its row in `Recorded::lanes`.
    pub lane: u32,
    pub start: u64,
    pub end: u64,
    /// The names of `numbers`, separated by spaces.
    pub labels: &'static str,
    pub numbers: [u64; NUMBERS],
    /// The ranks of a collective: an index of `comm::group_id::names`.
    pub group: Option<u32>,
}

/// All spans of a step.
#[derive(Debug, Default)]
pub struct Recorded {
    pub spans: Vec<Span>,
    /// The names of the rows: threads, and streams of a GPU.
    pub lanes: Vec<String>,
    /// The spans left out, because there are more than `SPANS_MAX`.
    pub left_out: u64,
}

/// The most spans of a step on one rank, about 100 MiB.
pub const SPANS_MAX: usize = 1 << 20;

static ON: AtomicBool = AtomicBool::new(false);
static LOG: Mutex<Log> = Mutex::new(Log { begun: 0, spans: Vec::new(), left_out: 0 });
/// The rows so far. A row is free again after its thread has ended.
static LANES: Mutex<Vec<(String, bool)>> = Mutex::new(Vec::new());
/// Added to the clock of this process, in ns.
static SHIFT: AtomicI64 = AtomicI64::new(0);

struct Log {
    begun: u64,
    spans: Vec<Span>,
    left_out: u64,
}

/// The row of a thread, which another thread of the same name may take over.
struct Lane(u32);

thread_local! {
    static LANE: OnceCell<Lane> = const { OnceCell::new() };
}

impl Drop for Lane {
    fn drop(&mut self) {
        lock(&LANES)[self.0 as usize].1 = false;
    }
}

/// The row of the threads or streams named `name` that is free, or a new one.
fn claim(name: &str) -> u32 {
    let mut lanes = lock(&LANES);
    let free = lanes.iter().position(|(known, is_taken)| known == name && !is_taken).unwrap_or_else(|| {
        lanes.push((name.to_string(), false));
        lanes.len() - 1
    });
    lanes[free].1 = true;
    free as u32
}

fn lane() -> u32 {
    let own = || Lane(claim(std::thread::current().name().unwrap_or("thread")));
    LANE.try_with(|lane| lane.get_or_init(own).0).unwrap_or(0)
}

/// Whether a step is being traced.
#[inline]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Nanoseconds of this host's monotonic clock, which all of its processes share.
pub fn now() -> u64 {
    at(Instant::now())
}

/// A time of this process as nanoseconds of that clock.
fn at(time: Instant) -> u64 {
    static BASE: OnceLock<(Instant, u64)> = OnceLock::new();
    let (base, ns) = BASE.get_or_init(|| {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes a time.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
        (Instant::now(), time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
    });
    let [after, before] = [time.saturating_duration_since(*base), base.saturating_duration_since(time)];
    (ns + after.as_nanos() as u64 - before.as_nanos() as u64).wrapping_add_signed(SHIFT.load(Ordering::Relaxed))
}

/// Shifts the clock of this process by `ns`, as if it ran on another host.
pub fn shift_clock(ns: i64) {
    SHIFT.store(ns, Ordering::Relaxed);
}

/// Begins to record spans. The row of the calling thread is the first one.
pub fn begin() {
    lock(&LOG).begun = now();
    let compute = || Lane(claim("compute"));
    LANE.with(|lane| lane.get_or_init(compute).0);
    ON.store(true, Ordering::SeqCst);
}

/// Ends the recording. Spans that have not ended are left out.
pub fn end() -> Recorded {
    ON.store(false, Ordering::SeqCst);
    let mut log = lock(&LOG);
    let (spans, left_out) = (mem::take(&mut log.spans), mem::take(&mut log.left_out));
    Recorded { spans, left_out, lanes: lock(&LANES).iter().map(|(name, _)| name.clone()).collect() }
}

fn push(span: Span) {
    let mut log = lock(&LOG);
    // A thread may have begun before this step.
    if span.start < log.begun || !is_on() {
        return;
    }
    if log.spans.len() < SPANS_MAX { log.spans.push(span) } else { log.left_out += 1 }
}

/// A span that ends when it is dropped. Nothing while no step is traced.
#[must_use = "the span ends when this is dropped"]
pub struct Open(Option<Span>);

impl Drop for Open {
    #[inline]
    fn drop(&mut self) {
        if let Some(span) = self.0.take() {
            finish(span);
        }
    }
}

#[cold]
fn finish(span: Span) {
    push(Span { end: now(), ..span });
}

/// Begins a span on the row of this thread, with numbers named by `labels`.
#[inline]
pub fn span<const N: usize>(
    category: Category,
    name: &'static str,
    labels: &'static str,
    numbers: impl FnOnce() -> [usize; N],
) -> Open {
    if !is_on() {
        return Open(None);
    }
    Open(Some(started(category, Cow::Borrowed(name), labels, numbers())))
}

/// Begins a span of an operation.
#[inline]
pub fn operation<const N: usize>(
    name: &'static str,
    labels: &'static str,
    numbers: impl FnOnce() -> [usize; N],
) -> Open {
    span(Category::Operation, name, labels, numbers)
}

/// Begins a span whose name is made only if a step is traced.
#[inline]
pub fn named<const N: usize>(
    category: Category,
    name: impl FnOnce() -> String,
    labels: &'static str,
    numbers: [usize; N],
) -> Open {
    if !is_on() {
        return Open(None);
    }
    Open(Some(started(category, Cow::Owned(name()), labels, numbers)))
}

#[cold]
fn started<const N: usize>(
    category: Category,
    name: Cow<'static, str>,
    labels: &'static str,
    given: [usize; N],
) -> Span {
    let mut numbers = [0; NUMBERS];
    numbers.iter_mut().zip(given).for_each(|(to, number)| *to = number as u64);
    let start = now();
    Span { name, category, lane: lane(), start, end: start, labels, numbers, group: None }
}

/// Records a span whose end is set, and which began at `since`.
fn ended(span: Span, since: Instant) {
    push(Span { start: at(since), ..span });
}

/// Records a span of this thread that began at `since` and ends now.
#[inline]
pub fn since<N: Into<Cow<'static, str>>>(category: Category, name: impl FnOnce() -> N, since: Instant) {
    if is_on() {
        ended(started(category, name().into(), "", []), since);
    }
}

/// Records a wait of this thread for world rank `rank` that began at `since` and ends now.
#[inline]
pub fn wait_for(rank: usize, name: &'static str, since: Instant) {
    if is_on() {
        ended(started(Category::Wait, Cow::Borrowed(name), "rank", [rank]), since);
    }
}

/// Records a collective of this thread that began at `since` and ends now: call `number` of a group, with `bytes` of the
/// caller's buffer.
#[inline]
pub fn collective(name: &'static str, since: Instant, (group, number): (u32, u64), bytes: usize) {
    if is_on() {
        let span = started(Category::Collective, Cow::Borrowed(name), "bytes call", [bytes, number as usize]);
        ended(Span { group: Some(group), ..span }, since);
    }
}

/// Records work of a GPU from `start` to `end` (ns of `now`) on the row `row`.
pub fn of_gpu(row: &str, name: &'static str, labels: &'static str, numbers: [u64; NUMBERS], [start, end]: [u64; 2]) {
    let known = lock(&LANES).iter().position(|(known, _)| known == row);
    let lane = known.map_or_else(|| claim(row), |lane| lane as u32);
    push(Span { name: Cow::Borrowed(name), category: Category::Gpu, lane, start, end, labels, numbers, group: None });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_recorded_only_between_begin_and_end_and_nest_on_the_row_of_their_thread() {
        let numbers = |count: &mut usize| {
            *count += 1;
            [3, 4]
        };
        let mut made = 0;
        drop(operation("before", "m n", || numbers(&mut made)));
        let early = operation("open at the begin", "", || []);
        begin();
        drop(early);
        let outer = span(Category::Pass, "outer", "", || []);
        drop(operation("inner", "m n", || numbers(&mut made)));
        let threads =
            |_| std::thread::Builder::new().name("other".into()).spawn(|| drop(operation("there", "", || [])));
        for thread in (0..2).map(threads) {
            thread.expect("a thread").join().expect("it ends");
        }
        drop(outer);
        let late = operation("open at the end", "", || []);
        let Recorded { mut spans, lanes, left_out } = end();
        drop(late);
        drop(operation("after", "", || []));
        assert_eq!((made, left_out), (1, 0), "numbers are only made for a trace");
        // Other tests may run at the same time.
        let names = ["before", "open at the begin", "inner", "there", "outer", "open at the end", "after"];
        spans.retain(|span| names.contains(&&*span.name));
        let found: Vec<&str> = spans.iter().map(|span| &*span.name).collect();
        assert_eq!(found, ["inner", "there", "there", "outer"]);
        let (inner, outer) = (&spans[0], &spans[3]);
        assert!(outer.start <= inner.start && inner.start <= inner.end && inner.end <= outer.end);
        assert_eq!((inner.numbers, inner.labels), ([3, 4, 0, 0], "m n"));
        let row = |span: &Span| lanes[span.lane as usize].as_str();
        assert_eq!(spans.iter().map(row).collect::<Vec<_>>(), ["compute", "other", "other", "compute"]);
        assert_eq!(spans[1].lane, spans[2].lane, "a row is used again after its thread has ended");
        assert!(self::end().spans.is_empty());
    }
}
