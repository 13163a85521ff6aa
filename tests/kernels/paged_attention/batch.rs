//! Sequences with numbers of their own, in a cache whose pages lie anywhere; and what attention should give.

use crate::attention_reference::{Case, ends};
use crate::{bf16, numbers};
use rlhf_hpc::device::cpu::attention::{AttentionShape, PAGE, PagedSequence, Span};
use rlhf_hpc::device::cuda::attention::{self, SpanTable};
use rlhf_hpc::device::cuda::kv_cache::{Decode, KvPages, SequenceTable, kv_append};
use rlhf_hpc::device::cuda::{Memory, paged_attention};
use rlhf_hpc::dtype::DType;

pub fn shape(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    // More than 1 / sqrt(head_dim), so that some keys count for much more than others.
    let scale = 2.5 / (head_dim as f32).sqrt();
    AttentionShape { heads, kv_heads, head_dim, window, scale }
}

/// Whole sequences, as bf16 bits by sequence: q (len, h*e), k and v (len, g*e).
#[derive(Clone)]
pub struct Batch {
    pub shape: AttentionShape,
    pub lengths: Vec<usize>,
    pub q: Vec<Vec<u16>>,
    pub k: Vec<Vec<u16>>,
    pub v: Vec<Vec<u16>>,
    how: Decode,
}

fn value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

impl Batch {
    pub fn new(shape: &AttentionShape, lengths: &[usize], seed: u32) -> Self {
        let (own, shared) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let part = |of: u32, width: usize| -> Vec<Vec<u16>> {
            let sequence = |(i, len): (usize, &usize)| bf16(&numbers(seed * 1000 + of * 100 + i as u32, len * width));
            lengths.iter().enumerate().map(sequence).collect()
        };
        // Louder queries: sharper softmax, maxima that move.
        let q = part(0, own).iter().map(|q| bf16(&q.iter().map(|x| value(*x) * 2.0).collect::<Vec<_>>())).collect();
        let (k, v) = (part(1, shared), part(2, shared));
        Self { shape: *shape, lengths: lengths.to_vec(), q, k, v, how: Decode::Whole }
    }

    /// The same, decoded otherwise.
    pub fn decoded(&self, how: Decode) -> Self {
        Self { how, ..self.clone() }
    }

    /// Pages of each sequence, dealt backwards and in turns.
    fn tables(&self) -> (usize, Vec<Vec<u32>>) {
        let needed: Vec<usize> = self.lengths.iter().map(|len| len.div_ceil(PAGE)).collect();
        let pages = needed.iter().sum::<usize>() + 1;
        let (mut next, mut tables) = (pages, vec![Vec::new(); needed.len()]);
        for round in 0..needed.iter().copied().max().unwrap_or(0) {
            for (table, needed) in tables.iter_mut().zip(&needed) {
                if round < *needed {
                    next -= 1;
                    table.push(next as u32);
                }
            }
        }
        (pages, tables)
    }

    /// The rows of `x` that are new in `sequences`, which are those of `which`.
    fn rows(x: &[Vec<u16>], width: usize, sequences: &[PagedSequence], which: &[usize]) -> Memory {
        let mut rows = Vec::new();
        for (sequence, i) in sequences.iter().zip(which) {
            rows.extend_from_slice(&x[*i][sequence.past * width..(sequence.past + sequence.tokens) * width]);
        }
        Memory::of(&rows)
    }

    pub fn append_to(&self, cache: &mut KvPages, sequences: &[PagedSequence], which: &[usize]) {
        let table = SequenceTable::new(sequences, &self.shape);
        let width = self.shape.kv_heads * self.shape.head_dim;
        let (k, v) = (Self::rows(&self.k, width, sequences, which), Self::rows(&self.v, width, sequences, which));
        kv_append(cache, k.view(DType::Bf16), v.view(DType::Bf16), &table, &self.shape);
    }

