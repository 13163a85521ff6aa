//! Ring flash attention (arXiv:2310.01889). Each rank of the sequence axis holds some tokens of every sequence
//! (`ops::zigzag`). Keys and values travel once around the ring, so that every query meets every key that it sees.
//!
//! Step s of S works on the block of rank r - s, while the block of the next step is in transfer. In the backward, the
//! gradients of a block travel one step after the block. This rank computes its contribution while the sum of the
//! preceding ranks arrives. After S steps the sum is back at its rank. Every rank passes every block on, even if its
//! queries do not see it, so no rank waits for a message that is not sent.
//!
//! On GPUs a step is one kernel in the forward and two in the backward. Every step computes the same half of t x t
//! pairs, with t rows per rank. With h query and g key/value heads of e values, the forward needs 2 h e t^2 flops for 4
//! g e t bytes of the next block. The backward needs 5 h e t^2 for 12 g e t bytes, as gradients are f32. At 190 TFLOP/s
//! and 200 GB/s, computing hides both transfers from t h/g = 2300 on.

use crate::comm::{Axes, Group, Pending, Stream};
use crate::ops::attention::{self, AttentionShape, Packed};
use crate::ops::residual;
use crate::ops::ring_attention::{self, Backward, Steps};
use crate::tensor::Tensor;
use std::sync::Arc;

/// The ranks that share each sequence, and the stream that passes blocks on while a step is computed.
#[derive(Clone, Debug)]
pub struct Ring {
    group: Group,
    stream: Arc<Stream>,
}

impl Ring {
    pub fn new(axes: &Axes) -> Self {
        Self { group: axes.sequence.clone(), stream: axes.ring_stream.clone() }
    }

    /// (o, lse) for this rank's rows q (t, h*e), k and v (t, g*e) of the packed row.
    pub fn forward(&self, packed: &Packed, shape: &AttentionShape, [q, k, v]: [&Tensor; 3]) -> (Tensor, Tensor) {
        let mut lse = q.statistics(q.rows(), shape.heads);
        if self.group.size() == 1 {
            let mut o = q.as_wide(q.rows());
            attention::forward_packed(q, k, v, packed, shape, &mut o, &mut lse);
            return (o, lse);
        }
        let Steps { steps, .. } = &*self.steps(packed, shape, q);
        let mut sum = q.statistics(q.rows(), q.width());
        let mut block = Arc::new(ring_attention::block(k, v));
        for (s, step) in steps.iter().enumerate() {
            let next = steps.get(s + 1).map(|next| self.pass(&block, next.block_rows()));
            ring_attention::forward(q, &block, step, &mut sum, &mut lse);
            if let Some(next) = next {
                block = Arc::new(next.wait());
            }
        }
        (ring_attention::rounded(sum), lse)
    }

    /// [dq, dk, dv]
    pub fn backward(
        &self,
        packed: &Packed,
        shape: &AttentionShape,
        [q, k, v]: [&Tensor; 3],
        [o, lse, d_o]: [&Tensor; 3],
    ) -> [Tensor; 3] {
        if self.group.size() == 1 {
            let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| x.as_wide(x.rows()));
            attention::backward_packed(q, k, v, o, lse, d_o, packed, shape, &mut dq, &mut dk, &mut dv);
            return [dq, dk, dv];
        }
        let Steps { steps, .. } = &*self.steps(packed, shape, q);
        let backward = Backward::new([q, o, lse, d_o], shape);
        let mut dq = q.statistics(q.rows(), q.width());
        let mut block = Arc::new(ring_attention::block(k, v));
        // The gradients of the step before, summed over the ranks that its block has passed.
        let mut sum: Option<Arc<Tensor>> = None;
        for (s, step) in steps.iter().enumerate() {
            let before = sum.take().map(|sum| self.pass(&sum, step.block_rows()));
            let next = steps.get(s + 1).map(|next| self.pass(&block, next.block_rows()));
            let mut dblock = backward.step(&block, step, &mut dq);
            if let Some(next) = next {
                block = Arc::new(next.wait());
            }
            if let Some(before) = before {
                residual::accumulate(before.wait().slice(), dblock.slice_mut());
            }
            sum = Some(Arc::new(dblock));
        }
        drop((block, backward));
        let sum = self.pass(&sum.expect("a ring has steps"), steps[0].block_rows());
        let dq = ring_attention::rounded(dq);
        let [dk, dv] = ring_attention::unblock(&sum.wait());
        [dq, dk, dv]
    }

    /// Starts to send `block` to the next rank and to receive a block of `rows` rows from the previous rank.
    fn pass(&self, block: &Arc<Tensor>, rows: usize) -> Pending<Tensor> {
        let (block, mut received) = (block.clone(), block.as_wide(rows));
        self.stream.submit(move |group| {
            group.shift_slice(block.slice(), received.slice_mut());
            received
        })
    }

    /// The steps of this rank, whose rows are those of q.
    fn steps(&self, packed: &Packed, shape: &AttentionShape, q: &Tensor) -> Arc<Steps> {
        let (rank, size) = (self.group.rank(), self.group.size());
        let steps = packed.ring(q.device(), shape, rank, size);
        assert_eq!(q.rows(), steps.rows, "rows of rank {rank} of {size} along the sequence axis");
        steps
    }
}
