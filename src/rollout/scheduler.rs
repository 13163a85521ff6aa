//! Continuous batching: the number of tokens of each sequence in the next forward, and the KV pages of each sequence.
//!
//! - A step feeds one token of every sequence that decodes, and up to `prefill_tokens_max` prompt tokens of sequences
//!   that still read their prompt, in one forward.
//! - A sequence is admitted when a slot is free and the cache has the pages that all running sequences are expected to
//!   hold at once (`admission`). The expected lengths follow the finished and running sequences. If they were too short,
//!   the sequence with the fewest cached tokens is preempted: it releases its pages and later reads its tokens again,
//!   with the same bits. The sequence with the most new tokens is never preempted.
//! - Samples of one prompt form a group. The first one admitted reads the prompt. The others share its full pages, copy
//!   the last partial one, and sample their first token from the same logits.
//! - Pages at the beginning of the prompts of several groups are also read once (`Prefixes`).
//! - Each cache group has its own pages. A group with a window releases a page as soon as no later query sees it, also
//!   between the chunks of a prompt.
//! - A sequence whose turn has ended waits for its answer with its pages. Then it reads the answer after them.
//!
//! The tokens of a sequence do not depend on any decision made here.

use super::blocks::{BlockPools, BlockTables, PageCopy, held_max, pages_of};
pub use super::prefixes::Prefixes;
pub use super::sequence::{Chunk, Limits, Spec, cached_tokens_max, pages_wanted};
use super::sequence::{Group, Prefix, Sequence, State};
use crate::error::{Error, Result};
use crate::model::Kept;
use crate::ops::attention::PAGE;
use std::collections::VecDeque;
use std::ops::Range;

