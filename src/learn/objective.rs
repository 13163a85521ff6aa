//! What a method wants from a minibatch: the interface between losses and the learner.

use super::head_pass::Pass;
use super::packed::PackedRow;
use super::role::Role;
use super::sums::Sums;
use crate::metrics::keys;

/// The loss of a minibatch: a sum over its rows, which the learner splits into micro-batches.
pub trait Objective {
    /// The number of tokens of each row of the minibatch, the same on all ranks.
    fn lengths(&self) -> Vec<usize>;

    /// Packs the given rows of the minibatch, one after the other.
    fn pack(&self, rows: &[usize]) -> PackedRow;

    /// Runs `pass` over a micro-batch, which may be empty. Returns this rank's share of the measurements, with the loss
    /// under `loss_key`.
    fn loss(&self, batch: &MicroBatch, pass: Pass) -> Sums;

    /// The frozen models whose forwards `loss` runs before `pass`, in this order. Other stages than the last run them too.
    fn frozen(&self) -> Vec<&Role> {
        Vec::new()
    }

    /// The key of the loss in the sums.
    fn loss_key(&self) -> &'static str {
        keys::LOSS
    }
}

/// Packed rows of a minibatch.
pub struct MicroBatch<'a> {
    /// Indices of the rows in the minibatch.
    pub rows: &'a [usize],
    pub whole: &'a PackedRow,
    /// This rank's part of `whole`.
    pub own: &'a PackedRow,
}