    pub fn attend(&self, cache: &KvPages, sequences: &[PagedSequence], which: &[usize]) -> Vec<u16> {
        let table = SequenceTable::with(sequences, &self.shape, self.how);
        let width = self.shape.heads * self.shape.head_dim;
        let q = Self::rows(&self.q, width, sequences, which);
        let mut o = Memory::scratch(q.bytes());
        paged_attention::forward(q.view(DType::Bf16), cache, &table, &self.shape, o.view_mut(DType::Bf16));
        o.read(table.rows() * width)
    }

    /// Bits of o for `chunks`: (past, tokens) of each sequence; what is past comes to the cache first.
    pub fn run(&self, chunks: &[(usize, usize)]) -> Vec<u16> {
        let (pages, tables) = self.tables();
        let mut cache = KvPages::new(pages, &self.shape);
        let which: Vec<usize> = (0..chunks.len()).collect();
        let sequences = |of: fn(&(usize, usize)) -> (usize, usize)| -> Vec<PagedSequence> {
            let place = |(chunk, blocks)| {
                let (past, tokens) = of(chunk);
                PagedSequence { past, tokens, blocks }
            };
            chunks.iter().zip(&tables).map(|(chunk, blocks)| place((chunk, &blocks[..]))).collect()
        };
        self.append_to(&mut cache, &sequences(|chunk| (0, chunk.0)), &which);
        let new = sequences(|chunk| *chunk);
        self.append_to(&mut cache, &new, &which);
        self.attend(&cache, &new, &which)
    }

    /// Bits of o of all rows, as training computes them: packed, without a cache.
    pub fn packed(&self) -> Vec<u16> {
        let table = SpanTable::packed(&ends(&self.lengths), &self.shape);
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| Memory::of(&x.concat()));
        let values = q.bytes() / 2;
        let (mut o, mut lse) = (Memory::scratch(q.bytes()), Memory::scratch(values / self.shape.head_dim * 4));
        let [q, k, v] = [&q, &k, &v].map(|x| x.view(DType::Bf16));
        attention::forward(q, k, v, &table, false, o.view_mut(DType::Bf16), lse.view_mut(DType::F32));
        o.read(values)
    }

    /// Bits of o of the first sequence's rows from `past` on, as training computes them.
    pub fn trained(&self, past: usize) -> Vec<u16> {
        let (keys, width) = (self.lengths[0], self.shape.heads * self.shape.head_dim);
        let tokens = keys - past;
        let table = SpanTable::new(&[Span { row: 0, tokens, past, key_row: 0, keys }], &self.shape);
        let [q, k, v] = [&self.q[0][past * width..], &self.k[0], &self.v[0]].map(Memory::of);
        let (mut o, mut lse) = (Memory::scratch(q.bytes()), Memory::scratch(tokens * self.shape.heads * 4));
        let [q, k, v] = [&q, &k, &v].map(|x| x.view(DType::Bf16));
        attention::forward(q, k, v, &table, false, o.view_mut(DType::Bf16), lse.view_mut(DType::F32));
        o.read(tokens * width)
    }

    /// Asserts that `o` is softmax in f64 within its rounding.
    pub fn assert_softmax(&self, o: &[u16], chunks: &[(usize, usize)]) {
        let values = |x: &[Vec<u16>]| x.concat().iter().map(|bits| value(*bits)).collect();
        let case = Case::of([values(&self.q), values(&self.k), values(&self.v)], self.shape);
        let ends = ends(&self.lengths);
        let spans: Vec<Span> = chunks
            .iter()
            .zip(&ends)
            .map(|(&(past, tokens), &first)| Span {
                row: first + past,
                tokens,
                past,
                key_row: first,
                keys: past + tokens,
            })
            .collect();
        let rows: Vec<usize> = spans.iter().flat_map(|span| span.row..span.row + span.tokens).collect();
        let o: Vec<f32> = o.iter().map(|bits| value(*bits)).collect();
        case.reference(&spans).of_rows(&rows, &self.shape).o_holds(&format!("{chunks:?} {:?}", self.shape), &o);
    }
}