#[derive(Debug)]
pub struct Scheduler {
    pub(super) limits: Limits,
    pub(super) pools: BlockPools,
    pub(super) sequences: Vec<Sequence>,
    pub(super) groups: Vec<Group>,
    pub(super) waiting: VecDeque<usize>,
    /// The running sequences in order of admission, oldest first.
    pub(super) running: Vec<usize>,
    feeds: Vec<Chunk>,
    forks: Vec<usize>,
    pub(super) finished: usize,
    pub(super) finished_new_tokens: usize,
    /// The expected mean number of new tokens before any sequence has ended, and its weight.
    pub(super) expected_before: [f64; 2],
    pub(super) preemptions: usize,
    /// The number of sequences that wait for an answer without a slot.
    pub(super) awaiting_env: usize,
    /// Whether more sequences may be added (`add`) than the waiting ones.
    pub(super) is_open: bool,
    /// Whether all sequences of a batch count as long as the longest.
    pub(super) in_batches: bool,
    pub(super) prefixes: Prefixes,
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
            for group in &limits.pages {
                let pages = held_max(group.kept, spec.cached_max(), limits.prefill_tokens_max);
                if pages > group.pages {
                    let message = format!(
                        "a sequence of {} tokens needs {pages} KV pages of {PAGE} tokens, but the cache has {}",
                        spec.prompt_tokens + spec.new_tokens_max,
                        group.pages
                    );
                    return Err(Error::usage(message).hint("raise rollout.kv_bytes_max, or use shorter responses"));
                }
            }
            if groups.len() <= spec.group {
                groups.resize_with(spec.group + 1, Group::default);
            }
            groups[spec.group].fresh += 1;
            sequences.push(Sequence::new(spec, limits.pages.len()));
        }
        Ok(Self {
            pools: BlockPools::new(&limits.pages),
            expected_before: limits.expected_before(&sequences),
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
            in_batches: false,
            prefixes: Prefixes::default(),
            prefix_hit_tokens: 0,
        })
    }

    /// Whether some layers keep states, which prompts with the same beginning do not share.
    pub fn has_states(&self) -> bool {
        self.limits.pages.iter().any(|group| group.kept == Kept::State)
    }

    /// The copies of pages that are needed before the planned forward, in this order.
    pub fn take_copies(&mut self) -> Vec<PageCopy> {
        self.pools.take_copies()
    }

    /// Admits a sequence only if it fits at its maximum together with all others at theirs, because a plan runs only the first
    /// and the last step of each.
    pub fn admit_in_batches(&mut self) {
        self.in_batches = true;
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

    /// The sequence's pages.
    pub fn tables(&self, sequence: usize) -> &BlockTables {
        &self.sequences[sequence].tables
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

    /// Free pages of each cache group.
    pub fn free_pages(&self) -> Vec<usize> {
        (0..self.pools.len()).map(|group| self.pools.free(group)).collect()
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
        let mut rooms = self.rooms();
        while let Some(&s) = self.waiting.front() {
            if self.running.len() >= self.limits.batch_max {
                break;
            }
            // One sequence always runs. If it needs more than expected, no other one fits.
            if !self.take_room(s, &mut rooms) && !self.running.is_empty() {
                break;
            }
            self.waiting.pop_front();
            self.running.push(s);
            let spec = self.sequences[s].spec;
            self.sequences[s].tables.reserve(spec.pages_max());
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
                sequence.shared = sequence.spec.prompt_tokens / PAGE;
            }
            Prefix::Absent => sequence.shared = self.prefixes.common(sequence.spec.group),
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
        for s in self.running.clone() {
            // One that is preempted for an earlier one no longer runs.
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

    /// Removes a sequence from the next forward.
    pub(super) fn unplan(&mut self, s: usize) {
        self.running.retain(|&r| r != s);
        self.feeds.retain(|feed| feed.sequence != s);
    }

    /// Gives a sequence that reads its prompt the pages that others have read. Returns false if it has to wait for one.
    fn take_prefix(&mut self, s: usize) -> bool {
        let sequence = &mut self.sequences[s];
        let before = sequence.past;
        let goes_on = self.prefixes.take_pages(s, sequence, &mut self.pools);
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
        self.pools.cover(&mut self.sequences[s].tables, tokens).is_ok()
    }

    /// Same as `extend`, for a sequence whose next query is the last of the tokens.
    pub fn skip_to(&mut self, s: usize, tokens: usize) -> bool {
        self.pools.slide(&mut self.sequences[s].tables, tokens - 1);
        self.extend(s, tokens)
    }

    /// Entries of the sequence's block tables at its maximum length.
    pub fn pages_max(&self, s: usize) -> usize {
        self.sequences[s].spec.pages_max()
    }

    /// Records that the token fed to the sequence in a decode step is cached.
    pub fn decoded(&mut self, s: usize) {
        self.sequences[s].past += 1;
        self.slide(s);
    }

    /// Releases the pages that the sequence's next query does not see.
    fn slide(&mut self, s: usize) {
        let sequence = &mut self.sequences[s];
        self.pools.slide(&mut sequence.tables, sequence.past);
    }

    /// Records that the tokens of `feed` are cached. Returns whether the logits after the last token must be kept for
    /// the other samples of the group.
    pub fn fed(&mut self, feed: Chunk) -> bool {
        let sequence = &mut self.sequences[feed.sequence];
        sequence.past = feed.past + feed.tokens;
        self.prefixes.end(feed.sequence, sequence, feed.complete, &mut self.pools);
        self.pools.slide(&mut sequence.tables, sequence.past);
        if !(feed.complete && sequence.leads) {
            return false;
        }
        sequence.leads = false;
        let group = &mut self.groups[sequence.spec.group];
        let entries = pages_of(sequence.spec.prompt_tokens);
        group.prefix = Prefix::Ready(self.pools.share(&sequence.tables, entries));
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
        self.slide(s);
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

    /// Gives a forked sequence the pages of its prompt. Returns the pages to copy, if the last one is partial: those of
    /// each cache group, (from, to).
    pub fn share(&mut self, s: usize) -> Option<Vec<(u32, u32)>> {
        let group = self.sequences[s].spec.group;
        let copy = if self.sequences[s].state == State::Follower { self.share_pages(s, group) } else { None };
        if self.sequences[s].forks {
            self.settle(s);
        }
        copy
    }

    fn share_pages(&mut self, s: usize, group: usize) -> Option<Vec<(u32, u32)>> {
        let prompt_tokens = self.sequences[s].spec.prompt_tokens;
        self.sequences[s].state = State::Running;
        // If the prefix was released meanwhile, there is nothing to share, and the sequence reads its tokens itself.
        let Prefix::Ready(tables) = &self.groups[group].prefix else { return None };
        let full = prompt_tokens / PAGE;
        let partial = (tables.len() > full).then(|| tables.pages_at(full));
        let spec = self.sequences[s].spec;
        self.sequences[s].tables = self.pools.share(tables, full);
        self.sequences[s].shared = full;
        self.sequences[s].tables.reserve(spec.pages_max() - full);
        self.prefix_hit_tokens += prompt_tokens;
        let Some(from) = partial else {
            self.sequences[s].past = prompt_tokens;
            return None;
        };
        self.pools.retain(&from);
        let covered = self.cover(s, prompt_tokens);
        self.pools.release(&from);
        if !covered {
            return None;
        }
        self.sequences[s].past = prompt_tokens;
        let to = self.sequences[s].tables.pages_at(full);
        Some(from.into_iter().zip(to).collect())
    }

    /// Ends the sequence, and frees its slot and pages at once.
    pub fn finish(&mut self, s: usize) {
        self.finished += 1;
        self.finished_new_tokens += self.sequences[s].new_tokens();
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

    pub(super) fn release_blocks(&mut self, s: usize) {
        self.pools.clear(&mut self.sequences[s].tables);
    }

    fn drop_prefix(&mut self, group: usize) -> bool {
        let prefix = &mut self.groups[group].prefix;
        let Prefix::Ready(tables) = prefix else { return false };
        self.pools.clear(tables);
        *prefix = Prefix::Absent;
        true
    }

    /// Releases all kept prompts. Their later samples read them again.
    pub(super) fn drop_prefixes(&mut self) -> bool {
        (0..self.groups.len()).filter(|&group| self.drop_prefix(group)).count() > 0
    }
}
