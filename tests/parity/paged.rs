//! Prefill and decode through the paged cache, without and with adapters, and rows packed and alone.

use crate::parity::golden::{ADAPTED, DENSE_MODELS, LANGUAGE_MODELS, Model};
use rlhf_hpc::dtype::KvDtype;
use rlhf_hpc::model::{Head, Keys, LayerCache};
use rlhf_hpc::ops::attention::{Paged, PagedSequence};
use rlhf_hpc::tensor::{DType, Tensor};

fn argmax(x: &[f32]) -> u32 {
    let best = x.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.expect("a row is not empty").0 as u32
}

/// The hidden state of `tokens[past..]` of one sequence whose first `past` tokens are cached.
fn extend(m: &Model, cache: &mut [LayerCache], blocks: &[u32], tokens: &[u32], past: usize) -> Tensor {
    let positions: Vec<u32> = (past as u32..tokens.len() as u32).collect();
    let sequences = [PagedSequence { past, tokens: tokens.len() - past, blocks }];
    let paged: Vec<Paged> = m.transformer.cache_groups().iter().map(|_| sequences.as_slice().into()).collect();
    let keys = Keys::Paged(cache, &paged);
    m.transformer.forward(&m.weights, &tokens[past..], &positions, keys, None)
}

#[test]
fn greedy_generation_through_the_cache_equals_transformers_token_for_token() {
    let models = LANGUAGE_MODELS.iter().chain(&DENSE_MODELS);
    let models = models.map(|name| (name, Model::load(name, Head::LanguageModel, DType::F32)));
    let adapted = ADAPTED.iter().map(|name| (name, Model::adapted(name, Head::LanguageModel, DType::F32)));
    for (name, m) in models.chain(adapted) {
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

/// Rows as long as several pages and windows, in chunks that end anywhere in a page, and token by token.
#[test]
fn hidden_states_are_bitwise_the_same_packed_alone_prefilled_in_chunks_and_decoded() {
    let models = LANGUAGE_MODELS.iter().chain(&DENSE_MODELS);
    let of_cache = [(DType::F32, KvDtype::Model), (DType::Bf16, KvDtype::Model), (DType::F32, KvDtype::Fp8)];
    for (name, (dtype, kv)) in models.flat_map(|name| of_cache.map(|of| (name, of))) {
        let mut m = Model::load(name, Head::LanguageModel, dtype);
        m.transformer.keep_keys_in(kv);
        let (packed, width) = (m.hidden(None).data().to_vec(), m.transformer.arch.width);
        let mut cache = m.transformer.kv_cache(dtype, &vec![8; m.transformer.cache_groups().len()]);
        for ends in m.cu_seqlens.windows(2) {
            let (tokens, len) = (&m.tokens[ends[0]..ends[1]], ends[1] - ends[0]);
            let expected = &packed[ends[0] * width..ends[1] * width];
            let (positions, whole): (Vec<u32>, _) = ((0..len as u32).collect(), [0, len]);
            let alone = m.transformer.forward(&m.weights, tokens, &positions, Keys::Packed(whole[..].into()), None);
            assert!(alone.data() == expected, "{name} {dtype:?} {kv:?}: a row of {len} alone");
            for chunk in [1, 5, 33] {
                let mut found = Vec::new();
                for past in (0..len).step_by(chunk) {
                    let end = (past + chunk).min(len);
                    found.extend_from_slice(extend(&m, &mut cache, &[6, 1, 3], &tokens[..end], past).data());
                }
                assert!(found == expected, "{name} {dtype:?} {kv:?}: a row of {len} in chunks of {chunk}");
            }
        }
    }
}
