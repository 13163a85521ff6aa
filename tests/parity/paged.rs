//! Prefill and decode through the paged cache.

use crate::parity::golden::{LANGUAGE_MODELS, Model, PROMPT};
use rlhf_hpc::model::{Head, Keys};
use rlhf_hpc::ops::attention::{KvLayer, PAGE, PagedSequence};
use rlhf_hpc::tensor::{DType, Tensor};

pub fn argmax(x: &[f32]) -> u32 {
    let best = x.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.expect("a row is not empty").0 as u32
}

/// The hidden state of `tokens[past..]` of one sequence whose first `past` tokens are cached.
fn extend(m: &Model, cache: &mut [KvLayer], blocks: &[u32], tokens: &[u32], past: usize) -> Tensor {
    let positions: Vec<u32> = (past as u32..tokens.len() as u32).collect();
    let sequences = [PagedSequence { past, tokens: tokens.len() - past, blocks }];
    let keys = Keys::Paged { cache, sequences: &sequences };
    m.transformer.forward(&m.weights, &tokens[past..], &positions, keys, None)
}

#[test]
fn greedy_generation_through_the_cache_is_that_of_transformers_token_for_token() {
    for name in LANGUAGE_MODELS {
        let m = Model::load(name, Head::LanguageModel, DType::F32);
        let expected = m.golden.integers("greedy");
        let mut cache = m.transformer.kv_cache(8);
        let blocks = [5, 2];
        let (mut tokens, mut past) = (expected[..PROMPT].to_vec(), 0);
        while tokens.len() < expected.len() {
            let hidden = extend(&m, &mut cache, &blocks, &tokens, past);
            past = tokens.len();
            let logits = m.transformer.logits_part(&m.weights, &hidden, &[hidden.rows() as u32 - 1]);
            tokens.push(argmax(logits.row(0)));
        }
        assert_eq!(tokens, expected, "{name}");
    }
}

/// One step of a batch: sequence s has `past` cached tokens and gets `new` more.
struct Step {
    sequence: usize,
    past: usize,
    new: usize,
}

/// Runs all sequences of the golden in chunks that differ by sequence and step, several sequences a batch.
fn chunked_hidden(m: &Model) -> Tensor {
    let sequences: Vec<_> = m.cu_seqlens.windows(2).map(|w| w[0]..w[1]).collect();
    let pages = 4 * sequences.len() as u32;
    let mut cache = m.transformer.kv_cache(pages as usize);
    // Pages of one sequence are scattered and descend.
    let blocks: Vec<Vec<u32>> = (0..sequences.len() as u32)
        .map(|s| (0..4).map(|i| pages - 1 - i * sequences.len() as u32 - s).collect())
        .collect();
    let mut past = vec![0; sequences.len()];
    let mut all = Tensor::zeros(m.tokens.len(), m.transformer.arch.width);
    for round in 0.. {
        let left = |s: usize| sequences[s].len() - past[s];
        let steps: Vec<Step> = (0..sequences.len())
            .filter(|&s| left(s) > 0)
            .map(|s| Step { sequence: s, past: past[s], new: [1, 3, 1, 17, 1][(round + s) % 5].min(left(s)) })
            .collect();
        if steps.is_empty() {
            break;
        }
        let flat = |step: &Step| {
            let start = sequences[step.sequence].start + step.past;
            start..start + step.new
        };
        let rows: Vec<usize> = steps.iter().flat_map(flat).collect();
        let tokens: Vec<u32> = rows.iter().map(|&r| m.tokens[r]).collect();
        let positions: Vec<u32> = rows.iter().map(|&r| m.positions[r]).collect();
        let paged: Vec<PagedSequence> = steps
            .iter()
            .map(|s| {
                let covering = (s.past + s.new).div_ceil(PAGE);
                PagedSequence { past: s.past, tokens: s.new, blocks: &blocks[s.sequence][..covering] }
            })
            .collect();
        let keys = Keys::Paged { cache: &mut cache, sequences: &paged };
        let hidden = m.transformer.forward(&m.weights, &tokens, &positions, keys, None);
        for (i, &row) in rows.iter().enumerate() {
            all.row_mut(row).copy_from_slice(hidden.row(i));
        }
        for step in &steps {
            past[step.sequence] += step.new;
        }
    }
    all
}

#[test]
fn prefill_in_chunks_and_decode_equal_the_packed_forward_bitwise() {
    for name in LANGUAGE_MODELS {
        for dtype in [DType::F32, DType::Bf16] {
            let m = Model::load(name, Head::LanguageModel, dtype);
            let (packed, paged) = (m.hidden(None), chunked_hidden(&m));
            for row in 0..packed.rows() {
                let equal = packed.row(row).iter().zip(paged.row(row)).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(equal, "{name} {dtype:?}: row {row} of {}", packed.rows());
            }
        }
    }
}
