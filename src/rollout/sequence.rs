//! What the scheduler keeps of a sequence, and of the samples of a prompt.

use super::spec::Spec;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Waiting,
    /// Has a slot, and waits for another sample of its group to have read the prompt.
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
    pub blocks: Vec<u32>,
    /// Reads the prompt for its group.
    pub leads: bool,
    /// Draws its first token from the group's prompt logits, and is still to end or to take its share of the pages.
    pub forks: bool,
    /// Is not fed until it has its answer: it keeps its slot and pages where no other one needs these.
    pub waits: bool,
}

impl Sequence {
    pub fn new(spec: Spec) -> Self {
        let (state, length, blocks) = (State::Waiting, spec.prompt_tokens, Vec::new());
        Self { spec, state, length, past: 0, blocks, leads: false, forks: false, waits: false }
    }
}

#[derive(Debug, Default)]
pub(super) enum Prefix {
    #[default]
    Absent,
    /// Being read by the group's leader.
    Pending,
    /// Pages of the whole prompt, held for the samples that have not begun.
    Ready(Vec<u32>),
}

#[derive(Debug, Default)]
pub(super) struct Group {
    /// Samples that may still need the prompt's pages.
    pub fresh: usize,
    pub prefix: Prefix,
}
