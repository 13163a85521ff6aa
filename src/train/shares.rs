//! What each rank takes of prompts and responses.

use crate::comm::{Axes, Group, Next, records};
use crate::device::cpu::pool::share;
use crate::device::null;
use crate::experience::{Prompt, Response};
use crate::launch::run::Run;
use crate::reward::Reward;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

/// A response: the index of its prompt in the batch, and its number among the samples of that.
pub type Key = (usize, u32);

/// An equal share of `part` for this rank: ranks that share its matrices in the rollout have the same.
pub fn prompts_of(run: &Run, part: &Range<usize>) -> Range<usize> {
    let own = share_of(part.len(), &run.ranks.rollout_axes.zero);
    part.start + own.start..part.start + own.end
}

/// What ranks with a model between them may take of the prompts.
pub struct Offer {
    /// Prompts of an equal share.
    pub own: usize,
    pub prompts: Range<usize>,
    /// Other ranks take of the same prompts.
    is_shared: bool,
}

impl Offer {
    /// `steals`: whether ranks may take others' prompts at all.
    pub fn new(run: &Run, part: &Range<usize>, steals: bool) -> Self {
        let own = prompts_of(run, part);
        let steals = steals && run.config.rollout.work_stealing && !run.config.reward.compares_all();
        let is_shared = steals && run.ranks.rollout_axes.zero.size() > 1 && !null::is_active();
        Self { own: own.len(), prompts: if is_shared { part.clone() } else { own }, is_shared }
    }

    /// `work` with what gives the next prompt that this rank is to answer. Ranks that share its matrices ask together.
    pub fn take<T>(&self, axes: &Axes, all: &RefCell<TakenPrompts>, work: impl FnOnce(NextPrompt) -> T) -> T {
        let work = |next: &mut Next| {
            let mut next = || {
                // A null device has no first rank to ask.
                let taken = if null::is_active() { next() } else { records::of_first(&axes.tensor, &mut *next) };
                let prompt = self.prompts.start + taken?;
                all.borrow_mut().take(prompt);
                Some(prompt)
            };
            let found = work(&mut next);
            // Behind a stop, what is done of prompts that no rank has taken is still some rank's.
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

/// This rank's share of results that all ranks of `tensor` hold identically: with it each result is on one rank of the mesh, in order.
pub fn own_share<T>(mut all: Vec<T>, tensor: &Group) -> Vec<T> {
    all.drain(share_of(all.len(), tensor)).collect()
}

/// What this rank takes of `count` things that are divided among a group.
pub fn share_of(count: usize, group: &Group) -> Range<usize> {
    share(count, 1, group.rank(), group.size())
}

/// Makes places in the reward for the responses `keys`; the first of them.
pub fn expect(reward: &mut Reward, asked: &mut Vec<Key>, keys: impl Iterator<Item = Key>) -> usize {
    let before = asked.len();
    asked.extend(keys);
    reward.expect(asked.len() - before)
}

/// Prompts of one step among those that a phase answers.
pub struct Piece {
    /// That keys the draws.
    pub step: u32,
    pub prompts: Range<usize>,
    /// Tokens that their responses have at most behind the phase: those that are longer go on in a later one.
    pub tokens_max: usize,
}

impl Piece {
    /// All prompts of a step, and their responses whole.
    pub fn whole(step: u32, prompts: usize) -> Self {
        Self { step, prompts: 0..prompts, tokens_max: usize::MAX }
    }
}

/// The prompts that ranks with a model between them have taken, and their responses on the way to the reward.
pub struct TakenPrompts<'a> {
    pub reward: &'a mut Reward,
    /// As in `Collector`.
    pub asked: &'a mut Vec<Key>,
    pub prompts: &'a [Prompt],
    /// Responses of each prompt.
    pub of_each: usize,
    /// Which ones were there before, of any prompt.
    pub done: &'a [Response],
    /// The ranks that hand the responses over, a prompt each in turn; none where rewards are on other ranks.
    pub streams: Option<Group>,
    /// Of each prompt that was taken the place of its first response, where this rank hands it over.
    pub places: HashMap<usize, Option<usize>>,
    /// Prompts before this one are answered whole, the others go on in a later phase.
    pub whole: usize,
}

impl TakenPrompts<'_> {
    pub fn take(&mut self, prompt: usize) {
        let turn = self.places.len();
        let is_own = self.streams.as_ref().is_some_and(|ranks| turn % ranks.size() == ranks.rank());
        let is_own = is_own && prompt < self.whole;
        let keys = (0..self.of_each as u32).map(|sample| (prompt, sample));
        let first = is_own.then(|| expect(self.reward, self.asked, keys));
        self.places.insert(prompt, first);
        let of_each = self.of_each;
        let is_wanted = |r: &&Response| r.prompt == prompt && (r.sample as usize) < of_each;
        for response in self.done.iter().filter(is_wanted) {
            self.push(response);
        }
    }

    /// The responses to these prompts, of which `drawn` are new, in order; and whether none is missing.
    pub fn with_done(&self, drawn: impl Iterator<Item = Response>) -> (Vec<Response>, bool) {
        let is_own = |r: &&Response| self.places.contains_key(&r.prompt) && (r.sample as usize) < self.of_each;
        let mut all: Vec<Response> = drawn.chain(self.done.iter().filter(is_own).cloned()).collect();
        all.sort_by_key(|response| (response.prompt, response.sample));
        let is_complete = all.len() == self.places.len() * self.of_each;
        (all, is_complete)
    }

    /// Hands a response to the reward, where that is this rank's to do.
    pub fn push(&mut self, response: &Response) {
        if let Some(Some(first)) = self.places.get(&response.prompt) {
            self.reward.push(first + response.sample as usize, &self.prompts[response.prompt], response);
        }
    }
}
