//! Operations at the head of ranks that share the vocabulary: combining statistics, gathering logits, sampling tokens.

use super::part::TensorPart;
use super::transformer::Transformer;
use crate::comm::{Group, records};
use crate::device::cuda::Memory;
use crate::device::cuda::decode::DecodeState;
use crate::device::cuda::sample::{SAMPLED, unpacked};
use crate::experience::SamplingMask;
use crate::ops::columns;
use crate::ops::linear_logprob::{Combine, Gather, HeadPart, RowStats};
use crate::ops::sample::{self, SampleRow, Sampled};
use crate::tensor::{DType, Tensor};
use std::borrow::Cow;
use std::ops::Range;

/// The number of values that ranks exchange for a row: its largest logit, both sums, and the target's logit.
const NUMBERS: usize = 4;

impl Transformer {
    /// Calls `body` with this rank's part of the head.
    pub(super) fn with_head_part(&self, body: impl FnOnce(HeadPart)) {
        let rows_max = TensorPart::from_group(&self.tensor).widest(self.arch.vocabulary);
        let combine = |stats: &mut [RowStats], targets: &mut [f32]| combine(&self.tensor, stats, targets);
        let combine: Option<&Combine> = if self.tensor.size() > 1 { Some(&combine) } else { None };
        let gather = |stats: &Memory| (of_parts(&self.tensor, stats), self.tensor.size());
        let gather: Option<&Gather> = if self.tensor.size() > 1 { Some(&gather) } else { None };
        body(HeadPart { first: self.vocabulary().start, rows_max, combine, gather, softcap: self.arch.logit_softcap });
    }

    /// Samples a token for each row of the logits, of which this rank has a part (rows, own tokens). The result is the
    /// same on all ranks. Rows are dealt to ranks; each rank samples from whole rows and sends the tokens to the
    /// others. The recorded log-probabilities are bitwise those of `logprobs`. All ranks of the tensor axis call this
    /// with the same rows.
    pub fn sample(&self, logits: &Tensor, rows: &[SampleRow], out: &mut [Sampled]) {
        let dealt = shares(logits.rows(), self.tensor.size());
        let mine = dealt[self.tensor.rank()].clone();
        let whole = self.dealt(logits, &dealt);
        let ends: Vec<usize> = self.vocabularies().map(|range| range.end).collect();
        // All ranks gather in the same way.
        let several = dealt.len() > 1 && !sample::need_host(rows);
        if let Some(drawn) = several.then(|| sample::drawn(&whole, &ends, &rows[mine.clone()])).flatten() {
            return self.gather_on_gpu(&drawn, &dealt, out);
        }
        sample::forward_parts(&whole, &ends, &rows[mine.clone()], &mut out[mine]);
        self.gather(&dealt, 1, out);
    }

    /// Does the same as `sample` on CPUs, and returns the sampling mask of each row (`ops::sample::forward_masked`).
    pub fn sample_masked(&self, logits: &Tensor, rows: &[SampleRow], out: &mut [Sampled]) -> Vec<SamplingMask> {
        let dealt = shares(logits.rows(), self.tensor.size());
        let mine = dealt[self.tensor.rank()].clone();
        let ends: Vec<usize> = self.vocabularies().map(|range| range.end).collect();
        let whole = self.dealt(logits, &dealt);
        let masks = sample::forward_masked(&whole, &ends, &rows[mine.clone()], &mut out[mine]);
        self.gather(&dealt, 1, out);
        records::gather(&self.tensor, &masks).expect("ranks of one binary")
    }

    /// Finds the `n` best tokens of each row (`ops::sample::top_parts`), with rows dealt as in `sample`. `out` gets
    /// them row by row.
    pub fn top(&self, logits: &Tensor, rows: &[SampleRow], n: usize, out: &mut [Sampled]) {
        let dealt = shares(logits.rows(), self.tensor.size());
        let mine = dealt[self.tensor.rank()].clone();
        let ends: Vec<usize> = self.vocabularies().map(|range| range.end).collect();
        let whole = self.dealt(logits, &dealt);
        sample::top_parts(&whole, &ends, &rows[mine.clone()], n, &mut out[n * mine.start..n * mine.end]);
        self.gather(&dealt, n, out);
    }

    /// Gathers the tokens that each rank has found for its rows `dealt[rank]`, `n` per row.
    fn gather(&self, dealt: &[Range<usize>], n: usize, out: &mut [Sampled]) {
        let mine = dealt[self.tensor.rank()].clone();
        let mut gathered = vec![0.0; SAMPLED * out.len()];
        for (gathered, found) in gathered.chunks_exact_mut(SAMPLED).zip(&*out).skip(n * mine.start).take(n * mine.len())
        {
            gathered.copy_from_slice(&[f32::from_bits(found.token), found.logprob, found.sample_logprob]);
        }
        let ranges: Vec<Range<usize>> = dealt.iter().map(|r| SAMPLED * n * r.start..SAMPLED * n * r.end).collect();
        self.tensor.all_gather(&mut gathered, &ranges);
        for (out, gathered) in out.iter_mut().zip(gathered.chunks_exact(SAMPLED)) {
            *out = Sampled { token: gathered[0].to_bits(), logprob: gathered[1], sample_logprob: gathered[2] };
        }
    }

