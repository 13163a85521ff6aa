//! The sampler and the trainer are the same function; its results depend on the request alone.

use crate::models::{prompts, recorded_and_trained, requested};
use crate::parity::golden::{DENSE_MODELS, directory};
use crate::rollout::models::{STEP, Tiny, complete, config, llama, responses, run, run_at_step, tiny};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cpu::pool;
use rlhf_hpc::experience::Response;
use rlhf_hpc::model::{Head, Transformer, load};
use rlhf_hpc::tensor::DType;
use serde_json::json;
use std::cell::Cell;

fn families(dtype: DType) -> Vec<(&'static str, Tiny)> {
    let mistral = json!({"sliding_window": 21});
    let keys = [
        ("llama", json!({"tie_word_embeddings": true})),
        ("mistral", mistral),
        ("qwen2", json!({})),
        ("qwen3", json!({})),
    ];
    keys.map(|(family, keys)| (family, tiny(family, &keys, dtype))).into()
}

#[test]
fn recorded_logprobs_equal_the_training_forward_bitwise() {
    let prompts = prompts(&[1, 70, 31, 32, 33, 5]);
    for dtype in [DType::F32, DType::Bf16] {
        for (name, tiny) in families(dtype) {
            for temperature in [1.0, 0.7] {
                let config = RolloutConfig { temperature, prefill_tokens_max: 40, ..config(45, 2) };
                let sampled = responses(&tiny, &config, &prompts);
                let [recorded, trained] =
                    recorded_and_trained(&tiny.transformer, &tiny.weights, &prompts, &sampled, temperature);
                assert_eq!(recorded, trained, "{name} {dtype:?} at temperature {temperature}");
                assert!(sampled.iter().all(|response| response.logprobs == response.sample_logprobs));
            }
        }
    }
}

/// Windows, caps, scales, ropes and norms of all kinds, in pages that prompts of several chunks fill.
#[test]
fn recorded_logprobs_of_dense_families_equal_the_training_forward_bitwise() {
    let prompts = prompts(&[1, 70, 33]);
    let config = RolloutConfig { temperature: 0.7, prefill_tokens_max: 41, ..config(45, 1) };
    for (name, dtype) in DENSE_MODELS.iter().flat_map(|name| [DType::F32, DType::Bf16].map(|dtype| (name, dtype))) {
        let (arch, weights) =
            load::load(Device::Cpu, &directory(name), Head::LanguageModel, dtype, 0).expect("a golden model");
        let transformer = Transformer::new(&arch.for_rows(128), &weights.table);
        let tiny = Tiny { transformer, weights };
        let sampled = responses(&tiny, &config, &prompts);
        let [recorded, trained] = recorded_and_trained(&tiny.transformer, &tiny.weights, &prompts, &sampled, 0.7);
        assert_eq!(recorded, trained, "{name} {dtype:?}");
    }
}

#[test]
fn with_filters_and_greedy_decoding_the_recorded_logprob_is_that_of_the_plain_softmax() {
    let prompts = prompts(&[9, 40]);
    let tiny = llama();
    let filtered = RolloutConfig { top_p: 0.8, top_k: 20, repetition_penalty: 1.2, ..config(30, 3) };
    let greedy = RolloutConfig { temperature: 0.0, ..config(30, 1) };
    for config in [filtered, greedy] {
        let sampled = responses(&tiny, &config, &prompts);
        let [recorded, trained] = recorded_and_trained(&tiny.transformer, &tiny.weights, &prompts, &sampled, 1.0);
        assert_eq!(recorded, trained);
        let mut pairs = sampled.iter().flat_map(|response| response.sample_logprobs.iter().zip(&response.logprobs));
        assert!(pairs.all(|(s, l)| s > l), "filters raise what they keep");
    }
}

