//! A device that computes nothing: a CPU, or a GPU whose driver functions are replaced (`cuda::sys`). Within [`run`],
//! on its thread, operations return at once and values are unspecified (mostly zeros). The memory that a job would use
//! is counted by owner and phase. A plan is the job itself, run on this device.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Bytes by owner; owners are those of `owned_by`.
pub type Bytes = BTreeMap<&'static str, usize>;

/// The phases of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// All work before the first step.
    #[default]
    Load,
    Rollout,
    /// The two parts of a rollout, and of a judge's answers.
    Prefill,
    Decode,
    /// Rewards, and the forward passes of reward models.
    Reward,
    Score,
    Train,
    Checkpoint,
    Eval,
}

impl Phase {
    pub fn name(self) -> &'static str {
        ["load", "rollout", "prefill", "decode", "reward", "score", "train", "checkpoint", "eval"][self as usize]
    }
}

/// The fullest moment of a phase.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    pub bytes: usize,
    pub parts: Bytes,
}

/// Operations that are counted, by their names.
pub const GEMM: &str = "gemm";
pub const ATTENTION: &str = "attention";
pub const ATTENTION_BACKWARD: &str = "attention backward";
pub const HEAD: &str = "head";
pub const HEAD_BACKWARD: &str = "head and its backward";
pub const SAMPLING: &str = "sampling";
pub const OPTIMIZER: &str = "adamw";
/// Copies between the device's memory and offloaded values outside of it.
pub const OFFLOAD: &str = "offload";

/// The device that a null device imitates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Null {
    /// The threads that a CPU kernel would have.
    pub threads: usize,
    pub memory_bytes: u64,
    pub gpu: Option<NullGpu>,
}

/// The properties of a GPU that kernels ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NullGpu {
    pub capability: (u32, u32),
    pub multiprocessors: usize,
    /// Shared memory that one block may ask for.
    pub shared_bytes: usize,
}

/// The counts of a plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    pub peaks: BTreeMap<Phase, Peak>,
    /// The most memory that the system would back at once: all tensor memory ever written, kept runs included, and the
    /// rest.
    pub resident: usize,
    /// The most host memory that was pinned at once, or that mapped files had.
    pub host: usize,
    /// The work that would have been done: computation and copies.
    pub work: BTreeMap<Task, Work>,
    /// The work of evaluations.
    pub evaluation: BTreeMap<Task, Work>,
    /// The largest KV cache.
    pub cache: Option<Cache>,
}

/// Operations of one kind in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Task {
    pub phase: Phase,
    pub op: &'static str,
    /// The ranks, if the task is a collective.
    pub over: Option<Over>,
}

/// The ranks of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Over {
    pub axis: &'static str,
    pub members: usize,
    /// The distance between neighboring members, in world ranks.
    pub stride: usize,
    /// Whether it runs while the rank computes.
    pub is_hidden: bool,
}

/// The cost of a task on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    pub flops: f64,
    /// Read from memory and written there, or sent.
    pub bytes: f64,
    pub calls: f64,
    /// Messages, each of which waits for the previous one.
    pub messages: f64,
}

/// A KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    pub token_bytes: usize,
    pub bytes: usize,
    /// The size with which as many samples as allowed run at once.
    pub bytes_needed: usize,
    /// The size with which all samples would run at once.
    pub bytes_wanted: usize,
    pub samples: usize,
    pub batch_max: usize,
}

#[derive(Default)]
struct Scope {
    record: Record,
    live: Bytes,
    in_use: usize,
    phase: Phase,
    evaluates: bool,
    /// Whether the phase is at its peak so far and its parts are not recorded yet.
    rising: bool,
    /// Bytes outside of the arena, and bytes of the arena that the system backs.
    outside: usize,
    backed: usize,
    /// The scratch memory that each thread keeps.
    scratch: usize,
    /// The number of times that work counts, minus one.
    more_times: f64,
    is_hidden: bool,
}

thread_local! {
    /// `None` if work is real.
    static DEVICE: Cell<Option<Null>> = const { Cell::new(None) };
    static SCOPE: RefCell<Scope> = RefCell::default();
}

/// Whether nothing is computed on this thread.
pub fn is_active() -> bool {
    DEVICE.get().is_some()
}

/// The device that this thread's work is counted for.
pub fn device() -> Option<Null> {
    DEVICE.get()
}

