//! The arena of the GPU: memory that the driver gave once is cut into runs, and what is freed serves whatever comes next, so
//! that steady-state steps ask the driver for none.
//!
//! The rule, which a planner can follow:
//!
//! 1. A run takes whole pages of 512 bytes. *In use* is the sum over live runs, *held* what the driver gave.
//! 2. A request takes a part of the smallest free stretch that has room; neighbours that are free become one. Large runs
//!    begin at the start of a stretch and small ones end at its end, so that small ones do not split the room of large ones.
//! 3. Where no stretch has room the driver is asked for one more; nothing is asked while what was reserved is enough.
//! 4. Where in use itself would pass the limit, or the driver has no more, the request fails and says who uses what.
//! 5. What is freed while a graph is being captured belongs to the graph until that is dropped: the graph's kernels write
//!    there at each replay. Within the capture it is used again: the smallest run that is large enough. Graphs that never
//!    run beside each other may share what they hold.

use crate::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Where runs come from and go back to.
pub trait Backing {
    /// The address of `bytes`, aligned to 512; none where there are not as many.
    fn allocate(&self, bytes: usize) -> Option<u64>;
    fn free(&self, address: u64, bytes: usize);
}

/// Bytes of live runs, their peak since start, and bytes held from the driver (live and free); the limit (`usize::MAX`: none);
/// how often the driver was asked for memory of the GPU, and for pinned memory of the host, and bytes of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub in_use: usize,
    pub peak: usize,
    pub held: usize,
    pub limit: usize,
    pub requests: u64,
    pub pinned: usize,
    pub pinned_requests: u64,
}

impl Usage {
    /// Bytes that may still come into use.
    pub fn left(&self) -> usize {
        self.limit.saturating_sub(self.in_use)
    }
}

/// A run, by its address and its size.
pub type Run = (u64, usize);

#[derive(Debug)]
pub struct Pool {
    /// What the driver gave, by address.
    chunks: BTreeMap<u64, usize>,
    /// Free stretches by address, and by size.
    free: BTreeMap<u64, usize>,
    by_size: BTreeSet<(usize, u64)>,
    /// Sizes of live runs, and whose they are.
    live: HashMap<u64, (usize, &'static str)>,
    owners: BTreeMap<&'static str, usize>,
    /// Runs that were freed since the capture under way began.
    captured: Option<Vec<Run>>,
    /// Runs have the size that was asked for, and go back at once: on a played GPU, which then sees what runs over an end.
    exact: bool,
    pub usage: Usage,
}

/// Runs are whole ones of these, which keeps all of them aligned.
const PAGE: usize = 512;
/// Runs below this are small.
const SMALL: usize = 1 << 20;
/// The least that the driver is asked for.
const CHUNK: usize = 64 << 20;
/// Users that an error names.
const NAMED: usize = 4;
/// Whose runs are that a graph holds.
const GRAPHS: &str = "graphs";

impl Default for Pool {
    fn default() -> Self {
        let usage =
            Usage { in_use: 0, peak: 0, held: 0, limit: usize::MAX, requests: 0, pinned: 0, pinned_requests: 0 };
        Self {
            chunks: BTreeMap::new(),
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            live: HashMap::new(),
            owners: BTreeMap::new(),
            captured: None,
            exact: false,
            usage,
        }
    }
}

impl Pool {
    /// One that rounds no size and keeps nothing.
    pub fn exact() -> Self {
        Self { exact: true, ..Self::default() }
    }

    /// A run for `owner`.
    ///
    /// # Errors
    /// `Usage` where the limit or the GPU has no room.
    pub fn take(&mut self, bytes: usize, owner: &'static str, backing: &impl Backing) -> Result<u64> {
        let size = if self.exact { bytes.max(1) } else { bytes.max(1).next_multiple_of(PAGE) };
        if let Some((address, size)) = self.pop_captured(size) {
            self.own(address, size, owner);
            return Ok(address);
        }
        let Usage { in_use, limit, .. } = self.usage;
        if size > limit.saturating_sub(in_use) {
            let [asked, used, most, left] = [size, in_use, limit, limit.saturating_sub(in_use)].map(mib);
            let message = format!(
                "{asked} of GPU memory for {owner} do not fit: {used} are in use ({}), the limit of this rank is {most}, \
                 and {left} would fit",
                self.who()
            );
            return Err(Error::usage(message).hint(HINT));
        }
        let address = if self.exact { None } else { self.cut(size) };
        let address = match address {
            Some(address) => address,
            None => self.grow(size, owner, backing)?,
        };
        self.own(address, size, owner);
        self.usage.in_use += size;
        self.usage.peak = self.usage.peak.max(self.usage.in_use);
        Ok(address)
    }

