//! Admission by the projected peak: a waiting sequence is admitted while each cache group has the pages that all running
//! sequences and it are expected to hold at once. A sequence is expected to end after the mean length, so long responses
//! that began at different times share the cache: while one is near its end, another one begins.

use super::blocks::{held_max, pages_of};
use super::peak::{Holder, Timeline};
use super::scheduler::Scheduler;
use super::sequence::{Prefix, chunk_pages, remainder};
use crate::model::Kept;
use crate::ops::attention::PAGE;

/// The end of sequences that hold their pages until all of their batch have ended.
const NEVER: usize = usize::MAX >> 8;

/// The use of a cache group by running sequences.
#[derive(Clone, Debug)]
struct Room {
    /// All pages of the group, without the pages that are held now, or soon, and that no end of these sequences frees.
    pages: usize,
    holders: Timeline,
    /// With a window, the pages that they may hold in addition while they read their tokens.
    reading: usize,
}

/// The use of all cache groups.
#[derive(Clone, Debug)]
pub(super) struct Rooms {
    mean: f64,
    groups: Vec<Room>,
}

/// The pages of a sequence in a cache group.
struct Share {
    /// Pages that it holds alone now.
    own: usize,
    /// Pages that it will take and then share with others.
    taken: usize,
    holder: Holder,
}

impl Scheduler {
    /// The use of the cache by running sequences.
    pub(super) fn rooms(&self) -> Rooms {
        let mean = self.expected_mean();
        let of_group = |group: usize| {
            let (mut own, mut taken, mut reading) = (0, 0, 0);
            let holders = self.running.iter().map(|&s| {
                let share = self.pages_of_sequence(s, false, group, mean);
                own += share.own;
                taken += share.taken;
                reading += self.pages_for_reading(s, group);
                share.holder
            });
            let holders = Timeline::new(holders);
            let is_window = matches!(self.pools.kept(group), Kept::Window(_));
            // Pages before all windows are kept for other prompts only while there is space.
            let droppable = if is_window { self.prefixes.droppable(&self.pools, group) } else { 0 };
            let pages = (self.pools.free(group) + droppable + own).saturating_sub(taken);
            Room { pages, holders, reading }
        };
        Rooms { mean, groups: (0..self.pools.len()).map(of_group).collect() }
    }

    /// Adds a sequence that does not run yet. `behind`: another sequence of its group of samples reads the prompt.
    fn occupy(&self, s: usize, behind: bool, rooms: &mut Rooms) {
        for (group, room) in rooms.groups.iter_mut().enumerate() {
            let share = self.pages_of_sequence(s, behind, group, rooms.mean);
            room.pages = room.pages.saturating_sub(share.taken);
            room.holders.add(share.holder);
            room.reading += self.pages_for_reading(s, group);
        }
    }

    /// Whether the projected peak leaves `spare` pages of each group.
    fn fits(&self, rooms: &Rooms, spare: usize) -> bool {
        let fits = |room: &Room| room.holders.peak() + self.chunk(room.reading) + spare <= room.pages;
        rooms.groups.iter().all(fits)
    }

    /// Adds the sequence. Returns whether the projected peak still fits.
    pub(super) fn take_room(&self, s: usize, rooms: &mut Rooms) -> bool {
        self.occupy(s, false, rooms);
        self.fits(rooms, 0)
    }

    /// Whether there are slots and pages for sequences that are still held back.
    pub fn wants_more(&self) -> bool {
        if !self.is_open || self.running.len() + self.waiting.len() >= self.limits.batch_max {
            return false;
        }
        if self.running.is_empty() && self.waiting.is_empty() {
            return true;
        }
        let mut rooms = self.rooms();
        for (i, &s) in self.waiting.iter().enumerate() {
            let behind = i > 0 && self.group(s) == self.group(self.waiting[i - 1]);
            self.occupy(s, behind, &mut rooms);
        }
        self.fits(&rooms, 1)
    }

    /// The number of free slots, if `admit` would give one to a waiting sequence or to one that may be added.
    pub fn admissible(&self) -> Option<usize> {
        let Some(&next) = self.waiting.front() else {
            return self.wants_more().then(|| self.limits.batch_max - self.running.len());
        };
        let slots = self.limits.batch_max.checked_sub(self.running.len()).filter(|slots| *slots > 0)?;
        (self.running.is_empty() || self.take_room(next, &mut self.rooms())).then_some(slots)
    }

    /// The mean number of new tokens that sequences are expected to have. The running ones are a censored sample of it:
    /// one of n new tokens is expected to have n + r(n) at its end, where r depends on the mean itself.
    ///
    /// μ = max((F + Σ n) / b, (w m + F + Σ (n + r(n))) / (w + b))
    ///
    /// Sums are over running sequences. F: the new tokens of finished sequences. b: the number of finished and running
    /// ones. m: the mean of earlier sequences, which counts like as many as there are in this call (w). Without one, m
    /// is half of the maximum and w = 2: sequences that do not end soon lift μ, and an empty cache is used from the
    /// first forward on.
    pub(super) fn expected_mean(&self) -> f64 {
        let [m, w] = self.expected_before;
        let running = || self.running.iter().map(|&s| &self.sequences[s]);
        let b = (self.finished + self.running.len()) as f64;
        let finished = self.finished_new_tokens as f64;
        let so_far = running().map(|sequence| sequence.new_tokens() as f64).sum::<f64>();
        let least = if b > 0.0 { (finished + so_far) / b } else { 0.0 };
        let mut mean = least.max(m);
        // Each round leaves at most a fifth of the error.
        for _ in 0..4 {
            let ends = running().map(|sequence| {
                let (n, max) = (sequence.new_tokens(), sequence.spec.new_tokens_max);
                (n + remainder(mean, n, max)) as f64
            });
            mean = least.max((w * m + finished + ends.sum::<f64>()) / (w + b));
        }
        mean
    }

