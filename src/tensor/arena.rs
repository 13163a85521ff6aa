//! Memory for tensors: 64-byte aligned buffers that are kept when dropped and used again, so that steady-state steps
//! neither ask the system for memory nor fault pages in.
//!
//! The rule, which a planner can follow:
//!
//! 1. A buffer takes its [`size_class`]. *In use* is the sum over live buffers, *held* adds the kept ones, *peak* is the
//!    most that was in use.
//! 2. A request is served by a kept buffer of its class. Where there is none and held would pass
//!    [`bound`] = min(peak + peak / 64 + 8 MiB, limit), a kept buffer of at most 5/4 of the class lends its first part;
//!    else kept buffers go back to the system, the longest unused first, until a new one fits.
//! 3. So held never passes the bound, and resident memory follows held: the system backs a page when it is first
//!    written, and the padding of a class is never written.
//! 4. Where in use itself would pass the limit, the job ends with an error.

use crate::device::cpu::copy;
use crate::error::{Error, Result};
use crate::sys::files::size_words;
use crate::sys::pages::{Pages, page_size};
use std::collections::{BTreeMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Bytes of live buffers, their peak since start, and bytes held from the system (live and kept); bytes of mapped
/// buffers that are evicted, which count in none of the others; the limit (`usize::MAX`: none); and how often the system was
/// asked for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub in_use: usize,
    pub peak: usize,
    pub held: usize,
    pub evicted: usize,
    pub limit: usize,
    pub requests: u64,
}

impl Usage {
    /// Bytes that may still come into use.
    pub fn left(&self) -> usize {
        self.limit.saturating_sub(self.in_use)
    }
}

/// Values that move to a file before their pages leave memory.
const MOVED_AT_ONCE: usize = 16 << 20;

/// What helps where the limit is too low.
pub const HINT: &str = "more sequence or tensor ranks, a higher mesh.zero, mesh.offload, gradient.recompute = true or a \
                        smaller microbatch_tokens_max take less; or raise mesh.arena_bytes_max";

struct Arena {
    /// Kept runs by size, in each the longest unused first; with the time since when.
    kept: BTreeMap<usize, VecDeque<(u64, Pages)>>,
    /// What live buffers leave of the run that lends to them, by the buffer's address.
    tails: BTreeMap<usize, Pages>,
    time: u64,
    usage: Usage,
}

static ARENA: Mutex<Arena> = Mutex::new(Arena::new());

fn with_arena<R>(f: impl FnOnce(&mut Arena) -> R) -> R {
    f(&mut ARENA.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
}

pub fn usage() -> Usage {
    with_arena(|a| a.usage)
}

/// Gives every kept buffer back to the system.
pub fn trim() {
    with_arena(|a| a.shrink(0));
}

/// From now on tensors take at most `bytes`, 0: what they like. What is in use beyond that stays.
pub fn set_limit(bytes: u64) {
    with_arena(|a| {
        a.usage.limit = if bytes == 0 { usize::MAX } else { usize::try_from(bytes).unwrap_or(usize::MAX) };
        a.shrink(a.usage.limit);
    });
}

/// The most that is held where `peak` bytes were in use at once.
pub fn bound(peak: usize, limit: usize) -> usize {
    (peak + peak / 64 + (8 << 20)).min(limit)
}

/// What a buffer of `bytes` takes: whole pages, and steps of 1/32 of the next power of two (at most 6.25 % more), so
/// that buffers of similar size can take each other's place.
pub fn size_class(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 32).max(page_size());
    bytes.max(1).next_multiple_of(step)
}

impl Arena {
    const fn new() -> Self {
        let usage = Usage { in_use: 0, peak: 0, held: 0, evicted: 0, limit: usize::MAX, requests: 0 };
        Self { kept: BTreeMap::new(), tails: BTreeMap::new(), time: 0, usage }
    }

    /// Counts `bytes` as in use.
    fn charge(&mut self, bytes: usize) -> Result<()> {
        let u = &mut self.usage;
        if bytes > u.limit.saturating_sub(u.in_use) {
            let [asked, used, limit] = [bytes, u.in_use, u.limit].map(|b| size_words(b as u64));
            let message = format!(
                "a tensor of {asked} does not fit: {used} are in use, and mesh.arena_bytes_max allows {limit} a rank"
            );
            return Err(Error::usage(message).hint(HINT));
        }
        u.in_use += bytes;
        u.peak = u.peak.max(u.in_use);
        Ok(())
    }

