//! The gradient of a minibatch, cut in chunks and added up over the chunks of this rank, then over ranks.

use super::tree_sum::TreeSum;
use crate::comm::Axes;
use crate::config::job::GradientConfig;
use crate::config::optim::GradientOrder;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::model::Gradients;
use crate::model::params::ParamTable;
use crate::model::partition::Shards;
use std::sync::Arc;

/// Chunks of a minibatch are what ranks own: one each under `order = "fast"`, a fixed number, summed as a binary tree,
/// under `order = "fixed"`.
///
/// A minibatch: for each own chunk `begin_chunk`, for each of its micro-batches `begin_microbatch` and a backward that adds
/// to `grads`, then `end_chunk`; after all, `finish`. Several models do so in the same order on all ranks. Where gradients
/// are sharded (stages 2 and 3), every rank has as many micro-batches, if of no tokens.
pub struct GradientSum {
    /// Gradient of the chunk at work; after `finish`, the sum over all ranks.
    pub grads: Gradients,
    pub order: GradientOrder,
    /// By unit.
    trees: Vec<TreeSum>,
    /// Chunks that a minibatch is dealt to under `order = "fixed"`.
    pub fixed_chunks: usize,
}

impl GradientSum {
    /// # Errors
    /// `Usage` where `order = "fixed"` meets a number of ranks that is no power of two, or a layout that shards more than state.
    pub fn new(table: &Arc<ParamTable>, config: &GradientConfig, shards: &Shards, axes: &Axes) -> Result<Self> {
        let ranks = axes.data.size();
        if config.order == GradientOrder::Fixed && !ranks.is_power_of_two() {
            let chunks = config.chunks;
            return Err(Error::usage(format!(
                "gradient.order = \"fixed\" with {chunks} chunks on {ranks} data ranks, needed a chunk and a power of two"
            ))
            .hint("run on 1, 2, 4 ... ranks, or set gradient.order = \"fast\""));
        }
        let mesh = Mesh { data: ranks, pipeline: 1, sequence: axes.sequence.size(), tensor: axes.tensor.size() };
        config.check_layout(&mesh, if shards.gradients() { shards.stage() } else { 0 })?;
        let grads = Gradients::over(table.clone(), shards);
        let tree = |unit| TreeSum::new(table.device(), shards.partition.padded_len(unit));
        let trees = (0..table.units().len()).map(tree).collect();
        Ok(Self { grads, order: config.order, trees, fixed_chunks: config.chunks })
    }

    pub fn begin_chunk(&mut self) {
        self.grads.zero();
    }

    /// A forward and backward follow, all of whose gradients go to the chunk at work. `last`: the minibatch has no more of
    /// them on this rank.
    pub fn begin_microbatch(&mut self, last: bool) {
        self.grads.begin_microbatch(last && self.order == GradientOrder::Fast);
    }

    /// Puts the gradient of the chunk at its leaf. The next one takes memory when it begins, so that none is held where none comes.
    pub fn end_chunk(&mut self, leaf: usize) {
        if self.order == GradientOrder::Fast {
            self.grads.seal(self.order);
        } else {
            for (u, tree) in self.trees.iter_mut().enumerate() {
                tree.add(leaf, self.grads.take(u));
            }
        }
    }

    /// After all own chunks: sums over ranks. `grads.own` is then what this rank updates by. A collective.
    pub fn finish(&mut self) {
        if self.order == GradientOrder::Fixed {
            for (u, tree) in self.trees.iter_mut().enumerate() {
                self.grads.replace(u, tree.finish());
            }
        }
        self.grads.reduce(self.order);
    }
}
