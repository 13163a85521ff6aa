//! Continuous batching: the number of tokens of each sequence in the next forward, and the KV pages of each sequence.
//!
//! - A step feeds one token of every sequence that decodes, and up to `prefill_tokens_max` prompt tokens of sequences
//!   that still read their prompt, in one forward.
//! - A sequence is admitted when a slot and the pages it is expected to need are free. The expectation starts at the
//!   mean length of the rollout before, or at the maximum length, and then follows the mean of finished sequences. If
//!   it was too low, the youngest sequence is preempted: it releases its pages and later reads its tokens again, with
//!   the same bits. The oldest sequence is never preempted.
//! - Samples of one prompt form a group. The first one admitted reads the prompt. The others share its full pages, copy
//!   the last partial one, and sample their first token from the same logits.
//! - Pages at the beginning of the prompts of several groups are also read once (`Prefixes`).
//! - A sequence whose turn has ended waits for its answer with its pages. Then it reads the answer after them.
//!
//! The tokens of a sequence do not depend on any decision made here.

use super::blocks::{BlockPool, pages_of};
pub use super::prefixes::Prefixes;
pub use super::sequence::{Chunk, Limits, Spec, cached_tokens_max, pages_wanted};
use super::sequence::{Group, Prefix, Sequence, State};
use crate::error::{Error, Result};
use crate::ops::attention::PAGE;
use std::collections::VecDeque;
use std::ops::Range;

#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    sequences: Vec<Sequence>,
    groups: Vec<Group>,
    waiting: VecDeque<usize>,
    /// The running sequences in order of admission, oldest first.
    running: Vec<usize>,
    feeds: Vec<Chunk>,
    forks: Vec<usize>,
    finished: usize,
    finished_new_tokens: usize,
    preemptions: usize,
    /// The number of sequences that wait for an answer without a slot.
    awaiting_env: usize,
    /// Whether more sequences may be added (`add`) than the waiting ones.
    is_open: bool,
    prefixes: Prefixes,
    /// Prompt tokens of new sequences that other sequences have read.
    prefix_hit_tokens: usize,
}

impl Scheduler {
    /// # Errors
    /// `Usage` if the longest sequence alone does not fit the pages.
    pub fn new(specs: impl IntoIterator<Item = Spec>, limits: Limits) -> Result<Self> {
        let mut groups: Vec<Group> = Vec::new();
        let mut sequences = Vec::new();
        for spec in specs {
            let pages = spec.pages_max();
            if pages > limits.pages {
                let message = format!(
                    "a sequence of {} tokens needs {pages} KV pages of {PAGE} tokens, but the cache has {}",
                    spec.prompt_tokens + spec.new_tokens_max,
                    limits.pages
                );
                return Err(Error::usage(message).hint("raise rollout.kv_bytes_max, or use shorter responses"));
            }
            if groups.len() <= spec.group {
                groups.resize_with(spec.group + 1, Group::default);
            }
            groups[spec.group].fresh += 1;
            sequences.push(Sequence::new(spec));
        }
        Ok(Self {
            pool: BlockPool::new(limits.pages),
            limits,
            waiting: (0..sequences.len()).collect(),
            sequences,
            groups,
            running: Vec::new(),
            feeds: Vec::new(),
            forks: Vec::new(),
            finished: 0,
            finished_new_tokens: 0,
            preemptions: 0,
            awaiting_env: 0,
            is_open: false,
            prefixes: Prefixes::default(),
            prefix_hit_tokens: 0,
        })
    }

    /// Reads pages that prompts have in common only once.
    pub fn share_prefixes(&mut self, prefixes: Prefixes) {
        self.prefixes = prefixes;
    }

    /// Prompt tokens of all sequences so far that were reused instead of read.
    pub fn prefix_hit_tokens(&self) -> usize {
        self.prefix_hit_tokens
    }

    /// Holds all sequences back until they are added.
    pub fn open(&mut self) {
        self.waiting.clear();
        self.is_open = true;
    }

    /// Whether there are slots and pages for sequences that are still held back.
    pub fn wants_more(&self) -> bool {
        if !self.is_open || self.running.len() + self.waiting.len() >= self.limits.batch_max {
            return false;
        }
        let group = |i: usize| self.group(self.waiting[i]);
        let behind = |i: usize| i > 0 && group(i) == group(i - 1);
        let needed: usize = self.waiting.iter().enumerate().map(|(i, &s)| self.missing_pages(s, behind(i))).sum();
        needed < self.room() || (self.running.is_empty() && self.waiting.is_empty())
    }

