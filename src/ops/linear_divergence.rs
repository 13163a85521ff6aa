//! Divergence of a student's next-token distributions from those of teachers, over linear heads. As in
//! `linear_logprob`, logits of student and teacher exist for one chunk of tokens at a time.
//!
//! q = softmax(h W^T / temperature), p = softmax(h' W'^T / temperature), each over the whole vocabulary. For a token,
//! forward_kl: sum_v p (log p - log q); reverse_kl: sum_v q (log q - log p); jsd: (KL(p || m) + KL(q || m)) / 2 with m
//! = (p + q) / 2 (arXiv:2306.13649). Teachers may have other widths, but the same vocabulary.
//!
//! The heads may be parts of the vocabulary's rows (`HeadPart`). Statistics and sums are then combined over the parts.

pub use crate::config::method::distill::Divergence;

use super::check;
use super::linear_logprob::{Extra, HeadPart, RowStats, TokenLoss, forward_backward_part, forward_part, to_host};
use super::linear_logprob_cuda::{Comparison, Head};
use super::matmul::{forward_rows, panels};
use crate::device::cpu::linear_divergence::Pair;
use crate::device::cpu::{matmul as products, softcap, softmax};
use crate::device::cuda::linear_divergence::Pair as PairOnGpu;
use crate::device::cuda::linear_logprob as on_gpu;
use crate::device::cuda::matmul::Matrix;
use crate::device::cuda::readback::Late;
use crate::device::cuda::{Memory, ViewMut};
use crate::device::null;
use crate::tensor::arena::Buffer;
use crate::tensor::{DType, Tensor, Weight, WeightMut};
use std::ops::Range;

const OP: &str = "linear_divergence";

/// A teacher: its hidden states (t, d'), the same part of its head W' (v, d') as the student's, and its weight.
pub struct Teacher<'a> {
    pub h: &'a Tensor,
    pub w: Weight<'a>,
    /// The soft cap of its logits.
    pub softcap: Option<f32>,
    pub weight: f32,
}

/// The teachers of a student. The result is the weighted sum of its divergences from all of them.
#[derive(Clone, Copy)]
pub struct Teachers<'a> {
    pub all: &'a [Teacher<'a>],
    pub divergence: Divergence,
    pub temperature: f32,
}

/// The divergence at each token, over all teachers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Divergences {
    pub values: Vec<f32>,
    /// The values for a loss: the same, but for forward_kl with the teachers' entropies, sum_v p (-log q).
    pub losses: Vec<f32>,
}

/// A comparison that continues over chunks of tokens.
struct Against<'a> {
    teachers: Teachers<'a>,
    /// The factor on a divergence's dlogits.
    scale: f32,
    found: Divergences,
}

impl<'a> Against<'a> {
    fn new(teachers: Teachers<'a>, h: &Tensor, w: &Weight, scale: f32) -> Self {
        let t = h.rows();
        assert!(teachers.temperature > 0.0, "{OP}: the temperature must be positive, got {}", teachers.temperature);
        for teacher in teachers.all {
            check(OP, "a teacher's h", teacher.h, t, teacher.w.k);
            assert!(teacher.w.n == w.n, "{OP}: a teacher's head has {} rows, the student's has {}", teacher.w.n, w.n);
            null::note(null::HEAD, 2.0 * (t * teacher.w.n * teacher.w.k) as f64, 0.0);
        }
        let found = Divergences { values: vec![0.0; t], losses: vec![0.0; t] };
        Self { teachers, scale, found }
    }

    /// Adds a teacher's divergence, from its two sums for each token of `range`.
    fn count(&mut self, range: &Range<usize>, weight: f32, sums: impl Iterator<Item = [f32; 2]>) {
        for (i, [first, second]) in range.clone().zip(sums) {
            let (value, loss) = match self.teachers.divergence {
                Divergence::ForwardKl => (first, second),
                Divergence::ReverseKl => (first, first),
                Divergence::Jsd => (0.5 * (first + second), 0.5 * (first + second)),
            };
            self.found.values[i] += weight * value;
            self.found.losses[i] += weight * loss;
        }
    }
}

