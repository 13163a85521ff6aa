//! `linear_logprob` on a GPU: the same chunks, with logits in f32 and their gradients in bf16. If a loss follows, the
//! host waits for the log-probabilities of a chunk.

use super::head_part::{Extra, HeadPart, TokenLoss};
use super::matmul::rows;
use crate::device::cuda::fast;
use crate::device::cuda::linear_logprob as cuda;
use crate::device::cuda::linear_logprob_fused as fused;
use crate::device::cuda::matmul::{self, Addend, Matrix, MatrixMut, Way};
use crate::device::cuda::readback::Late;
use crate::device::cuda::{Memory, View, ViewMut, softcap};
use crate::tensor::{DType, Tensor, Weight, WeightMut};
use std::ops::Range;

/// The bytes of one chunk's logits.
const CHUNK_BYTES: usize = 256 << 20;
/// The number of chunks whose gradients are collected for one GEMM each into dh and dW, for parts of the vocabulary up to
/// `LARGE` and above. A GEMM of few rows takes as long as reading and writing dW, and a chunk of a large part has few.
/// Without dW they are as few as for a small part.
const GROUPS: [usize; 2] = [2, 8];
const LARGE: usize = 64 << 10;
/// The bytes of the sums of a chunk that is scored without storing logits, and the rows that fill a tile of that
/// kernel.
const FUSED_BYTES: usize = 64 << 20;
const FUSED_ROWS: usize = 128;

/// A head, and the rows that go through it.
pub struct Head<'a> {
    h: View<'a>,
    tokens: usize,
    width: usize,
    w: Matrix<'a>,
    pub(super) part: HeadPart<'a>,
    pub(super) targets: &'a [u32],
    inverse_temperature: f32,
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

    pub(super) fn chunk_rows(&self) -> usize {
        (CHUNK_BYTES / (size_of::<f32>() * self.part.rows_max)).clamp(1, self.tokens.max(1))
    }

    /// The number of rows scored at a time without storing logits.
    fn fused_rows(&self) -> usize {
        (FUSED_BYTES / fused::scratch_bytes(1, self.part.rows_max)).clamp(1, self.tokens.max(1))
    }

    pub(super) fn chunks(&self, rows: usize) -> impl Iterator<Item = Range<usize>> {
        let tokens = self.tokens;
        (0..tokens).step_by(rows).map(move |start| start..tokens.min(start + rows))
    }

    fn x(&self, range: &Range<usize>) -> Matrix<'a> {
        Matrix::new(self.h.part(range.start * self.width..range.end * self.width), range.len(), self.width)
    }

    /// The indices of the targets of `range` among W's rows.
    pub(super) fn places(&self, range: &Range<usize>) -> Memory {
        cuda::places(&self.part.places(&self.targets[range.clone()]), self.w.rows)
    }

    /// The distance in values from one row of logits to the next. Rows begin at multiples of 16 bytes.
    pub(super) fn stride(&self) -> usize {
        self.w.rows.next_multiple_of(8)
    }

    /// Memory for the logits of a chunk.
    pub(super) fn room(&self) -> Memory {
        Memory::scratch(self.chunk_rows() * self.stride() * size_of::<f32>())
    }

    pub(super) fn logits<'l>(&self, room: &'l Memory, rows: usize) -> Matrix<'l> {
        let (v, stride) = (self.w.rows, self.stride());
        Matrix { values: room.view(DType::F32).part(0..rows * stride), rows, width: v, stride }
    }

    /// Computes the logits of a chunk, and returns the statistics of whole rows.
    pub(super) fn stats(&self, range: &Range<usize>, places: &Memory, room: &mut Memory) -> Memory {
        let (m, v, stride) = (range.len(), self.w.rows, self.stride());
        let values = room.view_mut(DType::F32).part(0..m * stride);
        let y = MatrixMut { values, rows: m, width: v, stride };
        matmul::forward(Way::Chosen, self.x(range), self.w, None, Addend::Nothing, y);
        if let Some(cap) = self.part.softcap {
            softcap::forward(cap, room.view_mut(DType::F32).part(0..m * stride));
        }
        let mut stats = cuda::stats_room(m);
        cuda::stats(self.logits(room, m), self.inverse_temperature, places, &mut stats);
        self.combine(m, &mut stats);
        stats
    }

    /// The same statistics without storing logits.
    fn fused_stats(&self, range: &Range<usize>, scratch: &mut Memory) -> Memory {
        let (m, places) = (range.len(), self.places(range));
        let mut stats = cuda::stats_room(m);
        let (x, w) = (self.x(range).values, self.w.values);
        fused::stats(x, w, self.width, self.inverse_temperature, &places, scratch, &mut stats);
        self.combine(m, &mut stats);
        stats
    }

    pub(super) fn combine(&self, rows: usize, stats: &mut Memory) {
        if let Some(gather) = self.part.gather {
            let (of_parts, parts) = gather(stats);
            cuda::combine(&of_parts, parts, rows, stats);
        }
    }
}

/// A comparison of a chunk's logits with those of other models. It adds to their gradient in a backward.
pub trait Comparison {
    /// Compares the logits of tokens `range` on one part of the head. `dlogits` is their gradient so far.
    fn chunk(&mut self, part: HeadPart, range: Range<usize>, logits: &[f32], dlogits: Option<&mut [f32]>);