    fn own(&mut self, address: u64, size: usize, owner: &'static str) {
        self.live.insert(address, (size, owner));
        *self.owners.entry(owner).or_default() += size;
    }

    fn disown(&mut self, size: usize, owner: &'static str) {
        if let Some(bytes) = self.owners.get_mut(owner) {
            *bytes -= size;
        }
    }

    /// Those who use most, with their bytes.
    pub fn owners(&self) -> Vec<(&'static str, usize)> {
        let mut all: Vec<_> = self.owners.iter().map(|(name, bytes)| (*name, *bytes)).collect();
        all.retain(|(_, bytes)| *bytes > 0);
        all.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        all
    }

    fn who(&self) -> String {
        let all = self.owners();
        if all.is_empty() {
            return "by nobody".into();
        }
        let named: Vec<String> =
            all.iter().take(NAMED).map(|(name, bytes)| format!("{name} {}", mib(*bytes))).collect();
        named.join(", ")
    }

    /// A part of the smallest free stretch that has room.
    fn cut(&mut self, size: usize) -> Option<u64> {
        let (found, start) = self.by_size.range((size, 0)..).next().copied()?;
        self.remove_free(start, found);
        let rest = found - size;
        if rest == 0 {
            return Some(start);
        }
        if size < SMALL {
            self.insert_free(start, rest);
            return Some(start + rest as u64);
        }
        self.insert_free(start + size as u64, rest);
        Some(start)
    }

    fn insert_free(&mut self, address: u64, size: usize) {
        self.free.insert(address, size);
        self.by_size.insert((size, address));
    }

    fn remove_free(&mut self, address: u64, size: usize) {
        self.free.remove(&address);
        self.by_size.remove(&(size, address));
    }

    /// Asks the driver for a run of `size`, and more beside it.
    fn grow(&mut self, size: usize, owner: &str, backing: &impl Backing) -> Result<u64> {
        let room = |pool: &Self| pool.usage.limit.saturating_sub(pool.usage.held);
        if !self.exact && size > room(self) {
            self.shrink(self.usage.limit.saturating_sub(size), backing);
        }
        let more = if self.exact { size } else { size.max(CHUNK.min(room(self) / PAGE * PAGE)) };
        let taken = backing.allocate(more).map(|address| (address, more)).or_else(|| {
            self.shrink(0, backing);
            backing.allocate(size).map(|address| (address, size))
        });
        let Some((address, taken)) = taken else {
            let [asked, used] = [size, self.usage.in_use].map(mib);
            let message =
                format!("the GPU has no {asked} left for {owner}: {used} are in use by this process ({})", self.who());
            return Err(Error::usage(message).hint(HINT));
        };
        self.usage.held += taken;
        self.usage.requests += 1;
        if self.exact {
            return Ok(address);
        }
        self.chunks.insert(address, taken);
        self.insert_free(address, taken);
        Ok(self.cut(size).expect("the new stretch has room"))
    }

    /// Asks the driver for so much at once that it holds `bytes`. Nothing where it has not as much: then it is asked as
    /// memory is needed.
    pub fn reserve(&mut self, bytes: usize, backing: &impl Backing) {
        let more = bytes.saturating_sub(self.usage.held) / PAGE * PAGE;
        if self.exact || more == 0 {
            return;
        }
        if let Some(address) = backing.allocate(more) {
            self.usage.held += more;
            self.usage.requests += 1;
            self.chunks.insert(address, more);
            self.insert_free(address, more);
        }
    }

    /// Bytes of a live run.
    pub fn size_of(&self, address: u64) -> usize {
        self.live[&address].0
    }

    pub fn give(&mut self, address: u64, backing: &impl Backing) {
        let (size, owner) = self.live.remove(&address).expect("memory is given back once");
        self.disown(size, owner);
        if let Some(captured) = &mut self.captured {
            captured.push((address, size));
            *self.owners.entry(GRAPHS).or_default() += size;
        } else {
            self.keep((address, size), backing);
        }
    }

    fn keep(&mut self, (address, size): Run, backing: &impl Backing) {
        self.usage.in_use -= size;
        if self.exact {
            self.usage.held -= size;
            backing.free(address, size);
            return;
        }
        let (mut start, mut len) = (address, size);
        let before = self.free.range(..address).next_back().map(|(at, size)| (*at, *size));
        if let Some((at, size)) = before
            && at + size as u64 == address
            && !self.chunks.contains_key(&address)
        {
            self.remove_free(at, size);
            (start, len) = (at, len + size);
        }
        let end = address + size as u64;
        if let Some(size) = self.free.get(&end).copied()
            && !self.chunks.contains_key(&end)
        {
            self.remove_free(end, size);
            len += size;
        }
        self.insert_free(start, len);
    }

