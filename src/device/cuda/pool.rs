//! The arena of the GPU. Memory from the driver is cut into runs, and freed runs are used again. So steady-state steps
//! ask the driver for no memory.
//!
//! The rule, which a planner can follow:
//!
//! 1. A run has whole pages of 512 bytes. *In use* is the sum of live runs, *held* is the memory from the driver.
//! 2. A request uses a part of the smallest free stretch that is large enough; free neighbors become one. Large runs
//!    begin at the start of a stretch and small ones end at its end, so that small ones do not fragment it.
//! 3. If no stretch is large enough, the driver is asked for one more, but not while the reserved memory is enough.
//! 4. If *in use* would exceed the limit, or the driver has no more memory, the request fails and names the owners.
//! 5. A run that a copy still reads (`give_in_flight`) is no longer in use. It is used again if no other stretch is
//!    large enough, the oldest one first. Its next user waits for the copy (`Gpu::allocate`).
//! 6. Memory that is freed while a graph is being captured belongs to the graph until that is dropped: the graph's
//!    kernels write there at each replay. Within the capture it is used again: the smallest run that is large enough.
//!    Graphs that never run at the same time may share it.

use crate::device::null;
use crate::error::{Error, Kind, Result};
use crate::sys::free_list::{FreeList, latest};
pub use crate::sys::memory::Usage;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// The source of runs.
pub trait Backing {
    /// The address of `bytes`, aligned to 512.
    ///
    /// # Errors
    /// `Usage` if there is not enough memory; others if the driver can no longer be called.
    fn allocate(&self, bytes: usize) -> Result<u64>;
    fn free(&self, address: u64, bytes: usize);
}

/// A run, by its address and its size.
type Run = (u64, usize);

/// The addresses of free runs.
pub type Free = FreeList<u64>;