    /// Allows these sequences to begin.
    pub fn add(&mut self, sequences: Range<usize>) {
        self.waiting.extend(sequences);
    }

    /// Drops the sequences that are still held back.
    pub fn close(&mut self) {
        self.is_open = false;
    }

    /// Whether every sequence that may begin has finished.
    pub fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.awaiting_env == 0 && !self.is_open
    }

    /// Whether nothing can be done before an answer arrives.
    pub fn is_stalled(&self) -> bool {
        let all_wait = self.running.iter().all(|&s| self.sequences[s].waits);
        !self.is_done() && all_wait && self.admissible().is_none()
    }

    pub fn blocks(&self, sequence: usize) -> &[u32] {
        &self.sequences[sequence].blocks
    }

    pub fn group(&self, sequence: usize) -> usize {
        self.sequences[sequence].spec.group
    }

    /// Whether samples of the group may still sample from its prompt logits.
    pub fn is_prompt_kept(&self, group: usize) -> bool {
        matches!(self.groups[group].prefix, Prefix::Ready(_))
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn free_pages(&self) -> usize {
        self.pool.free()
    }

    /// The number of times that a sequence had to release its pages.
    pub fn preemptions(&self) -> usize {
        self.preemptions
    }

    /// Gives slots to waiting sequences. Returns the samples whose prompt another sample has read. Each now samples its
    /// first token from the group's prompt logits (`accept`), and then ends (`finish`) or continues (`share`).
    pub fn admit(&mut self) -> &[usize] {
        self.forks.clear();
        for i in 0..self.running.len() {
            let s = self.running[i];
            if self.sequences[s].state == State::Follower {
                self.start_sequence(s);
            }
        }
        if self.running.len() >= self.limits.batch_max || self.waiting.is_empty() {
            return &self.forks;
        }
        let mut room = self.room();
        while let Some(&s) = self.waiting.front() {
            let need = self.missing_pages(s, false);
            if self.running.len() >= self.limits.batch_max || !(self.running.is_empty() || need <= room) {
                break;
            }
            room = room.saturating_sub(need);
            self.waiting.pop_front();
            self.running.push(s);
            let spec = self.sequences[s].spec;
            self.sequences[s].blocks.reserve(spec.pages_max());
            self.start_sequence(s);
        }
        &self.forks
    }

    /// Decides how an admitted sequence starts: it reads its tokens, waits for its group's leader, or forks.
    fn start_sequence(&mut self, s: usize) {
        let sequence = &mut self.sequences[s];
        let group = &mut self.groups[sequence.spec.group];
        sequence.state = State::Running;
        if sequence.length > sequence.spec.prompt_tokens || sequence.leads {
            return;
        }
        match group.prefix {
            Prefix::Absent if group.fresh > 1 => {
                group.prefix = Prefix::Pending;
                sequence.leads = true;
            }
            Prefix::Absent => {}
            Prefix::Pending => sequence.state = State::Follower,
            Prefix::Ready(_) => {
                sequence.state = State::Follower;
                sequence.forks = true;
                self.forks.push(s);
            }
        }
    }

    /// The feeds of the next forward, with their pages allocated, oldest sequences first.
    pub fn plan(&mut self) -> &[Chunk] {
        self.feeds.clear();
        let mut budget = self.limits.prefill_tokens_max.max(1);
        let mut i = 0;
        while i < self.running.len() {
            let s = self.running[i];
            i += 1;
            if self.sequences[s].state != State::Running || self.sequences[s].waits || !self.take_prefix(s) {
                continue;
            }
            let sequence = &self.sequences[s];
            let (past, left) = (sequence.past, sequence.length - sequence.past);
            let tokens = if left == 1 { 1 } else { left.min(budget) };
            if tokens == 0 || !self.cover(s, past + tokens) {
                continue;
            }
            if left > 1 {
                budget -= tokens;
            }
            self.prefixes.begin(s, &self.sequences[s], past + tokens);
            self.feeds.push(Chunk { sequence: s, past, tokens, complete: tokens == left });
        }
        &self.feeds
    }

    /// Gives a sequence that reads its prompt the pages that others have read. Returns false if it has to wait for one.
    fn take_prefix(&mut self, s: usize) -> bool {
        let sequence = &mut self.sequences[s];
        let before = sequence.past;
        let goes_on = self.prefixes.take_pages(s, sequence, &mut self.pool);
        if sequence.length == sequence.spec.prompt_tokens {
            self.prefix_hit_tokens += sequence.past - before;
        }
        goes_on
    }

    /// The running sequences, if each of them only needs its last sampled token to be fed.
    pub fn decoding(&self) -> Option<&[usize]> {
        let decodes = |s: &usize| {
            let sequence = &self.sequences[*s];
            let drawn = sequence.length > sequence.spec.prompt_tokens;
            sequence.state == State::Running && !sequence.waits && drawn && sequence.length == sequence.past + 1
        };
        (!self.running.is_empty() && self.running.iter().all(decodes)).then_some(&self.running)
    }

    /// Makes the sequence's pages cover `tokens`, if no other sequence has to release pages for it.
    pub fn extend(&mut self, s: usize, tokens: usize) -> bool {
        while self.sequences[s].blocks.len() < pages_of(tokens) {
            let Some(page) = self.pool.allocate() else { return false };
            self.sequences[s].blocks.push(page);
        }
        true
    }

    /// Pages of the sequence at its maximum length.
    pub fn pages_max(&self, s: usize) -> usize {
        self.sequences[s].spec.pages_max()
    }

    /// Records that the token fed to the sequence in a decode step is cached.
    pub fn decoded(&mut self, s: usize) {
        self.sequences[s].past += 1;
    }

    /// The number of free slots, if `admit` would give one to a waiting sequence or to one that may be added.
    pub fn admissible(&self) -> Option<usize> {
        let Some(&next) = self.waiting.front() else {
            return self.wants_more().then(|| self.limits.batch_max - self.running.len());
        };
        let slots = self.limits.batch_max.checked_sub(self.running.len()).filter(|slots| *slots > 0)?;
        (self.running.is_empty() || self.missing_pages(next, false) <= self.room()).then_some(slots)
    }

    /// Records that the tokens of `feed` are cached. Returns whether the logits after the last token must be kept for
    /// the other samples of the group.
    pub fn fed(&mut self, feed: Chunk) -> bool {
        let sequence = &mut self.sequences[feed.sequence];
        sequence.past = feed.past + feed.tokens;
        self.prefixes.end(feed.sequence, sequence, feed.complete, &mut self.pool);
        if !(feed.complete && sequence.leads) {
            return false;
        }
        sequence.leads = false;
        let group = &mut self.groups[sequence.spec.group];
        let pages = sequence.blocks[..pages_of(sequence.spec.prompt_tokens)].to_vec();
        for &page in &pages {
            self.pool.retain(page);
        }
        group.prefix = Prefix::Ready(pages);
        true
    }

    /// Adds one token to the sequence.
    pub fn accept(&mut self, s: usize) {
        let sequence = &mut self.sequences[s];
        sequence.length += 1;
        if sequence.length == sequence.spec.prompt_tokens + 1 && !sequence.forks {
            self.settle(s);
        }
    }

    /// Whether any sequence waits for an answer.
    pub fn has_open_turns(&self) -> bool {
        self.awaiting_env > 0 || self.running.iter().any(|&s| self.sequences[s].waits)
    }

    /// Pauses the sequence until `answer`.
    pub fn wait(&mut self, s: usize) {
        self.sequences[s].waits = true;
    }

    /// Continues the sequence with `tokens` more tokens, which must be read.
    pub fn answer(&mut self, s: usize, tokens: usize) {
        self.ends_waiting(s);
        self.sequences[s].length += tokens;
        if !self.running.contains(&s) {
            self.waiting.push_front(s);
        }
    }

    fn ends_waiting(&mut self, s: usize) {
        if std::mem::take(&mut self.sequences[s].waits) && !self.running.contains(&s) {
            self.awaiting_env -= 1;
        }
    }

    /// Counts accepted tokens outside of a step that are cached.
    pub fn lengthen(&mut self, s: usize, tokens: usize) {
        self.sequences[s].past += tokens;
        self.sequences[s].length += tokens;
    }

    /// Ends the sequence's use of its group. The last sequence releases the prompt's pages.
    fn settle(&mut self, s: usize) {
        let group = self.sequences[s].spec.group;
        self.sequences[s].forks = false;
        self.groups[group].fresh -= 1;
        if self.groups[group].fresh == 0 {
            self.drop_prefix(group);
        }
    }

    /// Gives a forked sequence the pages of its prompt. Returns the page to copy, if one is partial: (from, to).
    pub fn share(&mut self, s: usize) -> Option<(u32, u32)> {
        let group = self.sequences[s].spec.group;
        let copy = if self.sequences[s].state == State::Follower { self.share_pages(s, group) } else { None };
        if self.sequences[s].forks {
            self.settle(s);
        }
        copy
    }

    fn share_pages(&mut self, s: usize, group: usize) -> Option<(u32, u32)> {
        let prompt_tokens = self.sequences[s].spec.prompt_tokens;
        self.sequences[s].state = State::Running;
        // If the prefix was released meanwhile, there is nothing to share, and the sequence reads its tokens itself.
        let Prefix::Ready(pages) = &self.groups[group].prefix else { return None };
        let full = prompt_tokens / PAGE;
        let partial = pages.get(full).copied();
        for &page in &pages[..full] {
            self.pool.retain(page);
            self.sequences[s].blocks.push(page);
        }
        self.prefix_hit_tokens += prompt_tokens;
        let Some(from) = partial else {
            self.sequences[s].past = prompt_tokens;
            return None;
        };
        self.pool.retain(from);
        let covered = self.cover(s, prompt_tokens);
        self.pool.release(from);
        if !covered {
            return None;
        }
        self.sequences[s].past = prompt_tokens;
        Some((from, self.sequences[s].blocks[full]))
    }

    /// Ends the sequence, and frees its slot and pages at once.
    pub fn finish(&mut self, s: usize) {
        self.finished += 1;
        self.finished_new_tokens += self.sequences[s].length - self.sequences[s].spec.prompt_tokens;
        self.ends_waiting(s);
        if let Some(i) = self.running.iter().position(|&r| r == s) {
            self.running.remove(i);
        } else {
            self.waiting.retain(|&w| w != s);
        }
        self.release_blocks(s);
        if self.sequences[s].forks {
            self.settle(s);
        }
    }

    /// Makes the sequence's pages cover `tokens`. Returns false if it had to release its own pages.
    fn cover(&mut self, s: usize, tokens: usize) -> bool {
        while !self.extend(s, tokens) {
            if self.prefixes.drop_unused(&mut self.pool) {
                // One of them is free now.
            } else if self.running.len() > 1 {
                let youngest = *self.running.last().expect("at least two run");
                self.preempt(youngest);
                if youngest == s {
                    return false;
                }
            } else if !self.drop_prefixes() {
                self.preempt(s);
                return false;
            }
        }
        true
    }

    fn preempt(&mut self, s: usize) {
        self.preemptions += 1;
        self.prefixes.cancel(s);
        self.running.retain(|&r| r != s);
        if self.sequences[s].waits {
            self.awaiting_env += 1;
        } else {
            self.waiting.push_front(s);
        }
        self.release_blocks(s);
        let sequence = &mut self.sequences[s];
        sequence.state = State::Waiting;
        sequence.past = 0;
        if std::mem::take(&mut sequence.leads) {
            self.groups[sequence.spec.group].prefix = Prefix::Absent;
        }
    }

    fn release_blocks(&mut self, s: usize) {
        for page in self.sequences[s].blocks.drain(..) {
            self.pool.release(page);
        }
    }

    fn drop_prefix(&mut self, group: usize) -> bool {
        let prefix = &mut self.groups[group].prefix;
        let Prefix::Ready(pages) = prefix else { return false };
        for page in pages.iter() {
            self.pool.release(*page);
        }
        *prefix = Prefix::Absent;
        true
    }

    /// Releases all kept prompts. Their later samples read them again.
    fn drop_prefixes(&mut self) -> bool {
        (0..self.groups.len()).filter(|&group| self.drop_prefix(group)).count() > 0
    }

    /// Free pages that no running sequence is expected to need.
    fn room(&self) -> usize {
        let expected: usize = self.running.iter().map(|&s| self.missing_pages(s, false)).sum();
        self.pool.free().saturating_sub(expected)
    }

    /// Pages that the sequence is expected to need from the pool. `behind`: another sequence of its group reads the
    /// prompt.
    fn missing_pages(&self, s: usize, behind: bool) -> usize {
        let sequence = &self.sequences[s];
        let spec = sequence.spec;
        let expected_new = self.limits.expected_new(self.finished, self.finished_new_tokens);
        let expected_new = expected_new.map_or(spec.new_tokens_max, |expected| expected.min(spec.new_tokens_max));
        let tokens = cached_tokens_max(spec.prompt_tokens, expected_new).max(sequence.length);
        let fresh = sequence.length == spec.prompt_tokens && sequence.blocks.is_empty() && !sequence.leads;
        let is_shared = behind || !matches!(self.groups[spec.group].prefix, Prefix::Absent);
        let shared = match fresh {
            true if is_shared => spec.prompt_tokens / PAGE,
            true => self.prefixes.held(spec.group),
            false => 0,
        };
        pages_of(tokens).saturating_sub(sequence.blocks.len().max(shared))
    }
}
