//! Each rank's share of prompts and responses.

use crate::comm::{Axes, Group, Next, records};
use crate::device::cpu::pool::share;
use crate::experience::{Prompt, Response};
use crate::launch::run::Run;
use crate::reward::Reward;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

/// A response: the index of its prompt in the batch, and its number among the samples of that prompt.
pub type Key = (usize, u32);

/// An equal share of `part` for this rank. Ranks that share its matrices in the rollout have the same share.
pub fn prompts_of(run: &Run, part: &Range<usize>) -> Range<usize> {
    let own = share_of(part.len(), &run.ranks.rollout_axes.zero);
    part.start + own.start..part.start + own.end
}

/// The prompts that a group of ranks with one model may claim.
pub struct PromptQueue {
    /// The number of prompts in an equal share.
    pub own: usize,
    pub prompts: Range<usize>,
    /// Whether other ranks take prompts from the same range.
    is_shared: bool,
}

impl PromptQueue {
    /// `steals`: whether ranks may claim prompts of others at all.
    pub fn new(run: &Run, part: &Range<usize>, steals: bool) -> Self {
        let own = prompts_of(run, part);
        let steals = steals && run.config.rollout.work_stealing && !run.config.reward.compares_all();
        let is_shared = steals && run.ranks.rollout_axes.zero.size() > 1;
        Self { own: own.len(), prompts: if is_shared { part.clone() } else { own }, is_shared }
    }

    /// Runs `work` with a function that returns the next prompt for this rank. Ranks that share its matrices call it
    /// together.
    pub fn claim<T>(&self, axes: &Axes, all: &RefCell<ClaimedPrompts>, work: impl FnOnce(NextPrompt) -> T) -> T {
        let work = |next: &mut Next| {
            let mut next = || {
                let taken = records::of_first(&axes.tensor, &mut *next);
                let prompt = self.prompts.start + taken?;
                all.borrow_mut().claim(prompt);
                Some(prompt)
            };
            let found = work(&mut next);
            // After a stop, finished responses to prompts that no rank has taken must still go to some rank.
            while next().is_some() {}
            all.borrow_mut().reward.flush();
            found
        };
        if self.is_shared && axes.tensor.rank() == 0 {
            return axes.zero.with_queue(self.prompts.len(), work);
        }
        let mut own = 0..self.prompts.len();
        work(&mut || own.next())
    }
}

type NextPrompt<'a> = &'a mut dyn FnMut() -> Option<usize>;

/// This rank's share of results that all ranks of `tensor` hold identically. The shares hold each result exactly once
/// over the mesh, in order.
pub fn own_share<T>(mut all: Vec<T>, tensor: &Group) -> Vec<T> {
    all.drain(share_of(all.len(), tensor)).collect()
}

/// This rank's share of `count` items that are divided among a group.
pub fn share_of(count: usize, group: &Group) -> Range<usize> {
    share(count, 1, group.rank(), group.size())
}

/// Reserves positions in the reward for the responses `keys`, and returns the first one.
pub fn expect(reward: &mut Reward, pending_keys: &mut Vec<Key>, keys: impl Iterator<Item = Key>) -> usize {
    let before = pending_keys.len();
    pending_keys.extend(keys);
    reward.expect(pending_keys.len() - before)
}

/// The prompts of one step among the prompts of a phase.
pub struct StepSlice {
    /// The step that keys the random numbers.
    pub step: u32,
    pub prompts: Range<usize>,
    /// The maximum number of tokens of their responses after the phase. Longer responses continue in a later phase.
    pub tokens_max: usize,
}

impl StepSlice {
    /// All prompts of a step, with complete responses.
    pub fn whole(step: u32, prompts: usize) -> Self {
        Self { step, prompts: 0..prompts, tokens_max: usize::MAX }
    }
}

/// The prompts taken by a group of ranks with one model, and their responses on the way to the reward.
pub struct ClaimedPrompts<'a> {
    pub reward: &'a mut Reward,
    /// See `Collector`.
    pub pending_keys: &'a mut Vec<Key>,
    pub prompts: &'a [Prompt],
    /// The number of responses to each prompt.
    pub of_each: usize,
    /// The responses that were done before, to any prompt.
    pub done: &'a [Response],
    /// The ranks that send the responses to the reward, one prompt each in turn. `None` if rewards are on other ranks.
    pub streams: Option<Group>,
    /// For each prompt taken, the position of its first response in the reward, if this rank sends it.
    pub places: HashMap<usize, Option<usize>>,
    /// Prompts before this index get complete responses. The others continue in a later phase.
    pub whole: usize,
}

impl ClaimedPrompts<'_> {
    pub fn claim(&mut self, prompt: usize) {
        let turn = self.places.len();
        let is_own = self.streams.as_ref().is_some_and(|ranks| turn % ranks.size() == ranks.rank());
        let is_own = is_own && prompt < self.whole;
        let keys = (0..self.of_each as u32).map(|sample| (prompt, sample));
        let first = is_own.then(|| expect(self.reward, self.pending_keys, keys));
        self.places.insert(prompt, first);
        let of_each = self.of_each;
        let is_wanted = |r: &&Response| r.prompt == prompt && (r.sample as usize) < of_each;
        for response in self.done.iter().filter(is_wanted) {
            self.push(response);
        }
    }

    /// All responses to the prompts taken, including the new ones in `drawn`, in order, and whether none is missing.
    pub fn with_done(&self, drawn: impl Iterator<Item = Response>) -> (Vec<Response>, bool) {
        let is_own = |r: &&Response| self.places.contains_key(&r.prompt) && (r.sample as usize) < self.of_each;
        let mut all: Vec<Response> = drawn.chain(self.done.iter().filter(is_own).cloned()).collect();
        all.sort_by_key(|response| (response.prompt, response.sample));
        let is_complete = all.len() == self.places.len() * self.of_each;
        (all, is_complete)
    }

    /// Sends a response to the reward, if that is this rank's task.
    pub fn push(&mut self, response: &Response) {
        if let Some(Some(first)) = self.places.get(&response.prompt) {
            self.reward.push(first + response.sample as usize, &self.prompts[response.prompt], response);
        }
    }
}