    fn take(&mut self, bytes: usize) -> Result<Pages> {
        self.charge(bytes)?;
        if let Some(pages) = self.pop(bytes) {
            return Ok(pages);
        }
        let most = bound(self.usage.peak, self.usage.limit);
        if self.usage.held + bytes > most {
            if let Some(pages) = self.lend(bytes) {
                return Ok(pages);
            }
            self.shrink(most.saturating_sub(bytes));
        }
        let pages = Pages::anonymous(bytes).or_else(|| {
            self.shrink(0);
            Pages::anonymous(bytes)
        });
        let Some(pages) = pages else {
            self.usage.in_use -= bytes;
            let [asked, used] = [bytes, self.usage.in_use].map(|b| size_words(b as u64));
            return Err(Error::fault(format!("the system has no {asked} for a tensor; {used} are in use"))
                .hint("start fewer ranks a host, or look at the limits of the job (ulimit -v, the cgroup)"));
        };
        self.usage.held += bytes;
        self.usage.requests += 1;
        Ok(pages)
    }

    fn give(&mut self, mut pages: Pages) {
        self.usage.in_use -= pages.bytes();
        if let Some(tail) = self.tails.remove(&address(&pages)) {
            pages = pages.join(tail);
        }
        self.time += 1;
        self.kept.entry(pages.bytes()).or_default().push_back((self.time, pages));
    }

    /// A kept run of exactly `bytes`, the one used last.
    fn pop(&mut self, bytes: usize) -> Option<Pages> {
        self.kept.get_mut(&bytes)?.pop_back().map(|(_, pages)| pages)
    }

    /// The first part of a kept run that is not much larger.
    fn lend(&mut self, bytes: usize) -> Option<Pages> {
        let larger = self.kept.range(bytes + 1..=bytes + bytes / 4).find(|(_, list)| !list.is_empty());
        let size = larger.map(|(size, _)| *size)?;
        let (head, tail) = self.pop(size)?.split(bytes);
        self.tails.insert(address(&head), tail);
        Some(head)
    }

    /// Gives kept runs back, the longest unused first, and then what lent runs have left, until at most `most` bytes
    /// are held or there is no more to give.
    fn shrink(&mut self, most: usize) {
        while self.usage.held > most {
            let oldest = self.kept.iter().filter_map(|(size, list)| Some((list.front()?.0, *size))).min();
            let pages = match oldest {
                Some((_, size)) => self.kept.get_mut(&size).and_then(VecDeque::pop_front).map(|(_, pages)| pages),
                None => self.tails.keys().next().copied().and_then(|at| self.tails.remove(&at)),
            };
            let Some(pages) = pages else { break };
            self.usage.held -= pages.bytes();
        }
        self.kept.retain(|_, list| !list.is_empty());
    }

    /// A mapped buffer leaves memory.
    fn evict(&mut self, bytes: usize) {
        self.usage.in_use -= bytes;
        self.usage.held -= bytes;
        self.usage.evicted += bytes;
    }

    /// A mapped buffer comes back into memory.
    fn bring(&mut self, bytes: usize) -> Result<()> {
        self.charge(bytes)?;
        self.shrink(bound(self.usage.peak, self.usage.limit).saturating_sub(bytes));
        self.usage.held += bytes;
        self.usage.evicted -= bytes;
        Ok(())
    }
}

fn address(pages: &Pages) -> usize {
    pages.start().as_ptr() as usize
}

/// Seconds that this process has spent moving mapped buffers out of memory and back, since it started.
pub fn moving_s() -> f64 {
    MOVING_NS.load(Ordering::Relaxed) as f64 * 1e-9
}

static MOVING_NS: AtomicU64 = AtomicU64::new(0);

fn count_moving(since: Instant) {
    MOVING_NS.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
}

/// Ends the job with what the arena says: no layer can do without its memory, so none could go on.
fn must<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| std::panic::panic_any(error))
}

/// An owned, 64-byte aligned run of f32; 2 MiB aligned and huge-page advised from 2 MiB up.
///
/// Where there is no memory for one, the thread panics with an [`Error`] as payload, and `comm::abort` ends the job
/// with it.
pub struct Buffer {
    /// Only a buffer that is being dropped has none.
    pages: Option<Pages>,
    start: NonNull<f32>,
    len: usize,
    home: Home,
}

// SAFETY: a Buffer owns its memory exclusively, as a Box<[f32]> does.
unsafe impl Send for Buffer {}
// SAFETY: shared access is read-only, as for a Box<[f32]>.
unsafe impl Sync for Buffer {}

/// Where a buffer's pages are at home.
#[derive(Debug)]
enum Home {
    Memory,
    File { evicted: AtomicBool },
}

impl Buffer {
    fn over(pages: Pages, len: usize, home: Home) -> Self {
        Self { start: pages.start().cast(), pages: Some(pages), len, home }
    }