#[derive(Debug)]
pub struct Pool {
    /// The memory from the driver, by address.
    chunks: BTreeMap<u64, usize>,
    /// Free stretches by address, and by size.
    free: BTreeMap<u64, usize>,
    by_size: Free,
    /// The sizes and owners of live runs.
    live: FxHashMap<u64, (usize, &'static str)>,
    owners: Vec<(&'static str, usize)>,
    /// Runs that were freed since the capture under way began.
    captured: Option<Free>,
    /// The number of runs that were freed within captures.
    captured_count: u64,
    /// Free runs that copies may still read.
    in_flight: VecDeque<Run>,
    /// Whether runs have exactly the requested size and are returned to the driver at once.
    exact: bool,
    /// Whether runs are only addresses: they have the usual sizes, and nothing is kept.
    is_null: bool,
    pub usage: Usage,
}

/// The size of a page. Runs are whole pages, so all of them are aligned.
const PAGE: usize = 512;
/// Runs below this are small.
const SMALL: usize = 1 << 20;
/// The smallest request to the driver.
const CHUNK: usize = 64 << 20;
/// The number of owners that an error names.
const NAMED: usize = 4;
/// The owner of runs that a graph holds.
const GRAPHS: &str = "graphs";

/// The variable that makes every run an allocation of the driver. Tools that check accesses (compute-sanitizer, the
/// emulated GPU) then see accesses past the end.
const NO_CACHING: &str = "RLHF_NO_CUDA_MEMORY_CACHING";

impl Default for Pool {
    fn default() -> Self {
        let usage = Usage::NONE;
        Self {
            chunks: BTreeMap::new(),
            free: BTreeMap::new(),
            by_size: Free::new(),
            live: FxHashMap::default(),
            owners: Vec::new(),
            captured: None,
            captured_count: 0,
            in_flight: VecDeque::new(),
            exact: std::env::var_os(NO_CACHING).is_some(),
            is_null: false,
            usage,
        }
    }
}

impl Pool {
    /// The pool of a null GPU.
    pub fn null() -> Self {
        Self { exact: true, is_null: true, ..Self::default() }
    }

    /// Allocates a run for `owner`.
    ///
    /// # Errors
    /// `Usage` if the limit or the GPU does not have enough memory.
    pub fn allocate(&mut self, bytes: usize, owner: &'static str, backing: &impl Backing) -> Result<u64> {
        let is_exact = self.exact && !self.is_null;
        let size = if is_exact { bytes.max(1) } else { bytes.max(1).next_multiple_of(PAGE) };
        if let Some((address, size)) = self.pop_captured(size) {
            self.own(address, size, owner);
            return Ok(address);
        }
        if size > self.usage.left() {
            let [asked, used, most, left] = [size, self.usage.in_use, self.usage.limit, self.usage.left()].map(mib);
            let message = format!(
                "out of GPU memory: {asked} for {owner} does not fit; this rank uses {used} ({}) of its limit of \
                 {most}, which leaves {left}",
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

    /// The bytes of an owner. Owners are few, and equal names mostly have the same address.
    fn bytes_of(&mut self, owner: &'static str) -> &mut usize {
        let at = self.owners.iter().position(|(name, _)| std::ptr::eq(*name, owner) || *name == owner);
        let at = at.unwrap_or_else(|| {
            self.owners.push((owner, 0));
            self.owners.len() - 1
        });
        &mut self.owners[at].1
    }

    /// The owners and their bytes, the largest first.
    pub fn owners(&self) -> Vec<(&'static str, usize)> {
        let mut all = self.owners.clone();
        all.retain(|(_, bytes)| *bytes > 0);
        all.sort_by_key(|(name, bytes)| (std::cmp::Reverse(*bytes), *name));
        all
    }

    fn who(&self) -> String {
        let all = self.owners();
        if all.is_empty() {
            return "nothing allocated".into();
        }
        let named: Vec<String> =
            all.iter().take(NAMED).map(|(name, bytes)| format!("{name} {}", mib(*bytes))).collect();
        named.join(", ")
    }

    /// Same as `cut`. If no stretch is large enough, runs that copies still read are freed first.
    fn cut_or_wait(&mut self, size: usize) -> Option<u64> {
        loop {
            if let Some(address) = self.cut(size) {
                return Some(address);
            }
            let run = self.in_flight.pop_front()?;
            self.join_free(run);
        }
    }

    /// A part of the smallest free stretch that is large enough.
    fn cut(&mut self, size: usize) -> Option<u64> {
        let (found, start) = self.by_size.take(size..)?;
        self.free.remove(&start);
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
        self.by_size.insert(size, address, address);
    }

    fn remove_free(&mut self, address: u64, size: usize) {
        self.free.remove(&address);
        self.by_size.remove(size, address);
    }

    /// Asks the driver for a run of `size`, and for more memory with it.
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
        if self.exact { Ok(address) } else { Ok(self.cut(size).expect("the new stretch is large enough")) }
    }

    /// Adds memory from the driver.
    fn hold(&mut self, address: u64, bytes: usize) {
        self.usage.held += bytes;
        self.usage.requests += 1;
        if !self.exact {
            self.chunks.insert(address, bytes);
            self.insert_free(address, bytes);
        }
    }

    /// The driver's error for a request of `size`, with the owners of memory.
    fn refused(&self, size: usize, owner: &str, error: Error) -> Error {
        let [asked, used] = [size, self.usage.in_use].map(mib);
        if error.kind != Kind::Usage {
            return error.within(format!("allocating {asked} of GPU memory for {owner}"));
        }
        let (who, said) = (self.who(), error.message);
        let message = format!(
            "out of GPU memory: the driver could not allocate {asked} for {owner}; this process uses {used} ({who}); \
             {said}"
        );
        Error::usage(message).hint(HINT)
    }

    /// Asks the driver for enough memory to hold `bytes`. If it does not have that much, it is asked later as memory is
    /// needed.
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
        let (size, owner) = self.live.remove(&address).expect("memory is freed once");
        self.disown(size, owner);
        if let Some(captured) = &mut self.captured {
            self.captured_count += 1;
            captured.insert(size, latest(self.captured_count), address);
            self.add(size, GRAPHS);
        } else {
            self.keep((address, size), backing);
        }
    }

    /// Frees a run that a copy may still read.
    pub fn give_in_flight(&mut self, address: u64, backing: &impl Backing) {
        if self.exact || self.captured.is_some() {
            return self.give(address, backing);
        }
        let (size, owner) = self.live.remove(&address).expect("memory is freed once");
        self.disown(size, owner);
        self.usage.in_use -= size;
        self.in_flight.push_back((address, size));
    }

    /// Makes runs that copies read ordinary free runs. The caller guarantees that later work waits for those copies.
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
        let most = if self.exact && !self.is_null { size } else { usize::MAX };
        let (size, address) = self.captured.as_mut()?.take(size..=most)?;
        self.disown(size, GRAPHS);
        Some((address, size))
    }

    /// Returns entirely free chunks to the driver until at most `most` bytes are held or no such chunk is left. Does
    /// nothing while a capture is under way, which may not wait for the GPU.
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

    /// Begins to set aside freed runs. `held` are the runs of earlier captures, which this one uses, too.
    pub fn begin_capture(&mut self, held: Free) {
        assert!(self.captured.is_none(), "one graph is captured at a time");
        self.captured = Some(held);
    }

    /// The runs that this capture and earlier ones set aside. They count as in use until `release`.
    pub fn end_capture(&mut self) -> Free {
        self.captured.take().expect("a capture is under way")
    }

    /// Frees the runs that a graph held.
    pub fn release(&mut self, mut runs: Free, backing: &impl Backing) {
        while let Some((size, address)) = runs.take(..) {
            self.disown(size, GRAPHS);
            self.keep((address, size), backing);
        }
    }
}

fn mib(bytes: usize) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

/// The ways to need less memory, for an error about the limit or a full GPU.
pub const HINT: &str = "use more sequence or tensor ranks, a higher mesh.zero, mesh.offload, gradient.recompute = \
                        \"block\" or a smaller microbatch_tokens_max; the limit is mesh.arena_bytes_max if that is \
                        set, otherwise the memory that was free on the GPU at the start: end other processes on it \
                        (nvidia-smi names them)";

#[cfg(test)]
mod tests;
