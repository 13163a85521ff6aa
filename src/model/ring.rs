//! Ring flash attention (arXiv:2310.01889): each rank of the sequence axis holds some tokens of every sequence
//! (`ops::zigzag`); their keys and values go once around, so that every query meets every key that it sees.
//!
//! Step s of S works on the block of rank r - s, while the block of the next step is under way. The backward sends the
//! gradients of a block one step behind it: what this rank adds is computed while the sum of the ranks before it comes
//! in, and after S steps the sum is home. Every rank passes every block on, whether it sees of it or not, so that none
//! waits for a message that does not come.

use crate::comm::{Axes, Group, Pending, Stream};
use crate::ops::attention::{self, AttentionShape, Packed, Span};
use crate::ops::{ring_attention, zigzag};
use crate::tensor::Tensor;
use crate::tensor::arena::Buffer;
use std::sync::Arc;

/// The ranks that share each sequence, and what passes blocks around while a step is computed.
#[derive(Clone, Debug)]
pub(super) struct Ring {
    group: Group,
    stream: Arc<Stream>,
}

/// One step: what this rank's rows see of the step's block, and the length of that block.
struct Step {
    waves: Vec<Vec<Span>>,
    len: usize,
}

impl Ring {
    pub(super) fn new(axes: &Axes) -> Self {
        Self { group: axes.sequence.clone(), stream: axes.ring_stream.clone() }
    }

    /// (o, lse) of this rank's rows q (t, h*e), k and v (t, g*e) of the row that `cu_seqlens` cuts.
    pub(super) fn forward(
        &self,
        packed: &Packed,
        shape: &AttentionShape,
        [q, k, v]: [&Tensor; 3],
        o: &mut Tensor,
        lse: &mut Tensor,
    ) {
        if self.group.size() == 1 {
            attention::forward_packed(q, k, v, packed, shape, o, lse);
            return;
        }
        let steps = self.steps(packed.cu_seqlens, shape, q.rows());
        ring_attention::begin(o, lse);
        let mut block = Arc::new(ring_attention::block(k, v));
        for (s, step) in steps.iter().enumerate() {
            let next = steps.get(s + 1).map(|next| self.pass(&block, next.len));
            ring_attention::forward(q, &block, &step.waves, shape, o, lse);
            if let Some(next) = next {
                block = Arc::new(next.wait());
            }
        }
    }

    /// Overwrites [dq, dk, dv].
    pub(super) fn backward(
        &self,
        packed: &Packed,
        shape: &AttentionShape,
        [q, k, v]: [&Tensor; 3],
        [o, lse, d_o]: [&Tensor; 3],
        [dq, dk, dv]: [&mut Tensor; 3],
    ) {
        if self.group.size() == 1 {
            attention::backward_packed(q, k, v, o, lse, d_o, packed, shape, dq, dk, dv);
            return;
        }
        let steps = self.steps(packed.cu_seqlens, shape, q.rows());
        dq.data_mut().fill(0.0);
        let mut block = Arc::new(ring_attention::block(k, v));
        // The gradients of the step before, of all ranks that its block has come by.
        let mut sum: Option<Arc<Buffer>> = None;
        for (s, step) in steps.iter().enumerate() {
            let before = sum.take().map(|sum| self.pass(&sum, step.len));
            let next = steps.get(s + 1).map(|next| self.pass(&block, next.len));
            let mut dblock = Buffer::zeros(step.len);
            ring_attention::backward([q, o, lse, d_o], &block, &step.waves, shape, dq, &mut dblock);
            if let Some(next) = next {
                block = Arc::new(next.wait());
            }
            if let Some(before) = before {
                ring_attention::add(&before.wait(), &mut dblock);
            }
            sum = Some(Arc::new(dblock));
        }
        drop(block);
        let home = self.pass(&sum.expect("a ring has steps"), steps[0].len);
        ring_attention::unblock(&home.wait(), dk, dv);
    }

    /// Begins to send `block` to the next rank and to receive `len` values from the one before.
    fn pass(&self, block: &Arc<Buffer>, len: usize) -> Pending<Buffer> {
        let (block, mut received) = (block.clone(), Buffer::scratch(len));
        self.stream.submit(move |groups| {
            groups[0].shift(&block, &mut received);
            received
        })
    }

    /// The steps of this rank, whose `rows` rows are its part of the row.
    fn steps(&self, cu_seqlens: &[usize], shape: &AttentionShape, rows: usize) -> Vec<Step> {
        let (rank, size) = (self.group.rank(), self.group.size());
        let tokens = zigzag::tokens(cu_seqlens, rank, size);
        assert_eq!(rows, tokens, "rows of rank {rank} of {size} along the sequence axis");
        let queries = zigzag::pieces(cu_seqlens, rank, size);
        let step = |s: usize| {
            let from = (rank + size - s) % size;
            let waves = zigzag::waves(&queries, &zigzag::pieces(cu_seqlens, from, size), shape);
            Step { waves, len: ring_attention::block_len(zigzag::tokens(cu_seqlens, from, size), shape) }
        };
        (0..size).map(step).collect()
    }
}