    fn pop_captured(&mut self, size: usize) -> Option<Run> {
        let exact = self.exact;
        let captured = self.captured.as_mut()?;
        let fits = |(_, (_, other)): &(usize, &Run)| *other == size || (!exact && *other > size);
        // Of equal ones the last.
        let (at, _) = captured.iter().enumerate().rev().filter(fits).min_by_key(|(_, (_, other))| *other)?;
        let run = captured.remove(at);
        self.disown(run.1, GRAPHS);
        Some(run)
    }

    /// Gives what the driver gave back to it where all of it is free, until at most `most` bytes are held or nothing is.
    /// Nothing while a capture is under way, which may not wait for the GPU.
    pub fn shrink(&mut self, most: usize, backing: &impl Backing) {
        if self.captured.is_some() {
            return;
        }
        let whole = |(at, size): (&u64, &usize)| (self.free.get(at) == Some(size)).then_some((*at, *size));
        let idle: Vec<Run> = self.chunks.iter().filter_map(whole).collect();
        for (address, size) in idle {
            if self.usage.held <= most {
                break;
            }
            self.remove_free(address, size);
            self.chunks.remove(&address);
            backing.free(address, size);
            self.usage.held -= size;
        }
    }

    /// From now on what is freed is set aside. `held` was by captures before, and serves this one, too.
    pub fn begin_capture(&mut self, held: Vec<Run>) {
        assert!(self.captured.is_none(), "one graph is captured at a time");
        self.captured = Some(held);
    }

    /// What was set aside, now and before. It counts as in use until `release`.
    pub fn end_capture(&mut self) -> Vec<Run> {
        self.captured.take().expect("a capture was begun")
    }

    /// Takes back what a graph held.
    pub fn release(&mut self, runs: Vec<Run>, backing: &impl Backing) {
        for (address, size) in runs {
            self.disown(size, GRAPHS);
            self.keep((address, size), backing);
        }
    }
}

fn mib(bytes: usize) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

const HINT: &str = "more sequence or tensor ranks, a higher mesh.zero, mesh.offload, gradient.recompute = true or a smaller \
                    microbatch_tokens_max take less; or raise mesh.arena_bytes_max";

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;

    /// A GPU of `room` bytes that counts.
    struct Counted {
        room: Cell<usize>,
        next: Cell<u64>,
        freed: RefCell<Vec<u64>>,
    }

    impl Counted {
        fn of(room: usize) -> Self {
            Self { room: Cell::new(room), next: Cell::new(1 << 20), freed: RefCell::new(Vec::new()) }
        }
    }

    impl Backing for Counted {
        /// Neighbours, which must not become one.
        fn allocate(&self, bytes: usize) -> Option<u64> {
            self.room.set(self.room.get().checked_sub(bytes)?);
            let at = self.next.get();
            self.next.set(at + bytes as u64);
            Some(at)
        }

        fn free(&self, address: u64, bytes: usize) {
            self.room.set(self.room.get() + bytes);
            self.freed.borrow_mut().push(address);
        }
    }

    fn take(pool: &mut Pool, bytes: usize, gpu: &Counted) -> u64 {
        pool.take(bytes, "a fact", gpu).expect("there is room")
    }

