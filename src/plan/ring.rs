//! What attention takes where ranks share each sequence, in the order of `model::ring`.

use super::heap::{Held, Kind};
use super::walk::Walk;
use crate::device::cuda::key_segments;

impl Walk<'_> {
    /// o. On a ring, it is summed in f32, and there are two blocks of keys and values: this rank's and the one that comes in.
    pub(super) fn ring_forward(&mut self, t: usize) -> Held {
        let q = self.dims.q();
        if self.sequence == 1 {
            let o = self.take(Kind::Attention, t, q);
            if self.kernels.run.is_some() {
                self.touch_bytes(Kind::Scratch, key_segments::bytes(t * self.dims.heads, self.dims.head_dim));
            }
            return o;
        }
        let sum = self.take_f32(Kind::Attention, t * q);
        let blocks = [(); 2].map(|()| self.take(Kind::Ring, 2 * t, self.dims.kv()));
        self.give_all(blocks);
        self.rounded(t, q, sum)
    }

    /// What the backward keeps in f32 while it works: delta, and the parts of dq, whose rows lie in eights of one
    /// sequence of more than 128 tokens.
    fn sums(&mut self, t: usize) -> Vec<Held> {
        let delta = self.take_f32(Kind::Norms, t * self.dims.heads);
        let rows = (t + t / 16).next_multiple_of(8);
        vec![delta, self.take_f32(Kind::Attention, rows * self.dims.q())]
    }

    /// A sum over the blocks of a ring, as an activation.
    fn rounded(&mut self, t: usize, width: usize, sum: Held) -> Held {
        let rounded = self.take(Kind::Attention, t, width);
        self.give(sum);
        rounded
    }

    /// [dq, dk, dv]. On a ring, the gradients of blocks are f32: those that are summed, those that come in, and those that
    /// went on.
    pub(super) fn ring_backward(&mut self, t: usize) -> [Held; 3] {
        let (q, kv) = (self.dims.q(), self.dims.kv());
        if self.sequence == 1 {
            let gradients = [q, kv, kv].map(|width| self.take(Kind::Attention, t, width));
            let sums = self.sums(t);
            self.give_all(sums);
            return gradients;
        }
        let dq = self.take_f32(Kind::Attention, t * q);
        let blocks = [(); 2].map(|()| self.take(Kind::Ring, 2 * t, kv));
        let [home, others @ ..] = [(); 3].map(|()| self.take_f32(Kind::Ring, 2 * t * kv));
        let sums = self.sums(t);
        self.give_all(blocks.into_iter().chain(others).chain(sums));
        let dq = self.rounded(t, q, dq);
        let [dk, dv] = [(); 2].map(|()| self.take(Kind::Attention, t, kv));
        self.give(home);
        [dq, dk, dv]
    }
}
