//! `linear_divergence` on a GPU: logits of both heads in f32, dlogits in bf16. The host waits for the sums of a chunk.

use super::linear_divergence::{Against, Teacher, Teachers};
use super::linear_logprob::HeadPart;
use super::linear_logprob_cuda::Head;
use crate::device::cuda::linear_divergence::Pair;
use crate::device::cuda::linear_logprob::{self as logprob, Logits};
use crate::device::cuda::readback::Late;
use crate::device::cuda::{Memory, ViewMut};
use crate::tensor::{DType, Tensor, Weight};
use std::ops::Range;

const OP: &str = "linear_divergence";

impl Against<'_> {
    /// As `compare`, with the chunk's part of the student's head and the places of its targets.
    pub(super) fn compare_on_gpu(
        &mut self,
        own: &Head,
        range: &Range<usize>,
        places: &Memory,
        student: Logits,
        mut dlogits: Option<ViewMut>,
    ) {
        let Teachers { all, divergence, temperature } = self.teachers;
        let (m, inverse_temperature) = (range.len(), 1.0 / temperature);
        let mut of_student = logprob::stats_room(m);
        logprob::stats(student, inverse_temperature, places, &mut of_student);
        own.combine(m, &mut of_student);
        for Teacher { h, w, weight } in all {
            let head = Head::new(OP, h, w, own.part, own.targets, temperature);
            let mut room = head.room();
            let of_teacher = head.stats(range, places, &mut room);
            let teacher = head.logits(&room, m);
            let pair = Pair { student, teacher, inverse_temperature, of_student: &of_student, of_teacher: &of_teacher };
            let mut sums = logprob::stats_room(m);
            pair.sums(divergence, &mut sums);
            own.combine(m, &mut sums);
            if let Some(dlogits) = &mut dlogits {
                let scale = self.scale * weight * inverse_temperature;
                pair.add(divergence, &sums, scale, dlogits.reborrow(), own.stride());
            }
            let sums = Late::of(sums.view(DType::F32).part(0..4 * m)).take();
            self.count(range, *weight, sums.as_chunks::<4>().0.iter().map(|[_, first, second, _]| [*first, *second]));
        }
    }
}

pub(super) fn forward(
    h: &Tensor,
    w: &Weight,
    part: HeadPart,
    targets: &[u32],
    against: &mut Against,
    logprobs: &mut [f32],
) {
    let head = Head::new(OP, h, w, part, targets, 1.0);
    let mut room = head.room();
    for range in head.chunks(head.chunk_rows()) {
        let (m, places) = (range.len(), head.places(&range));
        let stats = head.stats(&range, &places, &mut room);
        let mut found = Memory::scratch(m * size_of::<f32>());
        logprob::read(&stats, 1.0, found.view_mut(DType::F32), None);
        logprobs[range.clone()].copy_from_slice(&Late::of(found.view(DType::F32).part(0..m)).take());
        against.compare_on_gpu(&head, &range, &places, head.logits(&room, m), None);
    }
}
