//! The pool of the host's arena: runs of memory in use, kept for the next request, lent in part, or returned to the
//! system.

use crate::device::null;
use crate::error::{Error, Result, format_bytes};
use crate::sys::free_list::{FreeList, latest};
use crate::sys::memory::Usage;
use crate::sys::pages::{HUGE, Pages, page_size};
use std::collections::BTreeMap;

/// The hint if the limit is too low.
pub const HINT: &str = "use more sequence or tensor ranks, a higher mesh.zero, mesh.offload, \
                        gradient.recompute = \"block\" or a smaller microbatch_tokens_max; \
                        or raise mesh.arena_bytes_max";

pub(super) struct HostPool {
    /// Kept runs. The most recently used of a size is taken first.
    kept: FreeList<Pages>,
    /// The rests of lending runs, by the address of the live buffer.
    tails: BTreeMap<usize, Pages>,
    time: u64,
    pub usage: Usage,
}

/// The least number of bytes kept, so that alternating phases of a small job with different sizes cause no page faults.
const KEPT_MIN: usize = 128 << 20;

/// The upper limit of held bytes after a peak of `peak` bytes in use.
pub fn bound(peak: usize, limit: usize) -> usize {
    (peak + (peak / 64).max(KEPT_MIN)).min(limit)
}

/// The size that a buffer of `bytes` takes: whole pages, in steps of 1/32 of the next power of two (at most 6.25 %
/// more). So buffers of similar size can replace each other.
pub fn size_class(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 32).max(page_size());
    bytes.max(1).next_multiple_of(step)
}

impl HostPool {
    pub const fn new() -> Self {
        let usage = Usage::NONE;
        Self { kept: FreeList::new(), tails: BTreeMap::new(), time: 0, usage }
    }

    /// Counts `bytes` as in use.
    fn charge(&mut self, bytes: usize) -> Result<()> {
        let u = &mut self.usage;
        if bytes > u.limit.saturating_sub(u.in_use) {
            let [asked, used, limit] = [bytes, u.in_use, u.limit].map(|b| format_bytes(b as u64));
            let message = format!(
                "a tensor of {asked} does not fit: {used} are in use, and mesh.arena_bytes_max allows {limit} per rank"
            );
            return Err(Error::usage(message).hint(HINT));
        }
        u.in_use += bytes;
        u.peak = u.peak.max(u.in_use);
        Ok(())
    }

    /// Takes a run of `bytes`, of which `written` will be written.
    pub fn take_pages(&mut self, bytes: usize, written: usize) -> Result<Pages> {
        let mut pages = self.run_of(bytes)?;
        // Large runs are backed by huge pages.
        let unit = if bytes < HUGE { page_size() } else { HUGE };
        let touched = written.next_multiple_of(unit).min(bytes);
        self.usage.resident += touched.saturating_sub(pages.touched);
        pages.touched = pages.touched.max(touched);
        Ok(pages)
    }

    fn run_of(&mut self, bytes: usize) -> Result<Pages> {
        self.charge(bytes)?;
        if let Some((_, pages)) = self.kept.take(bytes..=bytes) {
            return Ok(pages);
        }
        let most = bound(self.usage.peak, self.usage.limit);
        if self.usage.held + bytes > most {
            if let Some(pages) = self.lend(bytes) {
                return Ok(pages);
            }
            self.shrink(most.saturating_sub(bytes));
        }
        let pages = new_pages(bytes).or_else(|| {
            self.shrink(0);
            new_pages(bytes)
        });
        let Some(pages) = pages else {
            self.usage.in_use -= bytes;
            let [asked, used] = [bytes, self.usage.in_use].map(|b| format_bytes(b as u64));
            return Err(Error::fault(format!("the system cannot allocate {asked} for a tensor; {used} are in use"))
                .hint("start fewer ranks per host, or check the limits of the job (ulimit -v, the cgroup)"));
        };
        self.usage.held += bytes;
        self.usage.requests += 1;
        Ok(pages)
    }

    pub fn give(&mut self, mut pages: Pages) {
        self.usage.in_use -= pages.bytes();
        if let Some(tail) = self.tails.remove(&address(&pages)) {
            pages = pages.join(tail);
        }
        self.time += 1;
        self.kept.insert(pages.bytes(), latest(self.time), pages);
    }

    /// Takes the first part of a kept run that is not much larger.
    fn lend(&mut self, bytes: usize) -> Option<Pages> {
        let (_, pages) = self.kept.take(bytes + 1..=bytes + bytes / 4)?;
        let (head, tail) = pages.split(bytes);
        self.tails.insert(address(&head), tail);
        Some(head)
    }

    /// Returns kept runs to the system, the longest unused first, and then the rests of lending runs, until at most
    /// `most` bytes are held or nothing is left.
    pub fn shrink(&mut self, most: usize) {
        while self.usage.held > most {
            let rest = |pool: &mut Self| pool.tails.pop_first().map(|(_, pages)| pages);
            let Some(pages) = self.kept.take_last().or_else(|| rest(self)) else { break };
            self.usage.held -= pages.bytes();
            self.usage.resident -= pages.touched;
        }
    }

    /// Counts a mapped buffer that leaves memory.
    pub fn evict(&mut self, bytes: usize) {
        self.usage.in_use -= bytes;
        self.usage.held -= bytes;
        self.usage.resident -= bytes;
        self.usage.evicted += bytes;
    }

