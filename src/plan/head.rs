//! What goes through a head: how `ops::linear_logprob` cuts the rows, and what it takes.

use super::heap::{Held, Kind};
use super::walk::Walk;
use crate::device::cuda::linear_logprob_fused::scratch_bytes;
use crate::device::cuda::value_head;

/// Logits of one chunk on a GPU; chunks whose gradients of logits, bf16, are held together.
const GPU_CHUNK_BYTES: usize = 256 << 20;
const GPU_GROUP: usize = 2;
/// Sums of rows that are scored on a GPU without storing logits, and rows from which they are.
const FUSED_BYTES: usize = 64 << 20;
const FUSED_ROWS: usize = 128;
/// Statistics and place of a row, and the slopes of its loss.
const STATS_BYTES: usize = 20;
const SLOPES_BYTES: usize = 8;

/// Where a head is, and its rows.
#[derive(Clone, Copy)]
pub struct Cut {
    pub fast: bool,
    pub v: usize,
}

impl Cut {
    /// Rows of a chunk.
    pub fn chunk(self, rows: usize) -> usize {
        (GPU_CHUNK_BYTES / (4 * self.v.max(1))).max(1).min(rows)
    }

    /// Bytes of the logits of `chunk` rows. Rows begin at whole sixteen bytes.
    pub fn logits(self, chunk: usize) -> usize {
        4 * chunk * self.v.next_multiple_of(8)
    }

    /// Bytes that scoring `rows` rows takes at a time: of their logits, or of what a GPU with exact products needs instead
    /// (`linear_logprob_fused`).
    pub fn scoring(self, rows: usize) -> usize {
        if self.fast || rows < FUSED_ROWS {
            return self.logits(self.chunk(rows));
        }
        let row = scratch_bytes(1, self.v);
        row * (FUSED_BYTES / row).clamp(1, rows)
    }

    /// Numbers of a chunk of `rows` rows, beside the logits.
    pub fn numbers(rows: usize, is_trained: bool) -> usize {
        rows * (STATS_BYTES + if is_trained { SLOPES_BYTES } else { 0 })
    }

    /// Rows whose gradients of logits are held beside a chunk of logits.
    pub fn gradients(self, rows: usize) -> usize {
        rows.min(GPU_GROUP * self.chunk(rows))
    }
}

impl Walk<'_> {
    fn cut(&self) -> Cut {
        Cut { fast: self.kernels.fast, v: self.dims.v }
    }

    /// Log-probabilities of `rows` rows, no gradient.
    pub fn logprobs(&mut self, rows: usize) {
        let h = self.take(Kind::Hidden, rows, self.dims.d);
        let chunk = self.cut().chunk(rows);
        let logits = self.heap.take(Kind::Logits, Some(self.role), self.cut().scoring(rows));
        self.touch_bytes(Kind::Scratch, Cut::numbers(chunk, false));
        self.give_all([logits, h]);
    }

    /// Log-probabilities, their loss and the head's gradient; the gradient of the hidden state (t, d) is left.
    pub fn logprobs_backward(&mut self, t: usize, rows: usize) -> Held {
        let (d, v) = (self.dims.d, self.dims.v);
        let h = self.take(Kind::Hidden, rows, d);
        let dh = self.take(Kind::Hidden, rows, d);
        self.begin(1 + self.dims.layers);
        let chunk = self.cut().chunk(rows);
        let logits = self.heap.take(Kind::Logits, Some(self.role), self.cut().logits(chunk));
        let gradients = self.take(Kind::Logits, self.cut().gradients(rows), v.next_multiple_of(8));
        self.touch_bytes(Kind::Scratch, Cut::numbers(chunk, true));
        self.give(gradients);
        self.give(logits);
        let dhidden = self.take(Kind::Hidden, t, d);
        self.give_all([h, dh]);
        dhidden
    }

    /// Values of `rows` rows.
    pub fn values(&mut self, rows: usize) {
        let h = self.take(Kind::Hidden, rows, self.dims.d);
        self.give(h);
    }

    /// The value head's gradient; the gradient of the hidden state (t, d) is left.
    pub fn values_backward(&mut self, t: usize, rows: usize) -> Held {
        self.values(rows);
        let h = self.take(Kind::Hidden, rows, self.dims.d);
        let dh = self.take(Kind::Hidden, rows, self.dims.d);
        self.begin(1 + self.dims.layers);
        self.touch_bytes(Kind::Scratch, value_head::backward_scratch(rows, self.dims.d));
        let dhidden = self.take(Kind::Hidden, t, self.dims.d);
        self.give_all([h, dh]);
        dhidden
    }
}
