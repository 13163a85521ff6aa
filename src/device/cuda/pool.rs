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
//! 5. A run that a copy still reads (`give_in_flight`) is no longer in use, and is taken again when no other stretch has room, the
//!    one that was given first before others. Who takes it works behind the copy (`Gpu::allocate`).
//! 6. What is freed while a graph is being captured belongs to the graph until that is dropped: the graph's kernels write
//!    there at each replay. Within the capture it is used again: the smallest run that is large enough. Graphs that never
//!    run beside each other may share what they hold.

use crate::device::null;
use crate::error::{Error, Kind, Result};
pub use crate::sys::memory::Usage;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Where runs come from and go back to.
pub trait Backing {
    /// The address of `bytes`, aligned to 512.
    ///
    /// # Errors
    /// `Usage` where there are not as many; others where nothing can be asked any more.
    fn allocate(&self, bytes: usize) -> Result<u64>;
    fn free(&self, address: u64, bytes: usize);
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
    live: FxHashMap<u64, (usize, &'static str)>,
    owners: Vec<(&'static str, usize)>,
    /// Runs that were freed since the capture under way began.
    captured: Option<Vec<Run>>,
    /// Free runs that copies may still read.
    in_flight: VecDeque<Run>,
    /// Runs have the size that was asked for, and go back at once.
    exact: bool,
    /// They have addresses alone: sizes are as ever, and nothing is kept.
    is_null: bool,
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

/// Set: every run is an allocation of the driver's own, so that tools which check accesses (compute-sanitizer, the emulated GPU)
/// see what runs over an end.
const NO_CACHING: &str = "RLHF_NO_CUDA_MEMORY_CACHING";

impl Default for Pool {
    fn default() -> Self {
        let usage = Usage::NONE;
        Self {
            chunks: BTreeMap::new(),
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            live: FxHashMap::default(),
            owners: Vec::new(),
            captured: None,
            in_flight: VecDeque::new(),
            exact: std::env::var_os(NO_CACHING).is_some(),
            is_null: false,
            usage,
        }
    }
}

impl Pool {
    /// One of a null GPU.
    pub fn null() -> Self {
        Self { exact: true, is_null: true, ..Self::default() }
    }

    /// A run for `owner`.
    ///
    /// # Errors
    /// `Usage` where the limit or the GPU has no room.
    pub fn take(&mut self, bytes: usize, owner: &'static str, backing: &impl Backing) -> Result<u64> {
        let is_exact = self.exact && !self.is_null;
        let size = if is_exact { bytes.max(1) } else { bytes.max(1).next_multiple_of(PAGE) };
        if let Some((address, size)) = self.pop_captured(size) {
            self.own(address, size, owner);
            return Ok(address);
        }
        if size > self.usage.left() {
            let [asked, used, most, left] = [size, self.usage.in_use, self.usage.limit, self.usage.left()].map(mib);
            let message = format!(
                "{asked} of GPU memory for {owner} do not fit: {used} are in use ({}), the limit of this rank is {most}, \
                 and {left} would fit",
                self.who()
            );
            return Err(Error::usage(message).hint(HINT));
        }
        let address = if self.exact { None } else { self.cut_or_wait(size) };
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
        self.add(size, owner);
    }

    fn add(&mut self, size: usize, owner: &'static str) {
        *self.bytes_of(owner) += size;
        null::take_on_gpu(owner, size);
    }

    fn disown(&mut self, size: usize, owner: &'static str) {
        *self.bytes_of(owner) -= size;
        null::give_on_gpu(owner, size);
    }

    /// Of few owners, whose names mostly are the very same text.
    fn bytes_of(&mut self, owner: &'static str) -> &mut usize {
        let at = self.owners.iter().position(|(name, _)| std::ptr::eq(*name, owner) || *name == owner);
        let at = at.unwrap_or_else(|| {
            self.owners.push((owner, 0));
            self.owners.len() - 1
        });
        &mut self.owners[at].1
    }

    /// Those who use most, with their bytes.
    pub fn owners(&self) -> Vec<(&'static str, usize)> {
        let mut all = self.owners.clone();
        all.retain(|(_, bytes)| *bytes > 0);
        all.sort_by_key(|(name, bytes)| (std::cmp::Reverse(*bytes), *name));
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

    /// As `cut`; where there is no room, of what is leaving.
    fn cut_or_wait(&mut self, size: usize) -> Option<u64> {
        loop {
            if let Some(address) = self.cut(size) {
                return Some(address);
            }
            let run = self.in_flight.pop_front()?;
            self.join_free(run);
        }
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
        let taken = backing.allocate(more).map(|address| (address, more)).or_else(|_| {
            self.shrink(0, backing);
            backing.allocate(size).map(|address| (address, size))
        });
        let (address, taken) = taken.map_err(|error| self.refused(size, owner, error))?;
        self.hold(address, taken);
        if self.exact { Ok(address) } else { Ok(self.cut(size).expect("the new stretch has room")) }
    }

    /// Notes what the driver gave.
    fn hold(&mut self, address: u64, bytes: usize) {
        self.usage.held += bytes;
        self.usage.requests += 1;
        if !self.exact {
            self.chunks.insert(address, bytes);
            self.insert_free(address, bytes);
        }
    }

    /// What the driver said when it was asked for `size`, with who uses what.
    fn refused(&self, size: usize, owner: &str, error: Error) -> Error {
        let [asked, used] = [size, self.usage.in_use].map(mib);
        if error.kind != Kind::Usage {
            return error.within(format!("{asked} of GPU memory for {owner}"));
        }
        let (who, said) = (self.who(), error.message);
        let message =
            format!("the GPU has no {asked} left for {owner}: {used} are in use by this process ({who}); {said}");
        Error::usage(message).hint(HINT)
    }

    /// Asks the driver for so much at once that it holds `bytes`. Nothing where it has not as much: then it is asked as
    /// memory is needed.
    pub fn reserve(&mut self, bytes: usize, backing: &impl Backing) {
        let more = bytes.saturating_sub(self.usage.held) / PAGE * PAGE;
        if self.exact || more == 0 {
            return;
        }
        if let Ok(address) = backing.allocate(more) {
            self.hold(address, more);
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
            self.add(size, GRAPHS);
        } else {
            self.keep((address, size), backing);
        }
    }

    /// Takes a run back that a copy may still read.
    pub fn give_in_flight(&mut self, address: u64, backing: &impl Backing) {
        if self.exact || self.captured.is_some() {
            return self.give(address, backing);
        }
        let (size, owner) = self.live.remove(&address).expect("memory is given back once");
        self.disown(size, owner);
        self.usage.in_use -= size;
        self.in_flight.push_back((address, size));
    }

    /// From now on what is leaving is free as all else is: whoever calls this has seen to it that all work comes behind.
    pub fn settle(&mut self) {
        while let Some(run) = self.in_flight.pop_front() {
            self.join_free(run);
        }
    }

    fn keep(&mut self, (address, size): Run, backing: &impl Backing) {
        self.usage.in_use -= size;
        if self.exact {
            self.usage.held -= size;
            backing.free(address, size);
            return;
        }
        self.join_free((address, size));
    }

    fn join_free(&mut self, (address, size): Run) {
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
        let exact = self.exact && !self.is_null;
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
        // The driver waits for copies before it frees.
        self.settle();
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

/// What helps where the limit, or the GPU, has no room.
pub const HINT: &str = "more sequence or tensor ranks, a higher mesh.zero, mesh.offload, gradient.recompute = \"block\" or a smaller \
                        microbatch_tokens_max take less; the limit is mesh.arena_bytes_max where that is set, else what was free \
                        of the GPU at the start: other processes on it (nvidia-smi names them) leave less";

#[cfg(test)]
mod tests;