#[test]
fn with_a_kept_sampling_mask_the_recorded_logprob_is_that_of_training_and_of_sampling() {
    let (tiny, prompts) = (llama(), prompts(&[9, 40]));
    let plain = RolloutConfig { temperature: 0.8, response_tokens_min: 6, ..config(30, 3) };
    for filtered in [
        RolloutConfig { top_k: 20, ..plain.clone() },
        RolloutConfig { top_p: 0.8, ..plain.clone() },
        RolloutConfig { min_p: 0.05, top_p: 0.95, ..plain },
    ] {
        let without = responses(&tiny, &filtered, &prompts);
        let kept = responses(&tiny, &RolloutConfig { keep_sampling_mask: true, ..filtered }, &prompts);
        let [recorded, trained] = recorded_and_trained(&tiny.transformer, &tiny.weights, &prompts, &kept, 0.8);
        assert_eq!(recorded, trained);
        for (response, without) in kept.iter().zip(&without) {
            assert!(response.tokens == without.tokens && response.sample_logprobs == without.sample_logprobs);
            assert!(without.sampling_masks.is_empty() && response.sampling_masks.len() == response.tokens.len());
            let mut pairs = response.logprobs.iter().zip(&response.sample_logprobs);
            assert!(pairs.all(|(l, s)| (l - s).abs() < 2e-6), "the sample's own");
            for (i, (mask, token)) in response.sampling_masks.iter().zip(&response.tokens).enumerate() {
                assert!(mask.ids().any(|id| id == *token) && mask.ids().count() < 97);
                let ends = tiny.transformer.arch.eos_tokens.iter();
                assert!(i >= 6 || ends.into_iter().all(|end| mask.ids().all(|id| id != *end)), "end tokens are banned");
            }
        }
    }
}

#[test]
fn responses_are_the_same_for_any_batch_chunk_and_cache_size_and_thread_count() {
    let (tiny, prompts) = (llama(), prompts(&[3, 90, 64, 17, 33]));
    let expected = responses(&tiny, &config(60, 4), &prompts);
    let alike = |changed: RolloutConfig, what: &str| {
        assert!(responses(&tiny, &changed, &prompts) == expected, "{what}");
    };
    for batch_max in [1, 3, 20] {
        alike(RolloutConfig { batch_max, ..config(60, 4) }, &format!("batch_max {batch_max}"));
    }
    for prefill_tokens_max in [3, 50] {
        alike(RolloutConfig { prefill_tokens_max, ..config(60, 4) }, &format!("chunks of {prefill_tokens_max}"));
    }
    for pages in [5, 9] {
        let kv_bytes_max = (pages * tiny.transformer.kv_page_bytes(DType::F32).iter().sum::<usize>()) as u64;
        alike(RolloutConfig { kv_bytes_max, ..config(60, 4) }, &format!("{pages} pages"));
    }
    for threads in [1, 2, 3] {
        pool::set_threads(threads);
        alike(config(60, 4), &format!("{threads} threads"));
    }
}

#[test]
fn preemption_in_a_full_cache_changes_no_response() {
    let tiny = llama();
    let prompts = prompts(&[20; 24]);
    let requests = requested(&tiny.transformer, &prompts, &config(150, 1));
    // Eight short responses make the scheduler expect short ones; the long ones then meet a full cache.
    let mixed: Vec<_> = requests
        .into_iter()
        .enumerate()
        .map(|(i, mut request)| {
            request.new_tokens_max = if i < 12 { 5 } else { 150 };
            request
        })
        .collect();
    let roomy = run(&tiny, &config(150, 1), &mixed, None).expect("a rollout");
    let kv_bytes_max = (13 * tiny.transformer.kv_page_bytes(DType::F32).iter().sum::<usize>()) as u64;
    let tight = run(&tiny, &RolloutConfig { kv_bytes_max, ..config(150, 1) }, &mixed, None).expect("a rollout");
    assert_eq!(roomy.preemptions, 0);
    assert!(tight.preemptions > 0, "the cache was not tight");
    assert_eq!(tight.responses, roomy.responses);
}

