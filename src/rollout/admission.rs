//! Admission: whether each cache group has the pages that a waiting sequence is expected to need.

use super::blocks::{held_max, pages_of};
use super::scheduler::Scheduler;
use super::sequence::{Prefix, cached_tokens_max, chunk_pages};
use crate::model::Kept;
use crate::ops::attention::PAGE;

/// Pages of a cache group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Free pages that no running sequence is expected to need.
    free: usize,
    /// With a window, the pages that running sequences may hold in addition while they read their tokens.
    reading: usize,
}

impl Scheduler {
    /// The pages that running sequences are expected to leave, for each group.
    pub(super) fn room(&self) -> Vec<Room> {
        let of_group = |group: usize| {
            let running = || self.running.iter().copied();
            let expected: usize = running().map(|s| self.missing_pages(s, false, group)).sum();
            let is_window = matches!(self.pools.kept(group), Kept::Window(_));
            // Pages before all windows are kept for other prompts only while there is space.
            let droppable = if is_window { self.prefixes.droppable(&self.pools, group) } else { 0 };
            let free = (self.pools.free(group) + droppable).saturating_sub(expected);
            let reading = if is_window { running().map(|s| self.pages_for_reading(s, group)).sum() } else { 0 };
            Room { free, reading }
        };
        (0..self.pools.len()).map(of_group).collect()
    }

    /// Takes the pages that the sequence is expected to need. Returns whether there were enough.
    pub(super) fn take_room(&self, s: usize, room: &mut [Room]) -> bool {
        let mut fits = true;
        for (group, room) in room.iter_mut().enumerate() {
            let needed = self.missing_pages(s, false, group);
            room.reading += self.pages_for_reading(s, group);
            fits &= needed + self.chunk(room.reading) <= room.free;
            room.free = room.free.saturating_sub(needed);
        }
        fits
    }

    /// Whether there are slots and pages for sequences that are still held back.
    pub fn wants_more(&self) -> bool {
        if !self.is_open || self.running.len() + self.waiting.len() >= self.limits.batch_max {
            return false;
        }
        let behind = |i: usize| i > 0 && self.group(self.waiting[i]) == self.group(self.waiting[i - 1]);
        let has_room = |(group, room): (usize, &Room)| {
            let waiting = || self.waiting.iter().copied().enumerate();
            let needed: usize = waiting().map(|(i, s)| self.missing_pages(s, behind(i), group)).sum();
            let reading: usize = waiting().map(|(_, s)| self.pages_for_reading(s, group)).sum();
            needed + self.chunk(room.reading + reading) < room.free
        };
        (self.running.is_empty() && self.waiting.is_empty()) || self.room().iter().enumerate().all(has_room)
    }

    /// The number of free slots, if `admit` would give one to a waiting sequence or to one that may be added.
    pub fn admissible(&self) -> Option<usize> {
        let Some(&next) = self.waiting.front() else {
            return self.wants_more().then(|| self.limits.batch_max - self.running.len());
        };
        let slots = self.limits.batch_max.checked_sub(self.running.len()).filter(|slots| *slots > 0)?;
        (self.running.is_empty() || self.take_room(next, &mut self.room())).then_some(slots)
    }

    /// Pages of a group that the sequence is expected to need from the pool. `behind`: another sequence of its group
    /// of samples reads the prompt.
    fn missing_pages(&self, s: usize, behind: bool, group: usize) -> usize {
        let sequence = &self.sequences[s];
        let spec = sequence.spec;
        let expected_new = self.limits.expected_new(self.finished, self.finished_new_tokens);
        let expected_new = expected_new.map_or(spec.new_tokens_max, |expected| expected.min(spec.new_tokens_max));
        let tokens = cached_tokens_max(spec.prompt_tokens, expected_new).max(sequence.length);
        let fresh = sequence.length == spec.prompt_tokens && sequence.tables.is_empty() && !sequence.leads;
        let is_shared = behind || !matches!(self.groups[spec.group].prefix, Prefix::Absent);
        let shared = match fresh {
            true if is_shared => spec.prompt_tokens / PAGE,
            true => self.prefixes.held(spec.group),
            false => 0,
        };
        let more = pages_of(tokens).saturating_sub(sequence.tables.len().max(shared));
        self.pools.missing(group, &sequence.tables, more, pages_of(spec.prompt_tokens))
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
}
