//! What ranks that share the vocabulary do together at the head: put statistics together, gather logits, draw tokens.

use super::part::TensorPart;
use super::transformer::Transformer;
use crate::comm::Group;
use crate::ops::linear_logprob::{Combine, HeadPart, RowStats};
use crate::ops::sample::{self, SampleRow, Sampled};
use crate::tensor::Tensor;
use std::borrow::Cow;
use std::ops::Range;

/// Numbers of a row that ranks tell each other: its largest logit, both sums, and the target's logit.
const NUMBERS: usize = 4;
/// Numbers of a token that was drawn.
const DRAWN: usize = 3;

impl Transformer {
    /// Calls `body` with this rank's part of the head.
    pub(super) fn with_head_part(&self, body: impl FnOnce(HeadPart)) {
        let rows_max = TensorPart::of(&self.tensor).widest(self.arch.vocabulary);
        let combine = |stats: &mut [RowStats], targets: &mut [f32]| combine(&self.tensor, stats, targets);
        let combine: Option<&Combine> = if self.tensor.size() > 1 { Some(&combine) } else { None };
        body(HeadPart { first: self.vocabulary().start, rows_max, combine });
    }

    /// A token for each row of this rank's part of the logits (rows, own tokens), the same on all ranks: rows are dealt
    /// to ranks, each draws from whole rows, and tells the others. The recorded log-probabilities are bitwise those of
    /// `logprobs`. All ranks of the tensor axis call this with the same rows.
    pub fn sample(&self, logits: &Tensor, rows: &[SampleRow], out: &mut [Sampled]) {
        let dealt = shares(logits.rows(), self.tensor.size());
        let mine = dealt[self.tensor.rank()].clone();
        let whole = self.dealt(logits, &dealt);
        let ends: Vec<usize> = self.vocabularies().map(|range| range.end).collect();
        sample::forward_parts(&whole, &ends, &rows[mine.clone()], &mut out[mine.clone()]);
        let mut told = vec![0.0; DRAWN * out.len()];
        for (told, drawn) in told.chunks_exact_mut(DRAWN).zip(&*out).skip(mine.start).take(mine.len()) {
            told.copy_from_slice(&[f32::from_bits(drawn.token), drawn.logprob, drawn.sample_logprob]);
        }
        let ranges: Vec<Range<usize>> = dealt.iter().map(|r| DRAWN * r.start..DRAWN * r.end).collect();
        self.tensor.all_gather(&mut told, &ranges);
        for (out, told) in out.iter_mut().zip(told.chunks_exact(DRAWN)) {
            *out = Sampled { token: told[0].to_bits(), logprob: told[1], sample_logprob: told[2] };
        }
    }

    /// Whole rows of logits (rows, v) on every rank, from each rank's part of them.
    pub(super) fn gathered(&self, logits: Tensor) -> Tensor {
        if logits.width() == self.arch.vocabulary {
            return logits;
        }
        let blocks = self.blocks(logits.rows());
        let mut received = Tensor::scratch(logits.rows(), self.arch.vocabulary);
        received.data_mut()[blocks[self.tensor.rank()].clone()].copy_from_slice(&logits.host());
        self.tensor.all_gather(received.data_mut(), &blocks);
        self.interleaved(&received, &blocks).in_f32_on(logits.device())
    }

    /// The whole rows `dealt[rank]` of logits whose columns the ranks share.
    fn dealt<'a>(&self, logits: &'a Tensor, dealt: &[Range<usize>]) -> Cow<'a, Tensor> {
        let (part, mine) = (logits.width(), dealt[self.tensor.rank()].len());
        if part == self.arch.vocabulary {
            return Cow::Borrowed(logits);
        }
        let rows: Vec<Range<usize>> = dealt.iter().map(|rows| rows.start * part..rows.end * part).collect();
        let blocks = self.blocks(mine);
        let mut received = Tensor::scratch(mine, self.arch.vocabulary);
        self.tensor.tensor_to_all(logits, &rows, &mut received, &blocks);
        Cow::Owned(self.interleaved(&received, &blocks).in_f32_on(logits.device()))
    }

    /// Where each rank's columns of `rows` rows stand, one rank behind the other.
    fn blocks(&self, rows: usize) -> Vec<Range<usize>> {
        self.vocabularies().map(|v| v.start * rows..v.end * rows).collect()
    }

    /// Rows from the columns of each rank.
    fn interleaved(&self, received: &Tensor, blocks: &[Range<usize>]) -> Tensor {
        let mut whole = Tensor::scratch(received.rows(), received.width());
        for (columns, block) in self.vocabularies().zip(blocks) {
            for (i, part) in received.data()[block.clone()].chunks_exact(columns.len()).enumerate() {
                whole.row_mut(i)[columns.clone()].copy_from_slice(part);
            }
        }
        whole
    }

    /// The tokens of each rank.
    fn vocabularies(&self) -> impl Iterator<Item = Range<usize>> {
        let (size, v) = (self.tensor.size(), self.arch.vocabulary);
        (0..size).map(move |rank| TensorPart { rank, size }.range(v))
    }
}

/// 0..n in even shares.
fn shares(n: usize, size: usize) -> Vec<Range<usize>> {
    (0..size).map(|rank| rank * n / size..(rank + 1) * n / size).collect()
}

/// The statistics of whole rows from those of each rank's part, in rank order, and the logits of the targets.
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