impl Comparison for Against<'_> {
    fn chunk(&mut self, part: HeadPart, range: Range<usize>, student: &[f32], mut dlogits: Option<&mut [f32]>) {
        let Teachers { all, divergence, temperature } = self.teachers;
        let (v, inverse_temperature) = (student.len() / range.len(), 1.0 / temperature);
        let stats = |logits: &[f32]| part.combined(softmax::stats_of_rows(logits, v, inverse_temperature));
        let of_student = &stats(student);
        let mut logits = Buffer::scratch(student.len());
        for Teacher { h, w, softcap: cap, weight } in all {
            let d = h.width();
            let x = &h.data()[range.start * d..range.end * d];
            let output = products::Output { w: panels(OP, w), bias: None, y: &mut logits };
            forward_rows(x, range.len(), [output], products::Addend::Nothing);
            if let Some(cap) = cap {
                softcap::forward(*cap, &mut logits);
            }
            let pair = Pair { v, student, teacher: &logits, of_student, of_teacher: &stats(&logits) };
            let sums = part.combined(pair.sums(divergence));
            if let Some(dlogits) = &mut dlogits {
                pair.add(divergence, &sums, self.scale * weight * inverse_temperature, dlogits);
            }
            self.count(&range, *weight, sums.iter().map(|&RowStats { sum_exp, dot, .. }| [sum_exp, dot]));
        }
    }

    fn chunk_on_gpu(
        &mut self,
        own: &Head,
        range: &Range<usize>,
        places: &Memory,
        student: Matrix,
        mut dlogits: Option<ViewMut>,
    ) {
        let Teachers { all, divergence, temperature } = self.teachers;
        let (m, inverse_temperature) = (range.len(), 1.0 / temperature);
        let mut of_student = on_gpu::stats_room(m);
        on_gpu::stats(student, inverse_temperature, places, &mut of_student);
        own.combine(m, &mut of_student);
        for Teacher { h, w, softcap, weight } in all {
            let part = HeadPart { softcap: *softcap, ..own.part };
            let head = Head::new(OP, h, w, part, own.targets, temperature);
            let mut room = head.room();
            let of_teacher = head.stats(range, places, &mut room);
            let teacher = head.logits(&room, m);
            let pair =
                PairOnGpu { student, teacher, inverse_temperature, of_student: &of_student, of_teacher: &of_teacher };
            let mut sums = on_gpu::stats_room(m);
            pair.sums(divergence, &mut sums);
            own.combine(m, &mut sums);
            if let Some(dlogits) = &mut dlogits {
                let scale = self.scale * weight * inverse_temperature;
                pair.add(divergence, &sums, scale, dlogits.reborrow(), own.stride());
            }
            let sums = Late::start(sums.view(DType::F32).part(0..4 * m)).wait_values();
            self.count(range, *weight, sums.as_chunks::<4>().0.iter().map(|[_, first, second, _]| [*first, *second]));
        }
    }
}

/// The divergences at all tokens, and the `logprobs` of their targets at temperature 1. All parts of a head call this
/// with the same h and targets.
pub fn forward(
    h: &Tensor,
    w: Weight,
    part: HeadPart,
    targets: &[u32],
    teachers: Teachers,
    logprobs: &mut [f32],
) -> Divergences {
    let mut against = Against::new(teachers, h, &w, 0.0);
    to_host(h, logprobs, &mut [], |logprobs, none| {
        forward_part(h, w, part, targets.into(), 1.0, logprobs, Extra::Nothing, none, Some(&mut against));
    });
    against.found
}

/// The same with the gradient of sum_t (ce (-logprob[t]) + scale divergence[t]), `weights` = [ce, scale]. dh is
/// overwritten with this part's share of a sum over all parts. dW is accumulated, if the head trains. With x the student's logits /
/// temperature, the gradients of a divergence are forward_kl: q - p; reverse_kl: q (log q - log p - KL); jsd: q (log(q
/// / m) - KL(q || m)) / 2.
pub fn forward_backward(
    h: &Tensor,
    w: Weight,
    part: HeadPart,
    targets: &[u32],
    teachers: Teachers,
    [ce, scale]: [f32; 2],
    logprobs: &mut [f32],
    dh: &mut Tensor,
    dw: Option<WeightMut>,
) -> Divergences {
    let t = h.rows();
    let mut against = Against::new(teachers, h, &w, scale);
    let mut entropy = vec![0.0; t];
    let loss: &mut TokenLoss = &mut |_, _, _, dlogprobs, _| dlogprobs.fill(-ce);
    forward_backward_part(h, w, part, targets.into(), 1.0, loss, Some(&mut against), logprobs, &mut entropy, dh, dw);
    against.found
}
