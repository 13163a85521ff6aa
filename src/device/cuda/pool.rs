//! Memory of the GPU that is kept when it is freed and used again, so that steady-state steps ask the driver for none.
//!
//! The rule, which a planner can follow:
//!
//! 1. A run takes its [`size_class`]. *In use* is the sum over live runs, *held* adds the kept ones.
//! 2. A request is served by a kept run of its class. Where there is none and held would pass the limit, a kept run of at
//!    most 5/4 of the class serves; else kept runs go back to the driver, the longest unused first, until a new one fits.
//! 3. Where in use itself would pass the limit, or the driver has no more, the request fails.
//! 4. What is freed while a graph is being captured belongs to the graph until that is dropped: the graph's kernels write
//!    there at each replay. Within the capture it is used again.

use crate::error::{Error, Result};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Where runs come from and go back to.
pub trait Backing {
    /// The address of `bytes`, aligned to 256; none where there are not as many.
    fn allocate(&self, bytes: usize) -> Option<u64>;
    fn free(&self, address: u64, bytes: usize);
}

/// Bytes of live runs, their peak since start, and bytes held from the driver (live and kept); the limit (`usize::MAX`: none);
/// and how often the driver was asked for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub in_use: usize,
    pub peak: usize,
    pub held: usize,
    pub limit: usize,
    pub requests: u64,
}

/// A run, by its address and its size.
pub type Run = (u64, usize);

#[derive(Debug)]
pub struct Pool {
    /// Kept runs by size, in each the longest unused first; with the time since when.
    kept: BTreeMap<usize, VecDeque<(u64, u64)>>,
    /// Sizes of live runs.
    live: HashMap<u64, usize>,
    /// Runs that were freed since the capture under way began.
    captured: Option<Vec<Run>>,
    time: u64,
    /// Runs have the size that was asked for, and go back at once: on a played GPU, which then sees what runs over an end.
    exact: bool,
    pub usage: Usage,
}

/// The smallest run, which keeps all runs aligned.
const SMALLEST: usize = 512;

/// What a run of `bytes` takes: steps of 1/32 of the next power of two (at most 6.25 % more), so that runs of similar size
/// can take each other's place.
pub fn size_class(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 32).max(SMALLEST);
    bytes.max(1).next_multiple_of(step)
}

impl Default for Pool {
    fn default() -> Self {
        let usage = Usage { in_use: 0, peak: 0, held: 0, limit: usize::MAX, requests: 0 };
        Self { kept: BTreeMap::new(), live: HashMap::new(), captured: None, time: 0, exact: false, usage }
    }
}

impl Pool {
    /// One that rounds no size and keeps nothing.
    pub fn exact() -> Self {
        Self { exact: true, ..Self::default() }
    }

    /// # Errors
    /// `Usage` where the limit or the GPU has no room.
    pub fn take(&mut self, bytes: usize, backing: &impl Backing) -> Result<u64> {
        let class = if self.exact { bytes.max(1) } else { size_class(bytes) };
        if let Some((address, size)) = self.pop_captured(class) {
            self.live.insert(address, size);
            return Ok(address);
        }
        let (address, size) = match self.pop(class) {
            Some(address) => (address, class),
            None => self.find(class, backing)?,
        };
        self.live.insert(address, size);
        self.usage.in_use += size;
        self.usage.peak = self.usage.peak.max(self.usage.in_use);
        Ok(address)
    }

    /// A run for a class of which none is kept.
    fn find(&mut self, class: usize, backing: &impl Backing) -> Result<Run> {
        let Usage { in_use, held, limit, .. } = self.usage;
        let [asked, used, most] = [class, in_use, limit].map(mib);
        if class > limit.saturating_sub(in_use) {
            return Err(Error::usage(format!(
                "{asked} of GPU memory do not fit: {used} are in use, and the plan allows {most} a GPU"
            ))
            .hint(HINT));
        }
        if held + class > limit {
            if let Some(size) = self.kept.range(class..=class + class / 4).next().map(|(size, _)| *size) {
                return Ok((self.pop(size).expect("a size that is listed has a run"), size));
            }
            self.shrink(limit - class, backing);
        }
        let address = backing.allocate(class).or_else(|| {
            self.shrink(0, backing);
            backing.allocate(class)
        });
        let address = address.ok_or_else(|| {
            Error::usage(format!("the GPU has no {asked} left: {used} are in use by this process")).hint(HINT)
        })?;
        self.usage.held += class;
        self.usage.requests += 1;
        Ok((address, class))
    }

    pub fn give(&mut self, address: u64, backing: &impl Backing) {
        let size = self.live.remove(&address).expect("memory is given back once");
        match &mut self.captured {
            Some(captured) => captured.push((address, size)),
            None => self.keep((address, size), backing),
        }
    }

    fn keep(&mut self, (address, size): Run, backing: &impl Backing) {
        self.usage.in_use -= size;
        if self.exact {
            self.usage.held -= size;
            backing.free(address, size);
            return;
        }
        self.time += 1;
        self.kept.entry(size).or_default().push_back((self.time, address));
    }

    /// A kept run of exactly `size`, the one used last.
    fn pop(&mut self, size: usize) -> Option<u64> {
        let list = self.kept.get_mut(&size)?;
        let run = list.pop_back();
        if list.is_empty() {
            self.kept.remove(&size);
        }
        run.map(|(_, address)| address)
    }

    fn pop_captured(&mut self, class: usize) -> Option<Run> {
        let captured = self.captured.as_mut()?;
        let at = captured.iter().rposition(|(_, size)| *size == class)?;
        Some(captured.remove(at))
    }