/// Bytes of it that are not in use.
pub fn memory_free() -> Option<u64> {
    device().map(|device| device.memory_bytes.saturating_sub(SCOPE.with_borrow(|scope| scope.in_use) as u64))
}

/// Counts an operation of `flops` that reads and writes `bytes` of memory.
pub fn note(op: &'static str, flops: f64, bytes: f64) {
    with(|scope| scope.work(op, None, Work { flops, bytes, calls: 1.0, messages: 0.0 }));
}

/// Counts a collective over `members` ranks, `stride` apart, in which this rank sends `bytes`.
pub fn note_collective(op: &'static str, axis: &'static str, [members, stride]: [usize; 2], bytes: f64, messages: f64) {
    with(|scope| {
        let over = Over { axis, members, stride, is_hidden: scope.is_hidden };
        scope.work(op, Some(over), Work { flops: 0.0, bytes, calls: 1.0, messages });
    });
}

/// Counts a KV cache.
pub fn note_cache(cache: Cache) {
    with(|scope| {
        let fuller = scope.record.cache.filter(|known| known.bytes_wanted >= cache.bytes_wanted);
        scope.record.cache = Some(fuller.unwrap_or(cache));
    });
}

/// Runs `work`, which counts `times` times.
pub fn times<R>(times: f64, work: impl FnOnce() -> R) -> R {
    let set = |more_times: f64| with(|scope| scope.more_times = more_times);
    let before = SCOPE.with_borrow(|scope| scope.more_times);
    set((1.0 + before) * times - 1.0);
    let done = work();
    set(before);
    done
}

/// The number of batches that each batch represents, for rows of `lengths`. In a run of equal batches a null device
/// computes the first `window`, the last, and one for those between. Otherwise each batch counts once.
pub fn represented(batches: &[Vec<usize>], lengths: &[usize], window: usize) -> Vec<f64> {
    let mut times = vec![1.0; batches.len()];
    if !is_active() {
        return times;
    }
    let of = |rows: &Vec<usize>| rows.iter().map(|&row| lengths[row]).collect::<Vec<_>>();
    let alike = |a: &Vec<usize>, b: &Vec<usize>| of(a) == of(b);
    let mut rest = &mut times[..];
    for run in batches.chunk_by(alike) {
        let (own, behind) = rest.split_at_mut(run.len());
        if own.len() > window + 1 {
            let last = own.len() - 1;
            own[window] += (last - window - 1) as f64;
            own[window + 1..last].fill(0.0);
        }
        rest = behind;
    }
    times
}

/// Runs `work`, whose collectives run while the rank computes.
pub fn hidden<R>(work: impl FnOnce() -> R) -> R {
    with(|scope| scope.is_hidden = true);
    let done = work();
    with(|scope| scope.is_hidden = false);
    done
}

/// Runs `work` on a null device, in the phase `Load`, and returns the counts.
///
/// # Panics
/// Within itself.
pub fn run<R>(device: Null, work: impl FnOnce() -> R) -> (R, Record) {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            DEVICE.set(None);
        }
    }
    assert!(!is_active(), "a null device cannot run within another");
    SCOPE.set(Scope::default());
    DEVICE.set(Some(Null { threads: device.threads.max(1), ..device }));
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

/// Runs `work` if the device is a CPU, because host memory counts only there.
fn with_host(work: impl FnOnce(&mut Scope)) {
    if device().is_some_and(|device| device.gpu.is_none()) {
        with(work);
    }
}

/// Starts `phase`: later counts belong to it.
pub fn enter(phase: Phase) {
    with(|scope| {
        scope.write_down();
        scope.phase = phase;
        scope.note();
    });
}

/// Runs `work`, an evaluation. Its memory belongs to the phase `Eval`, and its work to `Record::evaluation`.
pub fn evaluation<R>(work: impl FnOnce() -> R) -> R {
    let set = |evaluates: bool| {
        with(|scope| {
            scope.write_down();
            scope.evaluates = evaluates;
        });
    };
    set(true);
    // Held-out rows without a rollout are scored.
    enter(Phase::Score);
    let done = work();
    set(false);
    done
}

/// Counts a tensor of the host as in use.
pub fn count_tensor(owner: &'static str, bytes: usize) {
    with_host(|scope| scope.count_tensor(owner, bytes));
}