    /// Counts a mapped buffer that returns to memory.
    pub fn bring(&mut self, bytes: usize) -> Result<()> {
        self.charge(bytes)?;
        self.shrink(bound(self.usage.peak, self.usage.limit).saturating_sub(bytes));
        self.usage.held += bytes;
        self.usage.resident += bytes;
        self.usage.evicted -= bytes;
        Ok(())
    }
}

fn new_pages(bytes: usize) -> Option<Pages> {
    if null::is_active() { Pages::untouched(bytes) } else { Pages::anonymous(bytes) }
}

fn address(pages: &Pages) -> usize {
    pages.start().as_ptr() as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const MIB: usize = 1 << 20;

    fn pool_of(limit: usize) -> HostPool {
        let mut pool = HostPool::new();
        pool.usage.limit = limit;
        pool
    }

    fn take_bytes(pool: &mut HostPool, bytes: usize) -> Pages {
        pool.take_pages(bytes, bytes).expect("within the limit")
    }

    fn give_all(pool: &mut HostPool, all: impl IntoIterator<Item = Pages>) {
        for pages in all {
            pool.give(pages);
        }
    }

    #[test]
    fn a_size_class_is_at_least_the_request_and_at_most_a_sixteenth_or_a_page_more() {
        for bytes in (0..100).map(|i| i * 37_987).chain([1, 4095, 4096, 4097, MIB, MIB + 1, 1 << 30, (1 << 30) + 1]) {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(page_size()), "{bytes}: {class}");
            assert!(class - bytes <= (bytes / 16).max(page_size()), "{bytes}: {class}");
            assert_eq!(size_class(class), class);
        }
    }

    #[test]
    fn held_memory_never_exceeds_the_bound_for_any_order_of_sizes() {
        let mut pool = pool_of(usize::MAX);
        let mut live = VecDeque::new();
        for i in 0..2000 {
            let pages = take_bytes(&mut pool, size_class(1 + i * 7919 % 61 * MIB / 3));
            live.push_back(pages);
            while live.len() > 1 + i / 100 % 7 {
                let first = live.pop_front().expect("it is longer");
                pool.give(first);
            }
            let Usage { in_use, peak, held, .. } = pool.usage;
            assert!(in_use <= held && held <= bound(peak, usize::MAX), "{i}: {:?}", pool.usage);
        }
        give_all(&mut pool, live);
        pool.shrink(0);
        assert_eq!((pool.usage.in_use, pool.usage.held, pool.kept.len(), pool.tails.len()), (0, 0, 0, 0));
    }

    #[test]
    fn alternating_sizes_reuse_each_others_memory() {
        let mut pool = pool_of(usize::MAX);
        let mut fresh = Vec::new();
        for turn in 0..8 {
            let bytes = if turn % 2 == 0 { 64 * MIB } else { 56 * MIB };
            let before = pool.usage.held;
            let all: Vec<Pages> = (0..10).map(|_| take_bytes(&mut pool, bytes)).collect();
            fresh.push(pool.usage.held - before.min(pool.usage.held));
            give_all(&mut pool, all);
        }
        assert_eq!((fresh[0], &fresh[2..]), (640 * MIB, &[0; 6][..]), "bytes that each turn requested from the system");
    }

    #[test]
    fn kept_memory_is_freed_before_the_limit_and_memory_in_use_never_exceeds_it() {
        let mut pool = pool_of(10 * MIB);
        let pages = [take_bytes(&mut pool, 4 * MIB), take_bytes(&mut pool, 4 * MIB)];
        give_all(&mut pool, pages);
        let large = take_bytes(&mut pool, 6 * MIB);
        assert_eq!((pool.usage.in_use, pool.usage.held), (6 * MIB, 10 * MIB));
        let error = pool.take_pages(5 * MIB, 0).expect_err("11 MiB are too many");
        assert_eq!(error.exit_code(), 2);
        let words =
            "a tensor of 5.0 MiB does not fit: 6.0 MiB are in use, and mesh.arena_bytes_max allows 10.0 MiB per rank";
        assert_eq!(error.message, words);
        assert_eq!(pool.usage.in_use, 6 * MIB, "a rejected request counts nothing");
        pool.give(large);
        let lent = take_bytes(&mut pool, 5 * MIB);
        let rest = take_bytes(&mut pool, 5 * MIB);
        assert_eq!((pool.usage.in_use, pool.usage.held), (10 * MIB, 10 * MIB), "rests of lending runs are returned");
        drop((lent, rest));
    }

    #[test]
    fn the_bytes_of_an_evicted_buffer_are_available_to_others() {
        let mut pool = pool_of(10 * MIB);
        pool.usage.evicted = 6 * MIB;
        pool.bring(6 * MIB).expect("they fit");
        assert!(pool.take_pages(6 * MIB, 0).is_err());
        pool.evict(6 * MIB);
        let pages = take_bytes(&mut pool, 6 * MIB);
        assert!(pool.bring(6 * MIB).is_err());
        pool.give(pages);
        pool.bring(6 * MIB).expect("they fit again");
        assert_eq!((pool.usage.in_use, pool.usage.held, pool.usage.peak), (6 * MIB, 6 * MIB, 6 * MIB));
    }
}