    /// Gives kept runs back to the driver, the longest unused first, until at most `most` bytes are held or none is kept.
    /// Nothing while a capture is under way, which may not wait for the GPU.
    pub fn shrink(&mut self, most: usize, backing: &impl Backing) {
        while self.captured.is_none() && self.usage.held > most {
            let oldest = self.kept.iter().filter_map(|(size, list)| Some((list.front()?.0, *size))).min();
            let Some((_, size)) = oldest else { break };
            let run = self.kept.get_mut(&size).and_then(VecDeque::pop_front);
            self.kept.retain(|_, list| !list.is_empty());
            if let Some((_, address)) = run {
                backing.free(address, size);
                self.usage.held -= size;
            }
        }
    }

    /// From now on what is freed is set aside.
    pub fn begin_capture(&mut self) {
        assert!(self.captured.is_none(), "one graph is captured at a time");
        self.captured = Some(Vec::new());
    }

    /// What was set aside. It counts as in use until `release`.
    pub fn end_capture(&mut self) -> Vec<Run> {
        self.captured.take().expect("a capture was begun")
    }

    /// Takes back what a graph held.
    pub fn release(&mut self, runs: Vec<Run>, backing: &impl Backing) {
        for run in runs {
            self.keep(run, backing);
        }
    }
}

fn mib(bytes: usize) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

const HINT: &str = "more sequence or tensor ranks, a higher mesh.zero, mesh.offload, gradient.recompute = true or a smaller \
                    microbatch_tokens_max take less";

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    /// A GPU of `room` bytes that counts.
    struct Counted {
        room: Cell<usize>,
        next: Cell<u64>,
        freed: RefCell<Vec<u64>>,
    }

    impl Counted {
        fn of(room: usize) -> Self {
            Self { room: Cell::new(room), next: Cell::new(0), freed: RefCell::new(Vec::new()) }
        }
    }

    impl Backing for Counted {
        fn allocate(&self, bytes: usize) -> Option<u64> {
            self.room.set(self.room.get().checked_sub(bytes)?);
            self.next.set(self.next.get() + 1);
            Some(self.next.get())
        }

        fn free(&self, address: u64, bytes: usize) {
            self.room.set(self.room.get() + bytes);
            self.freed.borrow_mut().push(address);
        }
    }

    #[test]
    fn a_class_is_at_most_a_sixteenth_more_beyond_the_smallest() {
        for bytes in [0, 1, 512, 513, 4096, 5000, 100_000, (1 << 20) + 1, 123_456_789] {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(SMALLEST), "{bytes}: {class}");
            assert!(class <= bytes.max(1) + (bytes / 16).max(SMALLEST), "{bytes}: {class}");
        }
    }

    #[test]
    fn steps_that_repeat_ask_the_driver_once() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(1 << 20));
        for step in 0..5 {
            let runs = [1000, 3000, 1000, 100_000].map(|bytes| pool.take(bytes + step, &gpu).expect("there is room"));
            assert_eq!(pool.usage.requests, 4);
            for run in runs {
                pool.give(run, &gpu);
            }
        }
        assert_eq!((pool.usage.in_use, gpu.freed.borrow().len()), (0, 0));
        assert!(pool.usage.held == pool.usage.peak && pool.usage.peak > 105_000);
    }

    #[test]
    fn at_the_limit_what_was_unused_longest_goes_back_and_a_larger_run_serves() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(1 << 20));
        pool.usage.limit = 64 << 10;
        let [a, b] = [16 << 10, 32 << 10].map(|bytes| pool.take(bytes, &gpu).expect("there is room"));
        pool.give(a, &gpu);
        pool.give(b, &gpu);
        // 28 KiB fit into the run of 32 KiB; 24 KiB then need the other one's room.
        assert_eq!(pool.take(28 << 10, &gpu).expect("the larger run"), b);
        pool.take(24 << 10, &gpu).expect("room that was kept");
        assert_eq!(*gpu.freed.borrow(), [a]);
        let why = pool.take(16 << 10, &gpu).expect_err("the limit").message;
        assert!(why.contains("0.02 MiB") && why.contains("0.05 MiB are in use"), "{why}");
    }

    #[test]
    fn a_gpu_that_is_full_gets_kept_runs_back_before_it_is_asked_again() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(100 << 10));
        let a = pool.take(64 << 10, &gpu).expect("there is room");
        pool.give(a, &gpu);
        let b = pool.take(80 << 10, &gpu).expect("the kept run goes back first");
        assert_eq!((pool.usage.held, gpu.freed.borrow().len()), (80 << 10, 1));
        assert!(pool.take(64 << 10, &gpu).expect_err("full").message.contains("no 0.06 MiB left"));
        pool.give(b, &gpu);
    }

    #[test]
    fn what_a_capture_freed_serves_the_capture_and_nobody_else_while_the_graph_lives() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(1 << 20));
        let before = pool.take(4096, &gpu).expect("room");
        pool.begin_capture();
        let first = pool.take(4096, &gpu).expect("room");
        pool.give(first, &gpu);
        assert_eq!(pool.take(4096, &gpu).expect("the same run again"), first);
        pool.give(first, &gpu);
        let runs = pool.end_capture();
        assert_eq!(runs, [(first, 4096)]);
        pool.give(before, &gpu);
        let [a, b] = [(); 2].map(|()| pool.take(4096, &gpu).expect("room"));
        assert!(a != first && b != first, "a run of the graph went to somebody else");
        assert_eq!(pool.usage.in_use, 3 * 4096);
        pool.release(runs, &gpu);
        assert_eq!(pool.take(4096, &gpu).expect("room"), first);
    }
}
