//! A device that computes nothing. Within [`run`], on its thread, operations return at once, values are whatever memory
//! holds (zeros, mostly), and what a job would hold is counted by owner and phase: a plan is the job itself, run here.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Bytes by owner; owners are those of `owned_by`.
pub type Bytes = BTreeMap<&'static str, usize>;

/// The fullest moment of a phase.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    pub bytes: usize,
    pub parts: Bytes,
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// By phase, in the names of `comm::phase`.
    pub peaks: BTreeMap<&'static str, Peak>,
    /// The most that the system would back at once: what was ever written of tensors, kept ones included, and all else.
    pub resident: usize,
}

#[derive(Default)]
struct Scope {
    record: Record,
    live: Bytes,
    in_use: usize,
    phase: &'static str,
    /// The phase is at its fullest so far, and its parts are not written down yet.
    rising: bool,
    /// Bytes outside of the arena, and what the system backs of the arena.
    outside: usize,
    backed: usize,
    /// What each thread keeps to work in.
    scratch: usize,
}

thread_local! {
    /// Threads that a kernel would have; 0 where work is real. And the memory that the device has.
    static THREADS: Cell<usize> = const { Cell::new(0) };
    static MEMORY: Cell<u64> = const { Cell::new(0) };
    static SCOPE: RefCell<Scope> = RefCell::default();
}

/// Whether nothing is computed on this thread.
pub fn is_active() -> bool {
    THREADS.get() > 0
}

/// Threads that a kernel would have.
pub fn threads() -> Option<usize> {
    Some(THREADS.get()).filter(|threads| *threads > 0)
}

/// Bytes that the device has, where it is a null device.
pub fn memory() -> Option<u64> {
    is_active().then(|| MEMORY.get())
}

/// Does `work` on a null device of as many threads and bytes, in the phase `load`, and gives what was counted.
///
/// # Panics
/// Within itself.
pub fn run<R>(threads: usize, memory: u64, work: impl FnOnce() -> R) -> (R, Record) {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            THREADS.set(0);
        }
    }
    assert!(!is_active(), "a null device within another");
    SCOPE.set(Scope { phase: "load", ..Scope::default() });
    THREADS.set(threads.max(1));
    MEMORY.set(memory);
    let leave = Leave;
    let done = work();
    drop(leave);
    let mut scope = SCOPE.take();
    scope.write_down();
    (done, scope.record)
}

fn with(work: impl FnOnce(&mut Scope)) {
    if is_active() {
        SCOPE.with_borrow_mut(work);
    }
}

/// What follows belongs to `phase`.
pub fn enter(phase: &'static str) {
    with(|scope| {
        scope.write_down();
        scope.phase = phase;
        scope.note();
    });
}

/// Counts a tensor as in use.
pub fn take(owner: &'static str, bytes: usize) {
    with(|scope| scope.take(owner, bytes));
}

/// A tensor that was taken is in use no more.
pub fn give(owner: &'static str, bytes: usize) {
    with(|scope| scope.give(owner, bytes));
}

/// Bytes of the arena that the system backs from now on.
pub fn back(bytes: usize) {
    with(|scope| {
        scope.backed = bytes;
        scope.note();
    });
}

/// Memory outside of the arena, until it is dropped.
#[derive(Debug, Default)]
#[must_use = "what is dropped counts no more"]
pub struct Held {
    owner: &'static str,
    bytes: usize,
}

/// Counts `bytes` outside of the arena as `owner`'s; nothing where work is real.
pub fn hold(owner: &'static str, bytes: usize) -> Held {
    if !is_active() {
        return Held::default();
    }
    with(|scope| {
        scope.outside += bytes;
        scope.take(owner, bytes);
    });
    Held { owner, bytes }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Self { owner, bytes } = *self;
        if bytes > 0 {
            with(|scope| {
                scope.outside -= bytes;
                scope.give(owner, bytes);
            });
        }
    }
}

/// Each thread works in `bytes`, and keeps the most that it ever worked in.
pub fn work_in(bytes: usize) {
    with(|scope| {
        let more = bytes.saturating_sub(scope.scratch) * THREADS.get();
        if more > 0 {
            scope.scratch = bytes;
            scope.outside += more;
            scope.take("program", more);
        }
    });
}

impl Scope {
    fn take(&mut self, owner: &'static str, bytes: usize) {
        if bytes > 0 {
            *self.live.entry(owner).or_default() += bytes;
            self.in_use += bytes;
            self.note();
        }
    }

    fn give(&mut self, owner: &'static str, bytes: usize) {
        self.write_down();
        if let Some(live) = self.live.get_mut(owner) {
            *live -= bytes;
            if *live == 0 {
                self.live.remove(owner);
            }
        }
        self.in_use -= bytes;
    }

    fn note(&mut self) {
        self.record.resident = self.record.resident.max(self.outside + self.backed);
        let peak = self.record.peaks.entry(self.phase).or_default();
        if self.in_use > peak.bytes {
            peak.bytes = self.in_use;
            self.rising = true;
        }
    }

    /// Parts are copied where the level falls again, not at each step upwards.
    fn write_down(&mut self) {
        if std::mem::take(&mut self.rising) {
            self.record.peaks.entry(self.phase).or_default().parts = self.live.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_remembers_its_fullest_moment_by_owner() {
        let ((), record) = run(2, 1 << 30, || {
            take("weights", 100);
            enter("train");
            take("activations", 7);
            give("activations", 7);
            let files = hold("files", 20);
            back(50);
            drop(files);
            take("activations", 3);
            work_in(8);
            work_in(4);
        });
        let peaks = &record.peaks;
        assert_eq!((peaks["load"].bytes, peaks["train"].bytes), (100, 120));
        assert_eq!(peaks["train"].parts, Bytes::from([("weights", 100), ("files", 20)]));
        assert_eq!(record.resident, 70);
        assert!(!is_active());
    }
}