    /// The pages of a sequence in a cache group.
    fn pages_of_sequence(&self, s: usize, behind: bool, group: usize, mean: f64) -> Share {
        let (sequence, kept) = (&self.sequences[s], self.pools.kept(group));
        let spec = sequence.spec;
        let (shared, unread) = self.shared_entries(s, behind);
        let entries = sequence.tables.len();
        let own = match kept {
            Kept::All => entries.saturating_sub(shared),
            _ => self.pools.own(group, &sequence.tables, pages_of(spec.prompt_tokens)),
        };
        let (taken, offset) = match kept {
            Kept::All => (unread, -(shared as i64)),
            // A window soon leaves the shared pages.
            Kept::Window(_) => (0, own as i64 - entries.max(shared - unread) as i64),
            Kept::State => (0, 1),
        };
        let (mut end, mut most) =
            (remainder(mean, sequence.new_tokens(), spec.new_tokens_max), held_max(kept, usize::MAX, 1));
        if self.in_batches {
            (end, most) = (NEVER, most.min(spec.pages_max().saturating_add_signed(offset as isize)));
        }
        // The last token is never fed.
        let tokens = sequence.length - 1;
        Share { own, taken, holder: Holder { end, tokens, offset, most } }
    }

    /// The number of leading entries of its tables that it shares with other sequences, and of the entries that it will
    /// read itself.
    fn shared_entries(&self, s: usize, behind: bool) -> (usize, usize) {
        let sequence = &self.sequences[s];
        let spec = sequence.spec;
        let (group, whole) = (&self.groups[spec.group], spec.prompt_tokens / PAGE);
        let is_fresh = sequence.length == spec.prompt_tokens && sequence.tables.is_empty() && !sequence.leads;
        let shared = match group.prefix {
            _ if !is_fresh => sequence.shared,
            _ if behind => return (whole, 0),
            Prefix::Pending | Prefix::Ready(_) => return (whole, 0),
            Prefix::Absent if group.fresh > 1 => whole,
            Prefix::Absent => self.prefixes.common(spec.group),
        };
        let held = self.prefixes.held(spec.group).max(sequence.tables.len());
        (shared, shared.saturating_sub(held))
    }

    /// Pages of a group with a window that the sequence may hold in addition while it reads its tokens.
    fn pages_for_reading(&self, s: usize, group: usize) -> usize {
        let (sequence, kept) = (&self.sequences[s], self.pools.kept(group));
        let reads = matches!(kept, Kept::Window(_)) && sequence.length > sequence.past + 1;
        if reads { pages_of(sequence.length).saturating_sub(held_max(kept, usize::MAX, 1)) } else { 0 }
    }

    /// The pages for reading that one forward uses at most.
    fn chunk(&self, reading: usize) -> usize {
        reading.min(chunk_pages(self.limits.prefill_tokens_max))
    }

    /// Makes the sequence's pages cover `tokens`. Returns false if it had to release its own pages.
    ///
    /// If no page is free, another sequence is preempted: the one that has to read the fewest tokens again. The one with
    /// the most new tokens is never preempted, so it ends, and then the next one does.
    pub(super) fn cover(&mut self, s: usize, tokens: usize) -> bool {
        while let Err(group) = self.pools.cover(&mut self.sequences[s].tables, tokens) {
            if self.prefixes.drop_unused(&mut self.pools, group) {
                // One of them is free now.
            } else if let Some(victim) = self.victim(group) {
                self.preempt(victim);
                if victim == s {
                    return false;
                }
            } else if !self.drop_prefixes() {
                self.preempt(s);
                return false;
            }
        }
        true
    }

    /// The sequence to preempt for pages of a cache group. Among equals it is the last one admitted.
    fn victim(&self, group: usize) -> Option<usize> {
        let of = |s: usize| &self.sequences[s];
        // The first admitted of those with the most.
        let first = self.running.iter().copied().rev().max_by_key(|&s| of(s).new_tokens())?;
        let others = || self.running.iter().copied().rev().filter(|&s| s != first);
        let frees = |s: &usize| self.pools.own(group, &of(*s).tables, usize::MAX) > 0;
        others().filter(frees).min_by_key(|&s| of(s).past).or_else(|| others().next())
    }

    /// Takes the slot and the pages of a running sequence. It reads its tokens again later.
    fn preempt(&mut self, s: usize) {
        self.preemptions += 1;
        self.prefixes.cancel(s);
        self.unplan(s);
        if self.sequences[s].waits {
            self.awaiting_env += 1;
        } else {
            self.waiting.push_front(s);
        }
        self.release_blocks(s);
        let sequence = &mut self.sequences[s];
        sequence.restart();
        if std::mem::take(&mut sequence.leads) {
            self.groups[sequence.spec.group].prefix = Prefix::Absent;
        }
    }
}
