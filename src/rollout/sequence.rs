//! Limits of the KV cache and of a forward, and the scheduler's state of a sequence and of the samples of a prompt.

use super::blocks::{BlockTables, GroupPages, held_max, pages_of};
use crate::model::Kept;
use crate::sys::trace::{self, Category};

#[derive(Clone, Debug)]
pub struct Limits {
    /// Sequences running at once.
    pub batch_max: usize,
    /// Prompt tokens in one forward.
    pub prefill_tokens_max: usize,
    /// Pages of the KV cache, for each cache group.
    pub pages: Vec<GroupPages>,
    /// Mean number of new tokens of earlier sequences, if there were any.
    pub new_tokens_before: Option<usize>,
}

/// The weight of the expectation before any sequence has ended, in sequences, if there were no earlier ones.
const WEIGHT_UNKNOWN: f64 = 2.0;

/// The share of the mean that a sequence near or beyond it is expected to have left.
const REMAINDER: f64 = 0.2;

impl Limits {
    /// The mean number of new tokens that these sequences are expected to have before any has ended, and its weight.
    pub(super) fn expected_before(&self, sequences: &[Sequence]) -> [f64; 2] {
        let count = sequences.len().max(1) as f64;
        let longest = sequences.iter().map(|sequence| sequence.spec.new_tokens_max as f64).sum::<f64>() / count;
        self.new_tokens_before.map_or([longest / 2.0, WEIGHT_UNKNOWN], |mean| [mean as f64, count])
    }
}

/// The new tokens that a sequence is expected to have after `n`, if the mean is μ and the maximum `max`:
///
/// r(n) = min(max(μ - n, 0.2 μ), max - n)
pub(super) fn remainder(mean: f64, n: usize, max: usize) -> usize {
    let rest = (mean - n as f64).max(REMAINDER * mean);
    (rest.ceil() as usize).clamp(1, max.saturating_sub(n).max(1))
}

/// A sequence's share of a forward: `tokens` tokens after the `past` cached ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub sequence: usize,
    pub past: usize,
    pub tokens: usize,
    /// Whether the forward reaches the sequence's last token, so that the next one can be sampled.
    pub complete: bool,
}

impl Chunk {
    /// Begins the forward of `feeds`: returns whether it is a decode step, and its span in a trace.
    pub fn begin(feeds: &[Self]) -> (bool, trace::Open) {
        let decodes = feeds.iter().all(|feed| feed.tokens == 1 && feed.past > 0);
        let sizes = || [feeds.iter().map(|feed| feed.tokens).sum(), feeds.len()];
        let name = if decodes { "decode" } else { "prefill" };
        (decodes, trace::span(Category::Pass, name, "tokens sequences", sizes))
    }
}

/// The scheduler's input for a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Sequences with the same group number have the same prompt.
    pub group: usize,
    pub prompt_tokens: usize,
    pub new_tokens_max: usize,
}

impl Spec {
    /// The maximum number of cached tokens.
    pub fn cached_max(&self) -> usize {
        cached_tokens_max(self.prompt_tokens, self.new_tokens_max)
    }

    /// Entries of its block tables at its maximum length.
    pub fn pages_max(&self) -> usize {
        pages_of(self.cached_max())
    }
}

/// The maximum number of cached tokens: the last new token is never fed.
pub fn cached_tokens_max(prompt_tokens: usize, new_tokens_max: usize) -> usize {
    prompt_tokens + new_tokens_max.max(1) - 1
}

/// The number of pages of a cache group with which none of these sequences ever waits for another, with `batch_max` of
/// them at once. These are the pages of the longest sequences at maximum length and, for each prompt that several
/// samples share, its partial last page. That page is kept for samples that have not begun when the one that read it
/// ends.
///
/// With states, a sequence needs one page. With a window, a sequence needs the pages of its window. The chunks that one forward reads need pages of their own,
/// and so does a prompt whose other samples wait for a slot.
pub fn pages_wanted(
    specs: impl IntoIterator<Item = Spec>,
    kept: Kept,
    batch_max: usize,
    prefill_tokens_max: usize,
) -> usize {
    let (mut needs, mut samples): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    for spec in specs {
        needs.push(spec.pages_max());
        if samples.len() <= spec.group {
            samples.resize(spec.group + 1, 0);
        }
        samples[spec.group] += 1;
    }
    needs.sort_unstable_by(|a, b| b.cmp(a));
    let slots = needs.len().min(batch_max);
    let shared = samples.into_iter().filter(|samples| *samples > 1).count();
    let whole = needs[..slots].iter().sum::<usize>() + shared.min(slots);
    if kept == Kept::All {
        return whole;
    }
    let held = held_max(kept, usize::MAX, 1);
    let prompt = if shared > 0 { held } else { 0 };
    let in_windows: usize = needs[..slots].iter().map(|pages| *pages.min(&held)).sum();
    let reading = if kept == Kept::State { 0 } else { chunk_pages(prefill_tokens_max) };
    whole.min(in_windows + shared.min(slots) + prompt + reading)
}

/// Pages of a group with a window for the tokens that one forward reads, in addition to those of windows.
pub(super) fn chunk_pages(prefill_tokens_max: usize) -> usize {
    pages_of(prefill_tokens_max) + 1
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Waiting,
    /// Has a slot, and waits until another sample of its group has read the prompt.
    Follower,
    Running,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub spec: Spec,
    pub state: State,
    /// Prompt and new tokens so far.
    pub length: usize,
    /// Tokens in the cache.
    pub past: usize,
    pub tables: BlockTables,
    /// The number of leading entries of the tables that other sequences may hold, too.
    pub shared: usize,
    /// Reads the prompt for its group.
    pub leads: bool,
    /// Samples its first token from the group's prompt logits, and has yet to end or to take its share of the pages.
    pub forks: bool,
    /// Waits for its answer and is not fed. It keeps its slot and pages unless another sequence needs them.
    pub waits: bool,
}

impl Sequence {
    pub fn new(spec: Spec, groups: usize) -> Self {
        let (state, length, tables) = (State::Waiting, spec.prompt_tokens, BlockTables::new(groups));
        Self { spec, state, length, past: 0, tables, shared: 0, leads: false, forks: false, waits: false }
    }

    /// New tokens so far.
    pub fn new_tokens(&self) -> usize {
        self.length - self.spec.prompt_tokens
    }

    /// Waits for a slot, and then reads all its tokens.
    pub fn restart(&mut self) {
        (self.state, self.past, self.shared) = (State::Waiting, 0, 0);
    }
}

#[derive(Debug, Default)]
pub(super) enum Prefix {
    #[default]
    Absent,
    /// Being read by the group's leader.
    Pending,
    /// Pages of the whole prompt, held for the samples that have not begun.
    Ready(BlockTables),
}

#[derive(Debug, Default)]
pub(super) struct Group {
    /// Samples that may still need the prompt's pages.
    pub fresh: usize,
    pub prefix: Prefix,
}