/// Counts a tensor of the host as no longer in use.
pub fn uncount_tensor(owner: &'static str, bytes: usize) {
    with_host(|scope| scope.uncount_tensor(owner, bytes));
}

/// Counts memory of the GPU as in use.
pub fn take_on_gpu(owner: &'static str, bytes: usize) {
    with(|scope| scope.count_tensor(owner, bytes));
}

/// Counts memory of the GPU as no longer in use.
pub fn give_on_gpu(owner: &'static str, bytes: usize) {
    with(|scope| scope.uncount_tensor(owner, bytes));
}

/// Records the bytes of host memory that are pinned or in mapped files now.
pub fn hold_on_host(bytes: usize) {
    with(|scope| scope.record.host = scope.record.host.max(bytes));
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
#[must_use = "dropped memory no longer counts"]
pub struct Held {
    owner: &'static str,
    bytes: usize,
}

/// Counts `bytes` outside of the arena as `owner`'s. Counts nothing if work is real.
pub fn hold(owner: &'static str, bytes: usize) -> Held {
    if device().is_none_or(|device| device.gpu.is_some()) {
        return Held::default();
    }
    with(|scope| {
        scope.outside += bytes;
        scope.count_tensor(owner, bytes);
    });
    Held { owner, bytes }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Self { owner, bytes } = *self;
        if bytes > 0 {
            with(|scope| {
                scope.outside -= bytes;
                scope.uncount_tensor(owner, bytes);
            });
        }
    }
}

/// Counts `bytes` of scratch for each thread, which keeps the largest it ever used.
pub fn work_in(bytes: usize) {
    with_host(|scope| {
        let more = bytes.saturating_sub(scope.scratch) * device().map_or(1, |device| device.threads);
        if more > 0 {
            scope.scratch = bytes;
            scope.outside += more;
            scope.count_tensor("program", more);
        }
    });
}

impl Scope {
    fn work(&mut self, op: &'static str, over: Option<Over>, work: Work) {
        let all = if self.evaluates { &mut self.record.evaluation } else { &mut self.record.work };
        let sum = all.entry(Task { phase: self.phase, op, over }).or_default();
        let times = 1.0 + self.more_times;
        sum.flops += times * work.flops;
        sum.bytes += times * work.bytes;
        sum.calls += times * work.calls;
        sum.messages += times * work.messages;
    }

    fn count_tensor(&mut self, owner: &'static str, bytes: usize) {
        if bytes > 0 {
            *self.live.entry(owner).or_default() += bytes;
            self.in_use += bytes;
            self.note();
        }
    }

    fn uncount_tensor(&mut self, owner: &'static str, bytes: usize) {
        self.write_down();
        if let Some(live) = self.live.get_mut(owner) {
            *live -= bytes;
            if *live == 0 {
                self.live.remove(owner);
            }
        }
        self.in_use -= bytes;
    }

    /// The phase that memory belongs to.
    fn memory_phase(&self) -> Phase {
        if self.evaluates { Phase::Eval } else { self.phase }
    }

    fn note(&mut self) {
        self.record.resident = self.record.resident.max(self.outside + self.backed);
        let peak = self.record.peaks.entry(self.memory_phase()).or_default();
        if self.in_use > peak.bytes {
            peak.bytes = self.in_use;
            self.rising = true;
        }
    }

    /// Copies the parts. Called when the level falls again, and not at each step upwards.
    fn write_down(&mut self) {
        if std::mem::take(&mut self.rising) {
            self.record.peaks.entry(self.memory_phase()).or_default().parts = self.live.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_a_phase_is_recorded_by_owner() {
        let ((), record) = run(Null { threads: 2, memory_bytes: 1 << 30, gpu: None }, || {
            count_tensor("weights", 100);
            enter(Phase::Train);
            count_tensor("activations", 7);
            uncount_tensor("activations", 7);
            let files = hold("files", 20);
            back(50);
            drop(files);
            count_tensor("activations", 3);
            work_in(8);
            work_in(4);
        });
        let peaks = &record.peaks;
        assert_eq!((peaks[&Phase::Load].bytes, peaks[&Phase::Train].bytes), (100, 120));
        assert_eq!(peaks[&Phase::Train].parts, Bytes::from([("weights", 100), ("files", 20)]));
        assert_eq!(record.resident, 70);
        assert!(!is_active());
    }
}
