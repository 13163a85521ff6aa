//! Ring flash attention: each rank of the sequence axis holds some tokens of every sequence (`ops::zigzag`); their keys
//! and values go once around, so that every query meets every key that it sees.
//!
//! Step s of S works on the block of rank r - s, while the block of the next step is under way. The backward sends the
//! gradients of a block one step behind it: what this rank adds is computed while the sum of the ranks before it comes
//! in, and after S steps the sum is home. Every rank passes every block, whether it sees of it or not, so that none waits
//! for a message that does not come.

use crate::comm::Ring;
use crate::ops::attention::{self, AttentionShape, Span};
use crate::ops::{residual, ring_attention, zigzag};
use crate::tensor::Tensor;
use crate::tensor::arena::Buffer;
use std::sync::Arc;

/// What every call has: where blocks go, the ends of the whole row's sequences, and the shape of the heads.
#[derive(Clone, Copy)]
pub(super) struct Around<'a> {
    pub ring: &'a Ring,
    pub cu_seqlens: &'a [usize],
    pub shape: &'a AttentionShape,
}

/// One step: whose block it works on, what this rank's rows see of it, and the length of the next step's block.
struct Step {
    waves: Vec<Vec<Span>>,
    len: usize,
    len_next: Option<usize>,
}

impl Around<'_> {
    /// (o, lse) of this rank's rows q (t, h*e), k and v (t, g*e).
    pub(super) fn forward(self, q: &Tensor, k: &Tensor, v: &Tensor, o: &mut Tensor, lse: &mut Tensor) {
        if self.ring.size() == 1 {
            attention::forward_packed(q, k, v, self.cu_seqlens, self.shape, o, lse);
            return;
        }
        self.check(q);
        ring_attention::begin(o, lse);
        let mut block = Arc::new(ring_attention::block(k, v));
        for step in self.steps() {
            let next = step.len_next.map(|len| self.ring.pass(block.clone(), len));
            ring_attention::forward(q, &block, &step.waves, self.shape, o, lse);
            if let Some(next) = next {
                block = Arc::new(next.arrived());
            }
        }
    }

    /// (dq, dk, dv), overwritten.
    pub(super) fn backward(
        self,
        (q, k, v): (&Tensor, &Tensor, &Tensor),
        (o, lse, d_o): (&Tensor, &Tensor, &Tensor),
        [dq, dk, dv]: [&mut Tensor; 3],
    ) {
        if self.ring.size() == 1 {
            attention::backward_packed(q, k, v, o, lse, d_o, self.cu_seqlens, self.shape, dq, dk, dv);
            return;
        }
        self.check(q);
        dq.data_mut().fill(0.0);
        let mut block = Arc::new(ring_attention::block(k, v));
        let mut sum: Option<Arc<Buffer>> = None;
        for step in self.steps() {
            let before = sum.take().map(|sum| self.ring.pass(sum, step.len));
            let next = step.len_next.map(|len| self.ring.pass(block.clone(), len));
            let mut dblock = Buffer::zeros(step.len);
            ring_attention::backward((q, o, lse, d_o), &block, &step.waves, self.shape, dq, &mut dblock);
            if let Some(before) = before {
                residual::add(&mut dblock, &before.arrived());
            }
            sum = Some(Arc::new(dblock));
            if let Some(next) = next {
                block = Arc::new(next.arrived());
            }
        }
        drop(block);
        let sum = sum.expect("a ring has a step");
        let home = self.ring.pass(sum, ring_attention::block_len(k.rows(), self.shape));
        ring_attention::unblock(&home.arrived(), dk, dv);
    }

    fn steps(self) -> impl Iterator<Item = Step> {
        let (rank, size) = (self.ring.rank(), self.ring.size());
        let queries = zigzag::pieces(self.cu_seqlens, rank, size);
        let from = move |s: usize| (rank + size - s) % size;
        let len = move |s: usize| {
            ring_attention::block_len(zigzag::tokens(self.cu_seqlens, from(s), size), self.shape)
        };
        (0..size).map(move |s| Step {
            waves: zigzag::waves(&queries, &zigzag::pieces(self.cu_seqlens, from(s), size), self.shape),
            len: len(s),
            len_next: (s + 1 < size).then(|| len(s + 1)),
        })
    }

    fn check(self, q: &Tensor) {
        let tokens = zigzag::tokens(self.cu_seqlens, self.ring.rank(), self.ring.size());
        assert_eq!(q.rows(), tokens, "rows of rank {} of {} of the row", self.ring.rank(), self.ring.size());
    }
}