#[test]
fn a_response_does_not_depend_on_the_other_requests_or_their_order() {
    let (tiny, prompts) = (llama(), prompts(&[8, 50, 33]));
    let config = config(25, 3);
    let all = requested(&tiny.transformer, &prompts, &config);
    let expected = complete(&tiny, &config, &all);
    let backwards: Vec<_> = all.iter().rev().cloned().collect();
    let mut reversed = complete(&tiny, &config, &backwards);
    reversed.reverse();
    assert_eq!(reversed, expected);
    for (request, expected) in all.iter().zip(&expected) {
        assert_eq!(&complete(&tiny, &config, std::slice::from_ref(request)), std::slice::from_ref(expected));
    }
}

#[test]
fn prompts_with_a_common_prefix_share_pages_and_get_the_same_responses_as_alone() {
    let (tiny, mut prompts) = (llama(), prompts(&[90, 75, 100, 66]));
    for i in 1..4 {
        let head = prompts[0].tokens[..70].to_vec();
        let end = head.len().min(prompts[i].tokens.len());
        prompts[i].tokens[..end].clone_from_slice(&head[..end]);
    }
    for prefill_tokens_max in [20, 400] {
        let config = RolloutConfig { prefill_tokens_max, ..config(20, 2) };
        let requests = requested(&tiny.transformer, &prompts, &config);
        let outcome = run(&tiny, &config, &requests, None).expect("a rollout");
        let (read, found) = (331 + 3 * 64, outcome.prefix_hit_tokens);
        assert_eq!((outcome.prompt_tokens, found), (2 * 331, read), "two pages of three prompts, and second samples");
        let mut alone = prompts.iter().flat_map(|prompt| responses(&tiny, &config, std::slice::from_ref(prompt)));
        for (i, response) in outcome.complete().expect("all").into_iter().enumerate() {
            let alone = alone.next().expect("as many");
            let same = response.tokens == alone.tokens && response.logprobs == alone.logprobs;
            assert!(same, "response {i}");
        }
    }
}

#[test]
fn samples_and_steps_differ_and_the_same_step_repeats() {
    let (tiny, prompts) = (llama(), prompts(&[8]));
    let sampled = responses(&tiny, &config(20, 4), &prompts);
    for a in 0..4 {
        assert!((0..a).all(|b| sampled[a].tokens != sampled[b].tokens));
    }
    assert_eq!(responses(&tiny, &config(20, 4), &prompts), sampled);
    let requests = requested(&tiny.transformer, &prompts, &config(20, 4));
    let later = run_at_step(&tiny, &config(20, 4), &requests, None, &|| false, 4)
        .expect("a rollout")
        .complete()
        .expect("all of them");
    assert!(later.iter().zip(&sampled).all(|(a, b)| a.tokens != b.tokens));
}

#[test]
fn a_stopped_rollout_keeps_finished_responses_and_samples_the_rest_again_identically() {
    let (tiny, prompts) = (llama(), prompts(&[5; 30]));
    let config = RolloutConfig { batch_max: 4, ..config(20, 1) };
    let requests = requested(&tiny.transformer, &prompts, &config);
    let whole = complete(&tiny, &config, &requests);
    let asked = Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        asked.get() > 50
    };
    let first = run_at_step(&tiny, &config, &requests, None, &stop, STEP).expect("a rollout");
    let rest: Vec<usize> = (0..30).filter(|&i| first.responses[i].is_none()).collect();
    assert!(!rest.is_empty() && rest.len() < 30, "{} of 30 unfinished", rest.len());
    let missing: Vec<_> = rest.iter().map(|&i| requests[i].clone()).collect();
    let second = complete(&tiny, &config, &missing);
    let mut joined: Vec<Option<Response>> = first.responses;
    for (i, response) in rest.into_iter().zip(second) {
        joined[i] = Some(response);
    }
    assert_eq!(joined.into_iter().flatten().collect::<Vec<_>>(), whole);
}