    /// A buffer whose contents are unspecified (whatever its last user left). In debug builds it is filled with NaN.
    pub fn scratch(len: usize) -> Self {
        let bytes = size_class(len * size_of::<f32>());
        let pages = must(with_arena(|a| a.take(bytes)));
        let mut buffer = Self::over(pages, len, Home::Memory);
        if cfg!(debug_assertions) {
            buffer.fill(f32::NAN);
        }
        buffer
    }

    pub fn zeros(len: usize) -> Self {
        let mut buffer = Self::scratch(len);
        copy::fill(&mut buffer, 0.0);
        buffer
    }

    /// Moves the contents into a file of `dir` (without a name, gone with the buffer) that is mapped into memory: a mapped
    /// buffer, used as any other. It is evicted at first; `prefetch` brings it back.
    ///
    /// # Errors
    /// `Io` where the disk cannot hold it; then the buffer is as before.
    pub fn move_to_file(&mut self, dir: &Path) -> Result<()> {
        if matches!(self.home, Home::File { .. }) {
            return Ok(());
        }
        let start = Instant::now();
        let bytes = (self.len * size_of::<f32>()).max(1).next_multiple_of(page_size());
        let pages = Pages::of_file(bytes, dir)?;
        with_arena(|a| a.usage.evicted += bytes);
        let mut twin = Self::over(pages, self.len, Home::File { evicted: AtomicBool::new(true) });
        for at in (0..self.len).step_by(MOVED_AT_ONCE) {
            let part = at..self.len.min(at + MOVED_AT_ONCE);
            copy::copy(&self[part.clone()], &mut twin[part]);
            twin.pages().evict();
        }
        *self = twin;
        count_moving(start);
        Ok(())
    }

    /// Takes a mapped buffer out of memory; its contents stay, and any use brings the pages that it touches back. No
    /// effect on other buffers.
    pub fn evict(&self) {
        let Home::File { evicted } = &self.home else { return };
        let start = Instant::now();
        // One that is out already may have been touched since.
        self.pages().evict();
        if !evicted.swap(true, Ordering::SeqCst) {
            with_arena(|a| a.evict(self.pages().bytes()));
        }
        count_moving(start);
    }

    /// Brings an evicted buffer back to be read, and counts it as in use again.
    pub fn prefetch(&self) {
        self.bring_back(false);
    }

    /// As `prefetch`, to be written.
    pub fn prefetch_mut(&mut self) {
        self.bring_back(true);
    }

    fn bring_back(&self, written: bool) {
        let Home::File { evicted } = &self.home else { return };
        let start = Instant::now();
        if evicted.swap(false, Ordering::SeqCst) {
            must(with_arena(|a| a.bring(self.pages().bytes())));
        }
        self.pages().prefetch(written);
        count_moving(start);
    }

    pub fn is_mapped(&self) -> bool {
        matches!(self.home, Home::File { .. })
    }

    /// Bytes of it that are in this process's memory, as the system tells.
    pub fn resident_bytes(&self) -> usize {
        self.pages().resident_bytes()
    }