    #[test]
    fn what_is_reserved_serves_every_mix_of_sizes_without_the_driver() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(1 << 30));
        pool.usage.limit = 256 * MIB;
        pool.reserve(256 * MIB, &gpu);
        let lasting = take(&mut pool, 40 * MIB, &gpu);
        for step in 0..200 {
            let sizes = (0..12).map(|i| 1 + (step * 7919 + i * i * 104_729) % (12 * MIB));
            let runs: Vec<u64> = sizes.map(|bytes| take(&mut pool, bytes, &gpu)).collect();
            let order = |i: usize| runs[(i * 5 + step) % runs.len()];
            (0..runs.len()).for_each(|i| pool.give(order(i), &gpu));
            assert_eq!((pool.usage.requests, pool.usage.in_use), (1, 40 * MIB));
        }
        pool.give(lasting, &gpu);
        assert_eq!((pool.free.len(), pool.by_size.len()), (1, 1), "all of it is one stretch again");
        assert_eq!(pool.usage.held, 256 * MIB);
    }

    #[test]
    fn runs_do_not_overlap_and_are_aligned() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(1 << 30));
        let mut live: Vec<(u64, usize)> = Vec::new();
        for i in 0..400usize {
            let bytes = 1 + i * i * 7919 % (3 * MIB);
            let at = take(&mut pool, bytes, &gpu);
            assert!(at.is_multiple_of(PAGE as u64));
            let apart = |(other, len): &(u64, usize)| at + bytes as u64 <= *other || *other + *len as u64 <= at;
            assert!(live.iter().all(apart), "{at} of {bytes} bytes overlaps");
            live.push((at, bytes));
            if i % 3 != 0 {
                let (gone, _) = live.swap_remove(i * 31 % live.len());
                pool.give(gone, &gpu);
            }
        }
        for (at, _) in live {
            pool.give(at, &gpu);
        }
        pool.shrink(0, &gpu);
        assert_eq!((pool.usage.in_use, pool.usage.held, pool.free.len(), pool.chunks.len()), (0, 0, 0, 0));
        assert_eq!(gpu.room.get(), 1 << 30, "all went back");
    }

    #[test]
    fn small_runs_leave_the_room_of_large_ones_whole() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(1 << 30));
        pool.reserve(64 * MIB, &gpu);
        let large = take(&mut pool, 20 * MIB, &gpu);
        let small = take(&mut pool, 4 * KIB, &gpu);
        pool.give(large, &gpu);
        take(&mut pool, 60 * MIB, &gpu);
        assert_eq!(pool.usage.requests, 1);
        pool.give(small, &gpu);
    }

    #[test]
    fn beyond_the_limit_a_request_is_refused_and_says_who_uses_what_and_what_would_fit() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(1 << 30));
        pool.usage.limit = 64 * MIB;
        let kept = pool.take(16 * MIB, "weights of the critic", &gpu).expect("there is room");
        pool.take(24 * MIB, "gradients", &gpu).expect("there is room");
        assert_eq!(pool.usage.held, 64 * MIB, "no more than the limit is asked for");
        let error = pool.take(25 * MIB, "kv cache", &gpu).expect_err("the limit");
        let said = "25.00 MiB of GPU memory for kv cache do not fit: 40.00 MiB are in use (gradients 24.00 MiB, weights of the \
                    critic 16.00 MiB), the limit of this rank is 64.00 MiB, and 24.00 MiB would fit";
        assert_eq!((error.exit_code(), error.message.as_str()), (2, said));
        pool.give(kept, &gpu);
        pool.take(16 * MIB, "kv cache", &gpu).expect("room that came back");
        assert_eq!(pool.owners(), [("gradients", 24 * MIB), ("kv cache", 16 * MIB)]);
    }

    #[test]
    fn a_gpu_that_is_full_gets_free_memory_back_before_it_is_asked_again() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(100 * MIB));
        let a = take(&mut pool, 64 * MIB, &gpu);
        pool.give(a, &gpu);
        let b = take(&mut pool, 80 * MIB, &gpu);
        assert_eq!((pool.usage.held, gpu.freed.borrow().len()), (80 * MIB, 1));
        let why = pool.take(64 * MIB, "a fact", &gpu).expect_err("full").message;
        assert!(why.contains("no 64.00 MiB left for a fact: 80.00 MiB are in use"), "{why}");
        pool.give(b, &gpu);
    }

    #[test]
    fn what_a_capture_freed_serves_the_capture_and_nobody_else_while_the_graph_lives() {
        let (mut pool, gpu) = (Pool::default(), Counted::of(1 << 30));
        let before = take(&mut pool, 4096, &gpu);
        pool.begin_capture(Vec::new());
        let first = take(&mut pool, 4096, &gpu);
        pool.give(first, &gpu);
        assert_eq!(take(&mut pool, 4096, &gpu), first, "the same run again");
        pool.give(first, &gpu);
        let runs = pool.end_capture();
        assert_eq!(runs, [(first, 4096)]);
        pool.begin_capture(runs);
        assert_eq!(take(&mut pool, 1000, &gpu), first, "what the first graph holds");
        pool.give(first, &gpu);
        let runs = pool.end_capture();
        assert_eq!(runs, [(first, 4096)]);
        pool.give(before, &gpu);
        let [a, b] = [(); 2].map(|()| take(&mut pool, 4096, &gpu));
        assert!(a != first && b != first, "a run of the graph went to somebody else");
        assert_eq!((pool.usage.in_use, pool.owners()), (3 * 4096, vec![("a fact", 8192), (GRAPHS, 4096)]));
        pool.release(runs, &gpu);
        assert_eq!(pool.usage.in_use, 2 * 4096);
    }

    #[test]
    fn a_played_gpus_runs_are_as_long_as_they_were_asked_for_and_go_back_at_once() {
        let (mut pool, gpu) = (Pool::exact(), Counted::of(1 << 20));
        let run = take(&mut pool, 1000, &gpu);
        assert_eq!((pool.usage.in_use, pool.usage.held), (1000, 1000));
        pool.give(run, &gpu);
        assert_eq!((pool.usage.held, gpu.room.get(), pool.usage.requests), (0, 1 << 20, 1));
    }
}
