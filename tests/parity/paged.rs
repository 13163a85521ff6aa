//! Prefill and decode through the paged cache, without and with adapters.

use crate::parity::golden::{DENSE_MODELS, LANGUAGE_MODELS, Model};
use rlhf_hpc::model::{Head, Keys};
use rlhf_hpc::ops::attention::{KvLayer, Paged, PagedSequence};
use rlhf_hpc::tensor::{DType, Tensor};

fn argmax(x: &[f32]) -> u32 {
    let best = x.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.expect("a row is not empty").0 as u32
}

/// The hidden state of `tokens[past..]` of one sequence whose first `past` tokens are cached.
fn extend(m: &Model, cache: &mut [KvLayer], blocks: &[u32], tokens: &[u32], past: usize) -> Tensor {
    let positions: Vec<u32> = (past as u32..tokens.len() as u32).collect();
    let sequences = [PagedSequence { past, tokens: tokens.len() - past, blocks }];
    let paged: Vec<Paged> = m.transformer.cache_groups().iter().map(|_| sequences.as_slice().into()).collect();
    let keys = Keys::Paged(cache, &paged);
    m.transformer.forward(&m.weights, &tokens[past..], &positions, keys, None)
}

#[test]
fn greedy_generation_through_the_cache_equals_transformers_token_for_token() {
    let load = |name| {
        [Model::load(name, Head::LanguageModel, DType::F32), Model::adapted(name, Head::LanguageModel, DType::F32)]
    };
    let adapted = LANGUAGE_MODELS.iter().flat_map(|name| load(name).map(|model| (name, model)));
    let dense = DENSE_MODELS.iter().map(|name| (name, Model::load(name, Head::LanguageModel, DType::F32)));
    for (name, m) in adapted.chain(dense) {
        let expected = m.golden.integers("greedy");
        let mut cache = m.transformer.kv_cache(m.weights.dtype(), &vec![8; m.transformer.cache_groups().len()]);
        let blocks = [5, 2, 7];
        let (mut tokens, mut past) = (expected[..m.golden.prompt()].to_vec(), 0);
        while tokens.len() < expected.len() {
            let hidden = extend(&m, &mut cache, &blocks, &tokens, past);
            past = tokens.len();
            let logits = m.transformer.logits_part(&m.weights, &hidden, &[hidden.rows() as u32 - 1]);
            tokens.push(argmax(logits.row(0)));
        }
        assert_eq!(tokens, expected, "{name}");
    }
}