    fn pages(&self) -> &Pages {
        self.pages.as_ref().expect("only a dropped buffer has no pages")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(pages) = self.pages.take() else { return };
        with_arena(|a| match &mut self.home {
            Home::Memory => a.give(pages),
            Home::File { evicted } => {
                if !*evicted.get_mut() {
                    a.evict(pages.bytes());
                }
                a.usage.evicted -= pages.bytes();
            }
        });
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: the pages hold at least len floats, are initialised (zero at first), and are owned by self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in deref, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let mut twin = Self::scratch(self.len);
        copy::copy(self, &mut twin);
        twin
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} f32)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn arena(limit: usize) -> Arena {
        let mut arena = Arena::new();
        arena.usage.limit = limit;
        arena
    }

    fn take(arena: &mut Arena, bytes: usize) -> Pages {
        arena.take(bytes).expect("within the limit")
    }

    #[test]
    fn a_dropped_buffer_is_used_again_for_a_request_of_similar_size() {
        let mut arena = arena(usize::MAX);
        let first = take(&mut arena, size_class(4_000_012));
        let at = address(&first);
        arena.give(first);
        let second = take(&mut arena, size_class(4_000_004));
        assert_eq!((address(&second), at % 64), (at, 0));
    }

    #[test]
    fn a_class_is_at_least_what_was_asked_and_at_most_a_sixteenth_or_a_page_more() {
        for bytes in (0..100).map(|i| i * 37_987).chain([1, 4095, 4096, 4097, MIB, MIB + 1, 1 << 30, (1 << 30) + 1]) {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(page_size()), "{bytes}: {class}");
            assert!(class - bytes <= (bytes / 16).max(page_size()), "{bytes}: {class}");
            assert_eq!(size_class(class), class);
        }
    }

    #[test]
    fn held_never_passes_the_bound_whatever_sizes_follow_each_other() {
        let mut arena = arena(usize::MAX);
        let mut live = VecDeque::new();
        for i in 0..2000 {
            let pages = take(&mut arena, size_class(1 + i * 7919 % 61 * MIB / 3));
            live.push_back(pages);
            while live.len() > 1 + i / 100 % 7 {
                let first = live.pop_front().expect("it is longer");
                arena.give(first);
            }
            let Usage { in_use, peak, held, .. } = arena.usage;
            assert!(in_use <= held && held <= bound(peak, usize::MAX), "{i}: {:?}", arena.usage);
        }
        live.into_iter().for_each(|pages| arena.give(pages));
        arena.shrink(0);
        assert_eq!((arena.usage.in_use, arena.usage.held, arena.kept.len(), arena.tails.len()), (0, 0, 0, 0));
    }

    #[test]
    fn sizes_that_take_turns_take_each_others_place() {
        let mut arena = arena(usize::MAX);
        let mut fresh = Vec::new();
        for turn in 0..8 {
            let bytes = if turn % 2 == 0 { 64 * MIB } else { 56 * MIB };
            let before = arena.usage.held;
            let all: Vec<Pages> = (0..10).map(|_| take(&mut arena, bytes)).collect();
            fresh.push(arena.usage.held - before.min(arena.usage.held));
            all.into_iter().for_each(|pages| arena.give(pages));
        }
        assert_eq!((fresh[0], &fresh[2..]), (640 * MIB, &[0; 6][..]), "bytes that each turn asked the system for");
    }

    #[test]
    fn kept_memory_is_given_back_before_the_limit_is_passed_and_in_use_never_passes_it() {
        let mut arena = arena(10 * MIB);
        let pages = [take(&mut arena, 4 * MIB), take(&mut arena, 4 * MIB)];
        pages.into_iter().for_each(|pages| arena.give(pages));
        let large = take(&mut arena, 6 * MIB);
        assert_eq!((arena.usage.in_use, arena.usage.held), (6 * MIB, 10 * MIB));
        let error = arena.take(5 * MIB).expect_err("11 MiB are too many");
        assert_eq!(error.exit_code(), 2);
        let words =
            "a tensor of 5.0 MiB does not fit: 6.0 MiB are in use, and mesh.arena_bytes_max allows 10.0 MiB a rank";
        assert_eq!(error.message, words);
        assert_eq!(arena.usage.in_use, 6 * MIB, "a refused request counts nothing");
        arena.give(large);
        let lent = take(&mut arena, 5 * MIB);
        let rest = take(&mut arena, 5 * MIB);
        assert_eq!((arena.usage.in_use, arena.usage.held), (10 * MIB, 10 * MIB), "what lent runs leave is given back");
        drop((lent, rest));
    }

    #[test]
    fn a_mapped_buffer_is_used_as_any_other_and_keeps_its_contents_while_it_is_evicted() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut buffer = Buffer::scratch(100_000);
        buffer.iter_mut().enumerate().for_each(|(i, x)| *x = i as f32);
        let expected = buffer.to_vec();
        buffer.move_to_file(dir.path()).expect("disk space");
        assert_eq!((buffer.resident_bytes(), buffer.is_mapped()), (0, true));
        assert_eq!(*buffer, *expected);
        buffer.evict();
        assert_eq!(buffer.resident_bytes(), 0);
        buffer.prefetch();
        assert!(buffer.resident_bytes() >= 400_000 && moving_s() > 0.0);
        buffer[7] = -1.0;
        assert_eq!((buffer[6], buffer.clone()[7]), (6.0, -1.0));
    }

    #[test]
    fn an_evicted_buffer_leaves_its_bytes_to_others() {
        let mut arena = arena(10 * MIB);
        arena.usage.evicted = 6 * MIB;
        arena.bring(6 * MIB).expect("they fit");
        assert!(arena.take(6 * MIB).is_err());
        arena.evict(6 * MIB);
        let pages = take(&mut arena, 6 * MIB);
        assert!(arena.bring(6 * MIB).is_err());
        arena.give(pages);
        arena.bring(6 * MIB).expect("they fit again");
        assert_eq!((arena.usage.in_use, arena.usage.held, arena.usage.peak), (6 * MIB, 6 * MIB, 6 * MIB));
    }
}
