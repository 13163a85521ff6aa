//! `linear_logprob` on a GPU: the same chunks, with logits in f32 and their gradients in bf16. What the loss looks at comes to
//! the host once a chunk.

use super::linear_logprob::{HeadPart, TokenLoss};
use super::matmul::rows;
use crate::device::cuda::linear_logprob::{self as cuda, Logits};
use crate::device::cuda::matmul::{self, Matrix, MatrixMut};
use crate::device::cuda::{Memory, View};
use crate::tensor::{DType, Tensor, Weight, WeightMut};
use std::ops::Range;

/// Logits of one chunk.
const CHUNK_BYTES: usize = 256 << 20;

/// A head, and the rows that go through it.
pub(super) struct Head<'a> {
    h: View<'a>,
    tokens: usize,
    width: usize,
    w: Matrix<'a>,
    part: HeadPart<'a>,
    targets: &'a [u32],
    inverse_temperature: f32,
}

/// What is known of a chunk of rows.
struct Chunk {
    range: Range<usize>,
    places: Memory,
    stats: Memory,
}

impl<'a> Head<'a> {
    pub fn new(
        op: &str,
        h: &'a Tensor,
        w: &Weight<'a>,
        part: HeadPart<'a>,
        targets: &'a [u32],
        temperature: f32,
    ) -> Self {
        let (tokens, width) = (h.rows(), h.width());
        Self { h: h.cuda(), tokens, width, w: rows(op, w), part, targets, inverse_temperature: 1.0 / temperature }
    }

    fn chunk_rows(&self) -> usize {
        (CHUNK_BYTES / (size_of::<f32>() * self.part.rows_max)).clamp(1, self.tokens.max(1))
    }

    fn chunks(&self) -> impl Iterator<Item = Range<usize>> {
        let (rows, tokens) = (self.chunk_rows(), self.tokens);
        (0..tokens).step_by(rows).map(move |start| start..tokens.min(start + rows))
    }

    fn x(&self, range: &Range<usize>) -> Matrix<'a> {
        Matrix::new(self.h.part(range.start * self.width..range.end * self.width), range.len(), self.width)
    }

    /// Values from one row of logits to the next: rows begin at whole 16 bytes.
    fn stride(&self) -> usize {
        self.w.rows.next_multiple_of(8)
    }

    /// Room for the logits of a chunk.
    fn room(&self) -> Memory {
        Memory::scratch(self.chunk_rows() * self.stride() * size_of::<f32>())
    }

    fn logits<'l>(&self, room: &'l Memory, rows: usize) -> Logits<'l> {
        let (v, stride) = (self.w.rows, self.stride());
        Logits { values: room.view(DType::F32).part(0..rows * stride), rows, v, stride }
    }

    /// Logits, their statistics, and what they say of the targets.
    fn chunk(&self, range: Range<usize>, room: &mut Memory, logprobs: &mut [f32], entropy: &mut [f32]) -> Chunk {
        let (m, v, stride) = (range.len(), self.w.rows, self.stride());
        let values = room.view_mut(DType::F32).part(0..m * stride);
        matmul::forward(self.x(&range), self.w, None, MatrixMut { values, rows: m, width: v, stride }, false);
        let places = cuda::places(&self.part.places(&self.targets[range.clone()]), v);
        let mut stats = cuda::stats_room(m);
        cuda::stats(self.logits(room, m), self.inverse_temperature, &places, &mut stats);
        if let Some(combine) = self.part.combine {
            let (mut rows, mut targets) = cuda::read_back(&stats, m, self.inverse_temperature);
            combine(&mut rows, &mut targets);
            cuda::upload(&rows, &targets, &mut stats);
        }
        let mut found = Memory::scratch(2 * m * size_of::<f32>());
        let mut both = found.view_mut(DType::F32);
        let (first, second) = both.split_at(m);
        cuda::read(&stats, self.inverse_temperature, first, Some(second), None);
        let found: Vec<f32> = found.read(2 * m);
        logprobs[range.clone()].copy_from_slice(&found[..m]);
        if !entropy.is_empty() {
            entropy[range.clone()].copy_from_slice(&found[m..]);
        }
        Chunk { range, places, stats }
    }
}

pub(super) fn forward(head: &Head, logprobs: &mut [f32], entropy: &mut [f32]) {
    let mut room = head.room();
    for range in head.chunks() {
        head.chunk(range, &mut room, logprobs, entropy);
    }
}

pub(super) fn forward_backward(
    head: &Head,
    loss: &mut TokenLoss,
    logprobs: &mut [f32],
    entropy: &mut [f32],
    dh: &mut Tensor,
    dw: WeightMut,
) {
    let (d, v) = (head.width, head.w.rows);
    let WeightMut { n, k, values, .. } = dw;
    let mut dw = values.cuda().part(0..n * k);
    let mut dh = dh.cuda_mut();
    let mut room = head.room();
    let stride = head.stride();
    let mut dlogits = Memory::scratch(head.chunk_rows() * stride * DType::Bf16.bytes());
    for range in head.chunks() {
        let Chunk { range, places, stats } = head.chunk(range, &mut room, logprobs, entropy);
        let m = range.len();
        let (mut dlogprobs, mut dentropy) = (vec![0.0; m], vec![0.0; m]);
        loss(range.clone(), &logprobs[range.clone()], &entropy[range.clone()], &mut dlogprobs, &mut dentropy);
        let [dlogprobs, dentropy] = [dlogprobs, dentropy].map(|slopes| Memory::of(&slopes));
        cuda::gradient(
            head.logits(&room, m),
            head.inverse_temperature,
            &stats,
            &places,
            dlogprobs.view(DType::F32),
            dentropy.view(DType::F32),
            dlogits.view_mut(DType::Bf16).part(0..m * stride),
            stride,
        );
        let slopes = || Matrix { values: dlogits.view(DType::Bf16).part(0..m * stride), rows: m, width: v, stride };
        let to = dh.reborrow().part(range.start * d..range.end * d);
        matmul::backward_input(slopes(), head.w, MatrixMut::new(to, m, d), false);
        matmul::backward_weight(slopes(), head.x(&range), MatrixMut::new(dw.reborrow(), n, k));
    }
}
