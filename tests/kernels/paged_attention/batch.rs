//! Sequences in a cache with scattered pages, and the expected results of attention.

use crate::attention_reference::{self, Case, ends, gathered};
use crate::bf16;
use rlhf_hpc::device::cpu::attention::{AttentionShape, PAGE, PagedSequence, Span};
use rlhf_hpc::device::cuda::kv_cache::{KvPages, SequenceTable, append_codes, kv_append};
use rlhf_hpc::device::cuda::rope::Table;
use rlhf_hpc::device::cuda::{Memory, paged_attention};
use rlhf_hpc::dtype::{DType, KvDtype};

pub fn shape(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    // More than 1 / sqrt(head_dim), so that some keys count for much more than others.
    let scale = 1.7 / (head_dim as f32).sqrt();
    AttentionShape { scale, ..attention_reference::shape(heads, kv_heads, head_dim, window) }
}

/// (past, tokens) of each sequence, and its pages.
fn sequences<'a>(chunks: &[(usize, usize)], tables: &'a [Vec<u32>]) -> Vec<PagedSequence<'a>> {
    let of = |(&(past, tokens), blocks): (&(usize, usize), &'a Vec<u32>)| PagedSequence { past, tokens, blocks };
    chunks.iter().zip(tables).map(of).collect()
}

/// Appends rows that are already rotated to the cache, with angles of 0.
pub fn append(cache: &mut KvPages, k: &Memory, v: &Memory, sequences: &[PagedSequence], shape: &AttentionShape) {
    let AttentionShape { heads, head_dim: e, .. } = *shape;
    let rows: usize = sequences.iter().map(|sequence| sequence.tokens).sum();
    if shape.kv == KvDtype::Fp8 {
        return append_codes(cache, [k, v].map(|x| x.view(DType::Bf16)), &SequenceTable::new(sequences, shape));
    }
    let [mut q, positions] = [2 * heads * e, 4].map(|bytes| Memory::zeros(bytes * rows));
    let angles = Table::new(e, &vec![1.0; e / 2], &vec![0.0; e / 2], &[]);
    let (q, kv, table) =
        (q.view_mut(DType::Bf16), [k, v].map(|x| x.view(DType::Bf16)), SequenceTable::new(sequences, shape));
    kv_append(cache, q, kv, (&positions, &angles), &table);
}

/// Whole sequences, one after the other.
pub struct Batch {
    pub case: Case,
    pub ends: Vec<usize>,
}

impl Batch {
    pub fn new(shape: &AttentionShape, lengths: &[usize]) -> Self {
        let ends = ends(lengths);
        Self { case: Case::new(ends[lengths.len()], *shape), ends }
    }

    /// Pages of each sequence, assigned round-robin in descending order.
    fn tables(&self) -> (usize, Vec<Vec<u32>>) {
        let needed: Vec<usize> = self.ends.windows(2).map(|ends| (ends[1] - ends[0]).div_ceil(PAGE)).collect();
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

    /// The rows of `x` that are new in `sequences`.
    fn rows(&self, x: &[f32], heads: usize, sequences: &[PagedSequence]) -> Memory {
        let width = heads * self.case.shape.head_dim;
        let rows = sequences.iter().zip(&self.ends).flat_map(|(sequence, first)| {
            let from = first + sequence.past;
            &x[from * width..(from + sequence.tokens) * width]
        });
        Memory::from_values(&bf16(&rows.copied().collect::<Vec<_>>()))
    }

    pub fn append_to(&self, cache: &mut KvPages, sequences: &[PagedSequence]) {
        let shape = &self.case.shape;
        let [k, v] = self.case.new.each_ref().map(|x| self.rows(x, shape.kv_heads, sequences));
        append(cache, &k, &v, sequences, shape);
    }

    /// o for `chunks`: (past, tokens) of each sequence, decoded split or not. The past tokens are appended to the cache
    /// first.
    pub fn run(&self, split: bool, chunks: &[(usize, usize)]) -> Vec<f32> {
        let (pages, tables) = self.tables();
        let mut cache = KvPages::new(pages, &self.case.shape);
        let past: Vec<(usize, usize)> = chunks.iter().map(|chunk| (0, chunk.0)).collect();
        self.append_to(&mut cache, &sequences(&past, &tables));
        let new = sequences(chunks, &tables);
        self.append_to(&mut cache, &new);
        let q = self.rows(&self.case.q, self.case.shape.heads, &new);
        let table = SequenceTable::with(&new, &self.case.shape, split);
        let mut o = Memory::scratch(q.bytes());
        paged_attention::forward(q.view(DType::Bf16), &cache, &table, o.view_mut(DType::Bf16));
        o.view(DType::Bf16).to_f32()
    }

    /// The same as computed in training, without a cache, which is compared with the CPU.
    pub fn trained(&self, chunks: &[(usize, usize)]) -> Vec<f32> {
        let span = |(&(past, tokens), &first): (&(usize, usize), &usize)| Span {
            row: first + past,
            tokens,
            past,
            key_row: first,
            keys: past + tokens,
        };
        let spans: Vec<Span> = chunks.iter().zip(&self.ends).map(span).filter(|span| span.tokens > 0).collect();
        let (o, lse) = self.case.forward(&spans);
        self.case.assert_forward_near(&format!("{chunks:?} {:?}", self.case.shape), &spans, &o, &lse);
        let rows: Vec<usize> = spans.iter().flat_map(|span| span.row..span.row + span.tokens).collect();
        gathered(&o, &rows, self.case.widths()[0])
    }

    /// Asserts that the tokens of `chunks` have the bits of training, decoded whole and decoded split.
    pub fn assert_training_bits(&self, chunks: &[(usize, usize)]) {
        let want = self.trained(chunks);
        for split in [false, true] {
            let got = self.run(split, chunks);
            assert!(got == want, "{chunks:?}, split {split}, {:?}: other bits than training's", self.case.shape);
        }
    }
}