    /// Gathers on the GPU the tokens that each rank has sampled for its rows `dealt[rank]`, then reads them once.
    fn gather_on_gpu(&self, drawn: &Memory, dealt: &[Range<usize>], out: &mut [Sampled]) {
        let mut gathered = Memory::scratch(SAMPLED * out.len() * size_of::<f32>());
        let ranges: Vec<Range<usize>> = dealt.iter().map(|r| SAMPLED * r.start..SAMPLED * r.end).collect();
        let mine = ranges[self.tensor.rank()].clone();
        gathered.view_mut(DType::F32).part(mine).copy_from(drawn.view(DType::F32));
        self.tensor.gather_view(&mut gathered.view_mut(DType::F32).part(0..SAMPLED * out.len()), &ranges);
        let gathered: Vec<f32> = gathered.read(SAMPLED * out.len());
        let sampled = ranges.into_iter().flat_map(|range| unpacked(&gathered[range]));
        out.iter_mut().zip(sampled).for_each(|(out, sampled)| *out = sampled);
    }

    /// The ends of the vocabulary's parts, i32, for `decode`.
    pub fn ends_on_gpu(&self) -> Memory {
        Memory::from_values(&self.vocabularies().map(|range| range.end as i32).collect::<Vec<_>>())
    }

    /// Samples as `sample` does, for the first `rows` rows of `tables`. All ranks get all tokens there.
    pub(super) fn draw_on_gpu(
        &self,
        logits: &Tensor,
        rows: usize,
        ends: &Memory,
        edits: bool,
        tables: &mut DecodeState,
    ) {
        let dealt = shares(rows, self.tensor.size());
        let whole = self.dealt(logits, &dealt);
        tables.draw(whole.cuda(), dealt[self.tensor.rank()].clone(), whole.width(), ends, edits);
        let ranges: Vec<Range<usize>> = dealt.iter().map(|r| SAMPLED * r.start..SAMPLED * r.end).collect();
        self.tensor.gather_view(&mut tables.sampled(rows), &ranges);
    }

    /// The whole rows `dealt[rank]` of logits whose columns are sharded over ranks.
    fn dealt<'a>(&self, logits: &'a Tensor, dealt: &[Range<usize>]) -> Cow<'a, Tensor> {
        let (part, mine) = (logits.width(), dealt[self.tensor.rank()].len());
        if part == self.arch.vocabulary {
            return Cow::Borrowed(logits);
        }
        let rows: Vec<Range<usize>> = dealt.iter().map(|rows| rows.start * part..rows.end * part).collect();
        // The columns of each rank, in rank order.
        let blocks: Vec<Range<usize>> = self.vocabularies().map(|v| v.start * mine..v.end * mine).collect();
        let mut received = logits.statistics(mine, self.arch.vocabulary);
        self.tensor.slice_to_all(logits.slice(), &rows, received.slice_mut(), &blocks);
        let mut whole = logits.statistics(mine, self.arch.vocabulary);
        for (range, block) in self.vocabularies().zip(blocks) {
            columns::place(&received, block.start, &mut whole, range.start, range.len());
        }
        Cow::Owned(whole)
    }

    /// The tokens of each rank.
    fn vocabularies(&self) -> impl Iterator<Item = Range<usize>> {
        let (size, v) = (self.tensor.size(), self.arch.vocabulary);
        (0..size).map(move |rank| TensorPart { rank, size }.range(v))
    }
}

/// Splits 0..n into even shares.
fn shares(n: usize, size: usize) -> Vec<Range<usize>> {
    (0..size).map(|rank| rank * n / size..(rank + 1) * n / size).collect()
}

/// Gathers the statistics of all ranks' parts on a GPU, in rank order.
fn of_parts(tensor: &Group, stats: &Memory) -> Memory {
    let n = stats.bytes() / size_of::<f32>();
    let ranges: Vec<Range<usize>> = (0..tensor.size()).map(|rank| rank * n..(rank + 1) * n).collect();
    let mut all = Memory::scratch(tensor.size() * stats.bytes());
    all.view_mut(DType::F32).part(ranges[tensor.rank()].clone()).copy_from(stats.view(DType::F32));
    tensor.gather_view(&mut all.view_mut(DType::F32), &ranges);
    all
}

/// Combines the statistics of each rank's part, in rank order, into those of whole rows, and finds the logits of the
/// targets.
fn combine(tensor: &Group, stats: &mut [RowStats], targets: &mut [f32]) {
    let (n, size) = (NUMBERS * stats.len(), tensor.size());
    let ranges: Vec<Range<usize>> = (0..size).map(|rank| rank * n..(rank + 1) * n).collect();
    let mut all = vec![0.0; n * size];
    let own = all[ranges[tensor.rank()].clone()].chunks_exact_mut(NUMBERS);
    for (own, (stats, target)) in own.zip(stats.iter().zip(&*targets)) {
        own.copy_from_slice(&[stats.max, stats.sum_exp, stats.dot, *target]);
    }
    tensor.all_gather(&mut all, &ranges);
    let mut parts = Vec::with_capacity(size);
    for (i, (stats, target)) in stats.iter_mut().zip(targets).enumerate() {
        let numbers = || all.chunks_exact(n).map(|rank| &rank[NUMBERS * i..NUMBERS * (i + 1)]);
        let inverse_temperature = stats.inverse_temperature;
        parts.clear();
        parts.extend(numbers().map(|x| RowStats { inverse_temperature, max: x[0], sum_exp: x[1], dot: x[2] }));
        *stats = RowStats::combined(&parts);
        *target = numbers().map(|x| x[3]).sum();
    }
}
