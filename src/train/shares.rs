//! What each rank takes of prompts and responses.

use crate::comm::Group;
use crate::device::cpu::pool::share;
use crate::launch::run::Run;
use std::ops::Range;

/// The prompts of `part` that this rank answers: ranks that share its matrices in the rollout answer the same.
pub fn prompts_of(run: &Run, part: &Range<usize>) -> Range<usize> {
    let sharing = &run.ranks.rollout_axes.zero;
    let own = share(part.len(), 1, sharing.rank(), sharing.size());
    part.start + own.start..part.start + own.end
}

/// This rank's share of results that all ranks of `tensor` hold identically: with it each result is on one rank of the mesh, in order.
pub fn own_share<T>(mut all: Vec<T>, tensor: &Group) -> Vec<T> {
    all.drain(share_of(all.len(), tensor)).collect()
}

/// What this rank takes of `count` things that are divided among a group.
pub fn share_of(count: usize, group: &Group) -> Range<usize> {
    share(count, 1, group.rank(), group.size())
}
