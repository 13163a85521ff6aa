//! The gradient of a minibatch, split into chunks and summed over the chunks of this rank, then over ranks.

use super::tree_sum::TreeSum;
use crate::comm::{Axes, Group};
use crate::config::job::GradientConfig;
use crate::config::optim::GradientOrder;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::model::Gradients;
use crate::model::params::ParamTable;
use crate::model::partition::Shards;
use std::sync::Arc;

/// A chunk of a minibatch belongs to one rank. Under `order = "fast"` each rank has one chunk. Under `order = "fixed"`
/// there is a fixed number of chunks, summed as a binary tree.
///
/// The calls for a minibatch: for each own chunk `begin_chunk`, then for each of its micro-batches `begin_microbatch`
/// and a backward that adds to `grads`, then `end_chunk`. After all chunks, `finish`. Several models do so in the same
/// order on all ranks. If gradients are sharded (stages 2 and 3), every rank has the same number of micro-batches, some
/// possibly empty.
pub struct GradientSum {
    /// Gradient of the current chunk. After `finish`, the sum over all ranks.
    pub grads: Gradients,
    pub order: GradientOrder,
    /// One tree per unit.
    trees: Vec<TreeSum>,
    /// The number of chunks of a minibatch under `order = "fixed"`.
    pub fixed_chunks: usize,
}

impl GradientSum {
    /// # Errors
    /// `Usage` if `order = "fixed"` and the number of ranks is not a power of two, or the layout shards more than
    /// optimizer state.
    pub fn new(table: &Arc<ParamTable>, config: &GradientConfig, shards: &Shards, axes: &Axes) -> Result<Self> {
        let ranks = axes.data.size();
        if config.order == GradientOrder::Fixed && !ranks.is_power_of_two() {
            let chunks = config.chunks;
            return Err(Error::usage(format!(
                "gradient.order = \"fixed\" needs a power of two of data ranks (got {ranks}, with gradient.chunks = \
                 {chunks})"
            ))
            .hint("run on 1, 2, 4 ... ranks, or set gradient.order = \"fast\""));
        }
        if config.order == GradientOrder::Fixed && axes.pipeline.size() > 1 && table.is_tied() {
            let message = "gradient.order = \"fixed\" needs mesh.pipeline = 1 for a model whose head is its embedding";
            return Err(Error::usage(format!("{message} (got {})", axes.pipeline.size()))
                .hint("set gradient.order = \"fast\": the gradients of embedding and head are sums of two stages"));
        }
        let [sequence, tensor, expert] = [&axes.sequence, &axes.tensor, &axes.expert].map(Group::size);
        let mesh = Mesh { data: ranks, pipeline: 1, sequence, tensor, expert };
        config.check_layout(&mesh, if shards.gradients() { shards.stage() } else { 0 })?;
        let grads = Gradients::for_shards(table.clone(), shards);
        let tree = |unit| TreeSum::new(table.device(), shards.partition.padded_len(unit));
        let trees = (0..table.units().len()).map(tree).collect();
        Ok(Self { grads, order: config.order, trees, fixed_chunks: config.chunks })
    }

    pub fn begin_chunk(&mut self) {
        self.grads.zero();
    }

    /// Called before a forward and backward, all of whose gradients go to the current chunk. `last`: this is the last
    /// one of the minibatch on this rank.
    pub fn begin_microbatch(&mut self, last: bool) {
        self.grads.begin_microbatch(last && self.order == GradientOrder::Fast);
    }

    /// Puts the gradient of the chunk at its leaf. The next chunk allocates memory when it begins, so the last one
    /// leaves none allocated.
    pub fn end_chunk(&mut self, leaf: usize) {
        if self.order == GradientOrder::Fast {
            self.grads.seal(self.order);
        } else {
            for (u, tree) in self.trees.iter_mut().enumerate() {
                tree.add(leaf, self.grads.take_unit(u));
            }
        }
    }

    /// Sums over ranks, after all own chunks. `grads.own` is then the gradient that this rank updates with. A
    /// collective.
    pub fn finish(&mut self) {
        if self.order == GradientOrder::Fixed {
            for (u, tree) in self.trees.iter_mut().enumerate() {
                self.grads.replace(u, tree.finish());
            }
        }
        self.grads.reduce(self.order);
    }
}
