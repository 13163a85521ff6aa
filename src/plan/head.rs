//! What goes through a head: how `ops::linear_logprob` cuts the rows, and what it takes.

use super::heap::{Held, Kind};
use super::walk::Walk;
use crate::device::cuda::linear_logprob_fused::scratch_bytes;
use crate::device::cuda::value_head;
use crate::tensor::PANEL;

/// A head up to this size is transposed once for all chunks.
const TRANSPOSED_BYTES_MAX: usize = 64 << 20;
/// Logits of one chunk on the CPU, scored and with a backward behind.
const CHUNK_BYTES: usize = 8 << 20;
const CHUNK_BYTES_BACKWARD: usize = 16 << 20;
const CHUNK_BYTES_MAX: usize = 40 << 20;
const CHUNK_ROWS: usize = 64;
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
    pub cpu: bool,
    pub fast: bool,
    pub v: usize,
}

impl Cut {
    fn chunk(self, rows: usize, bytes: usize) -> usize {
        let row = 4 * self.v.max(1);
        if !self.cpu {
            return (GPU_CHUNK_BYTES / row).max(1).min(rows);
        }
        let fit = (bytes / row).max(CHUNK_ROWS).min(CHUNK_BYTES_MAX / row);
        let fit = if fit >= 8 { fit / 8 * 8 } else { fit.max(1) };
        fit.min(rows)
    }

    /// Rows that are scored at a time.
    pub fn scored(self, rows: usize) -> usize {
        self.chunk(rows, CHUNK_BYTES)
    }

    /// Bytes of the logits of `chunk` rows. On a GPU rows begin at whole sixteen bytes.
    pub fn logits(self, chunk: usize) -> usize {
        4 * chunk * if self.cpu { self.v } else { self.v.next_multiple_of(8) }
    }

    /// Bytes that scoring `rows` rows takes at a time: of their logits, or of what a GPU with exact products needs instead
    /// (`linear_logprob_fused`).
    pub fn scoring(self, rows: usize) -> usize {
        if self.cpu || self.fast || rows < FUSED_ROWS {
            return self.logits(self.scored(rows));
        }
        let row = scratch_bytes(1, self.v);
        row * (FUSED_BYTES / row).clamp(1, rows)
    }

    /// Numbers of a chunk of `rows` rows on a GPU, beside the logits.
    pub fn numbers(self, rows: usize, is_trained: bool) -> usize {
        if self.cpu { 0 } else { rows * (STATS_BYTES + if is_trained { SLOPES_BYTES } else { 0 }) }
    }

    /// Rows of a chunk with a backward behind.
    pub fn trained(self, rows: usize) -> usize {
        self.chunk(rows, CHUNK_BYTES_BACKWARD)
    }

    /// Rows whose gradients of logits are held beside a chunk of logits; none on the CPU, where they take its place.
    pub fn gradients(self, rows: usize) -> Option<usize> {
        (!self.cpu).then(|| rows.min(GPU_GROUP * self.trained(rows)))
    }
}

impl Walk<'_> {
    fn cut(&self) -> Cut {
        Cut { cpu: self.kernels.cpu, fast: self.kernels.fast, v: self.dims.v }
    }

    /// Log-probabilities of `rows` rows, no gradient.
    pub fn logprobs(&mut self, rows: usize) {
        let h = self.take(Kind::Hidden, rows, self.dims.d);
        let chunk = self.cut().scored(rows);
        let logits = self.heap.take(Kind::Logits, Some(self.role), self.cut().scoring(rows));
        self.touch_bytes(Kind::Scratch, self.cut().numbers(chunk, false));
        self.product(chunk, self.dims.d);
        self.give_all([logits, h]);
    }

    /// Log-probabilities, their loss and the head's gradient; the gradient of the hidden state (t, d) is left.
    pub fn logprobs_backward(&mut self, t: usize, rows: usize) -> Held {
        let (d, v) = (self.dims.d, self.dims.v);
        let h = self.take(Kind::Hidden, rows, d);
        let dh = self.take(Kind::Hidden, rows, d);
        self.begin(1 + self.dims.layers);
        let chunk = self.cut().trained(rows);
        let logits = self.heap.take(Kind::Logits, Some(self.role), self.cut().logits(chunk));
        let gradients = self.cut().gradients(rows).map(|rows| self.take(Kind::Logits, rows, v.next_multiple_of(8)));
        self.touch_bytes(Kind::Scratch, self.cut().numbers(chunk, true));
        let words = d.next_multiple_of(PANEL) * self.kernels.words(v);
        let once = self.kernels.cpu && chunk < rows && 4 * words <= TRANSPOSED_BYTES_MAX;
        let transposed = once.then(|| self.take_f32(Kind::Scratch, words));
        self.product(chunk, d);
        if self.kernels.cpu {
            let pairs = if self.kernels.bf16 { chunk * v.div_ceil(2) } else { 0 };
            self.touch(if once { pairs } else { self.input_scratch(chunk, v, d) });
            self.touch(self.weight_scratch(chunk, d));
        }
        self.give_all(transposed);
        self.give_all(gradients);
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
        if !self.kernels.cpu {
            self.touch_bytes(Kind::Scratch, value_head::backward_scratch(rows, self.dims.d));
        }
        let dhidden = self.take(Kind::Hidden, t, self.dims.d);
        self.give_all([h, dh]);
        dhidden
    }
}
