//! Samples one token per row of logits like `device::cpu::sample`: the same filters in the same order, the same sums.

use super::gpu::gpu;
use super::linear_logprob::{SPAN, STATS_BYTES, VOCABULARY_MAX};
use super::memory::{Memory, View};
use super::shape::{dim, to_u32};
use crate::device::cpu::sample::{SampleParams, SampleRow, Sampled};
use crate::dtype::DType;
use bytemuck::{Pod, Zeroable};
use std::ops::Range;

const THREADS: usize = 512;
/// Tokens whose probabilities are added as one.
const TILE: usize = 256;
/// The maximum parts of a vocabulary: ranks that share one.
pub const PARTS_MAX: usize = 64;
/// The sampling parameters of a row, the same as `Params` in `cuda/sample.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct Params {
    temperature: f32,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    top_k: u32,
    idle: u32,
}

impl From<&SampleParams> for Params {
    fn from(params: &SampleParams) -> Self {
        Self {
            temperature: params.temperature,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            top_k: u32::try_from(params.top_k).unwrap_or(u32::MAX),
            idle: 0,
        }
    }
}

/// The inputs of rows besides their logits, on the GPU.
#[derive(Debug)]
pub struct Rows {
    len: usize,
    pub(super) params: Memory,
    /// One f32 per row; `uniforms` generates new ones without the host.
    pub uniforms: Memory,
    pub(super) seen: Memory,
    pub(super) of_seen: Memory,
    pub(super) banned: Memory,
    pub(super) of_banned: Memory,
    /// Whether a row is penalized or has banned tokens.
    pub(super) edits: bool,
}

/// The lists one after the other, each token once, and (start, end) of each list.
fn lists<'a>(lists: impl Iterator<Item = &'a [u32]>) -> (Vec<u32>, Vec<[u32; 2]>) {
    let (mut all, mut ranges) = (Vec::new(), Vec::new());
    for list in lists {
        let mut list = list.to_vec();
        list.sort_unstable();
        list.dedup();
        let start = to_u32(OP, all.len());
        all.append(&mut list);
        ranges.push([start, to_u32(OP, all.len())]);
    }
    (all, ranges)
}

impl Rows {
    pub fn from_rows(rows: &[SampleRow]) -> Self {
        let params = rows.iter().map(|row| Params::from(&row.params));
        let none: &[u32] = &[];
        // Kernels read seen tokens only for rows with a penalty.
        let seen = |row: &SampleRow<'_>| row.params.repetition_penalty != 1.0;
        let (seen, of_seen) = lists(rows.iter().map(|row| if seen(row) { row.seen } else { none }));
        let (banned, of_banned) = lists(rows.iter().map(|row| row.banned));
        let uniforms: Vec<f32> = rows.iter().map(|row| row.uniform).collect();
        Self {
            len: rows.len(),
            params: Memory::from_values(&params.collect::<Vec<_>>()),
            uniforms: Memory::from_values(&uniforms),
            edits: !seen.is_empty() || !banned.is_empty(),
            seen: Memory::from_values(&seen),
            of_seen: Memory::from_values(&of_seen),
            banned: Memory::from_values(&banned),
            of_banned: Memory::from_values(&of_banned),
        }
    }

    /// Memory for `rows` rows that kernels fill in, with `banned` and `seen` tokens of all rows.
    pub(super) fn room(rows: usize, banned: usize, seen: usize) -> Self {
        let memory = |each: usize| Memory::zeros(each * rows);
        Self {
            len: rows,
            params: memory(size_of::<Params>()),
            uniforms: memory(4),
            seen: Memory::zeros(4 * seen),
            of_seen: memory(8),
            banned: Memory::zeros(4 * banned),
            of_banned: memory(8),
            edits: false,
        }
    }
}

const OP: &str = "sample::forward";
/// Result words of a row: the sampled token (u32), its log-probability, and its log-probability in the filtered
/// distribution (f32).
pub const SAMPLED: usize = 3;

/// The samples in the words of some rows: all tokens, then all log-probabilities, then those in the filtered
/// distribution.
pub fn unpacked(words: &[f32]) -> impl Iterator<Item = Sampled> {
    let n = words.len() / SAMPLED;
    (0..n).map(move |i| Sampled { token: words[i].to_bits(), logprob: words[n + i], sample_logprob: words[2 * n + i] })
}

/// Samples one token per row of f32 logits, `stride` apart, of a vocabulary whose parts end at `ends` (i32). It samples
/// like `ops::sample::forward_parts` and returns words for `unpacked`. Seen and banned tokens outside the vocabulary
/// are skipped.
pub fn forward(logits: View, strides: [usize; 2], ends: &Memory, rows: &Rows) -> Memory {
    let mut sampled = Memory::scratch(4 * SAMPLED * rows.len);
    share(logits, strides, ends, rows, 0..rows.len, &mut sampled);
    sampled
}

/// The same for the rows `share` alone, whose logits (share, v), `stride` apart, come first. Writes to `sampled`, after
/// the words of the rows before.
pub fn share(
    logits: View,
    [stride, v]: [usize; 2],
    ends: &Memory,
    rows: &Rows,
    share: Range<usize>,
    sampled: &mut Memory,
) {
    let mut values = sampled.view_mut(DType::F32);
    let first = SAMPLED * share.start;
    let mut part =
        |i: usize| values.reborrow().part(first + i * share.len()..first + (i + 1) * share.len()).arg(DType::F32);
    let [tokens, logprobs, sample_logprobs] = [part(0), part(1), part(2)];
    let (len, parts) = (share.len(), ends.bytes() / size_of::<i32>());
    assert!((1..=VOCABULARY_MAX).contains(&v), "{OP}: the vocabulary must be 1 to {VOCABULARY_MAX} (got {v})");
    assert!((1..=PARTS_MAX).contains(&parts), "{OP}: the vocabulary may have 1 to {PARTS_MAX} parts (got {parts})");
    // Memory for edited logits.
    let mut scratch = Memory::scratch(if rows.edits { len * v * size_of::<f32>() } else { 0 });
    let from = |memory: &Memory, bytes: usize| {
        let first = share.start * bytes / 4;
        memory.view(DType::F32).part(first..first + len * bytes / 4).arg(DType::F32)
    };
    let args = [
        logits.arg(DType::F32),
        stride.into(),
        dim(OP, v),
        ends.arg(),
        dim(OP, parts),
        from(&rows.params, size_of::<Params>()),
        from(&rows.uniforms, 4),
        rows.seen.arg(),
        from(&rows.of_seen, 8),
        rows.banned.arg(),
        from(&rows.of_banned, 8),
        scratch.arg_mut(),
        tokens,
        logprobs,
        sample_logprobs,
    ];
    let shared = STATS_BYTES * v.div_ceil(SPAN) + size_of::<f32>() * v.div_ceil(TILE);
    gpu().launch("sample_rows", [len, 1, 1], THREADS, shared, &args);
}
