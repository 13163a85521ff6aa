//! The gradient of a minibatch, cut in chunks and added up over the chunks of this rank.

use super::accumulate::{TreeSum, leaves};
use crate::comm::Group;
use crate::config::job::GradientConfig;
use crate::config::optim::GradientOrder;
use crate::error::{Error, Result};
use crate::model::Gradients;
use crate::tensor::arena::Buffer;

/// Chunks of a minibatch are what ranks own: one each under `order = "fast"`, a fixed number, summed as a binary tree,
/// under `order = "fixed"`.
pub struct GradientSum {
    /// Gradient of the chunk at work; after `finish`, the sum of this rank's chunks.
    pub grads: Gradients,
    pub order: GradientOrder,
    tree: TreeSum,
    fixed_chunks: usize,
}

impl GradientSum {
    /// # Errors
    /// `Usage` where `order = "fixed"` meets a number of ranks that is no power of two.
    pub fn new(grads: Gradients, config: &GradientConfig, ranks: usize) -> Result<Self> {
        if config.order == GradientOrder::Fixed && (!ranks.is_power_of_two() || config.chunks == 0) {
            return Err(Error::usage(format!(
                "gradient.order = \"fixed\" with {} chunks on {ranks} data ranks, needed a chunk and a power of two",
                config.chunks
            ))
            .hint("run on 1, 2, 4 ... ranks, or set gradient.order = \"fast\""));
        }
        let tree = TreeSum::new(grads.flat.len());
        Ok(Self { grads, order: config.order, tree, fixed_chunks: config.chunks })
    }

    /// Chunks that a minibatch is dealt to.
    pub fn chunks(&self, group: &Group) -> usize {
        match self.order {
            GradientOrder::Fast => group.size(),
            GradientOrder::Fixed => self.fixed_chunks,
        }
    }

    /// The chunks that this rank computes, as (leaf of the tree, chunk), in the order in which to compute them.
    pub fn own_chunks(&self, group: &Group) -> Vec<(usize, usize)> {
        match self.order {
            GradientOrder::Fast => vec![(group.rank(), group.rank())],
            GradientOrder::Fixed => leaves(self.fixed_chunks, group.rank(), group.size()),
        }
    }

    pub fn begin_chunk(&mut self) {
        self.grads.zero();
    }

    pub fn end_chunk(&mut self, leaf: usize) {
        if self.order == GradientOrder::Fixed {
            let next = Buffer::scratch(self.grads.flat.len());
            self.tree.add(leaf, std::mem::replace(&mut self.grads.flat, next));
        }
    }

    /// After all own chunks: `grads.flat` is their sum. What is left to do is the sum over ranks.
    pub fn finish(&mut self) {
        if self.order == GradientOrder::Fixed {
            let len = self.grads.flat.len();
            self.grads.flat = std::mem::replace(&mut self.tree, TreeSum::new(len)).finish();
        }
    }
}