    /// The same on a GPU, with this part of the head and the indices of the chunk's targets.
    fn chunk_on_gpu(
        &mut self,
        head: &Head,
        range: &Range<usize>,
        places: &Memory,
        logits: Matrix,
        dlogits: Option<ViewMut>,
    );
}

/// Scores tokens. With enough rows, a fused kernel does not store logits, unless they are capped or compared. Its log-probabilities are bitwise those of
/// the other way with the exact GEMM. With the fast GEMM, scoring uses the fast GEMM, like training.
pub(super) fn forward(
    head: &Head,
    mut logprobs: ViewMut,
    kind: Extra,
    mut extra: ViewMut,
    mut against: Option<&mut dyn Comparison>,
) {
    let mut read = |range: &Range<usize>, stats: &Memory| {
        let mut extra = (kind != Extra::Nothing).then(|| extra.reborrow().part(range.clone()));
        if let Some(top) = extra.take_if(|_| kind == Extra::Top) {
            cuda::top(stats, head.inverse_temperature, top);
        }
        cuda::read(stats, head.inverse_temperature, logprobs.reborrow().part(range.clone()), extra);
    };
    let is_plain = against.is_none() && head.part.softcap.is_none();
    if is_plain && head.tokens >= FUSED_ROWS && fused::fits() && !fast::is_on() {
        let rows = head.fused_rows();
        let mut scratch = Memory::scratch(fused::scratch_bytes(rows, head.w.rows));
        head.chunks(rows).for_each(|range| read(&range, &head.fused_stats(&range, &mut scratch)));
    } else {
        let (rows, mut room) = (head.chunk_rows(), head.room());
        for range in head.chunks(rows) {
            let places = head.places(&range);
            read(&range, &head.stats(&range, &places, &mut room));
            if let Some(against) = &mut against {
                against.chunk_on_gpu(head, &range, &places, head.logits(&room, range.len()), None);
            }
        }
    }
}

pub(super) fn forward_backward(
    head: &Head,
    loss: &mut TokenLoss,
    mut against: Option<&mut dyn Comparison>,
    logprobs: &mut [f32],
    entropy: &mut [f32],
    dh: &mut Tensor,
    dw: Option<WeightMut>,
) {
    let (d, v) = (head.width, head.w.rows);
    let mut dw = dw.map(|WeightMut { n, k, values, .. }| (values.cuda().part(0..n * k), n, k));
    let mut dh = dh.cuda_mut();
    let (rows, stride, mut room) = (head.chunk_rows(), head.stride(), head.room());
    let is_large = dw.is_some() && head.part.rows_max > LARGE;
    let group = (GROUPS[usize::from(is_large)] * rows).min(head.tokens);
    let mut dlogits = Memory::scratch(group * stride * DType::Bf16.bytes());
    let mut numbers = Memory::scratch(2 * rows * size_of::<f32>());
    for whole in head.chunks(group.max(1)) {
        for start in whole.clone().step_by(rows) {
            let range = start..whole.end.min(start + rows);
            let m = range.len();
            let places = head.places(&range);
            let stats = head.stats(&range, &places, &mut room);
            let mut both = numbers.view_mut(DType::F32).part(0..2 * m);
            let (l, h) = both.split_at(m);
            cuda::read(&stats, head.inverse_temperature, l, Some(h));
            let found = Late::start(both.as_view()).wait_values();
            logprobs[range.clone()].copy_from_slice(&found[..m]);
            entropy[range.clone()].copy_from_slice(&found[m..]);
            let mut slopes = vec![0.0; 2 * m];
            let (dlogprobs, dentropy) = slopes.split_at_mut(m);
            loss(range.clone(), &logprobs[range.clone()], &entropy[range.clone()], dlogprobs, dentropy);
            both.write(&slopes);
            let slopes = |at: usize| numbers.view(DType::F32).part(at * m..(at + 1) * m);
            let at = start - whole.start;
            cuda::gradient(
                head.logits(&room, m),
                head.inverse_temperature,
                &stats,
                &places,
                slopes(0),
                slopes(1),
                dlogits.view_mut(DType::Bf16).part(at * stride..(at + m) * stride),
                stride,
            );
            if let Some(against) = &mut against {
                let dlogits = dlogits.view_mut(DType::Bf16).part(at * stride..(at + m) * stride);
                against.chunk_on_gpu(head, &range, &places, head.logits(&room, m), Some(dlogits));
            }
            if let Some(cap) = head.part.softcap {
                let dlogits = dlogits.view_mut(DType::Bf16).part(at * stride..(at + m) * stride);
                softcap::backward(cap, head.logits(&room, m).values, dlogits);
            }
        }
        let m = whole.len();
        let dlogits = Matrix { values: dlogits.view(DType::Bf16).part(0..m * stride), rows: m, width: v, stride };
        let to = dh.reborrow().part(whole.start * d..whole.end * d);
        matmul::backward_input(Way::Chosen, dlogits, head.w, MatrixMut::new(to, m, d), false);
        if let Some((dw, n, k)) = &mut dw {
            matmul::backward_weight(Way::Chosen, dlogits, head.x(&whole), MatrixMut::new(dw.reborrow(), *n, *k));
        }
    }
}
