//! The results of a beam search, regardless of other searches at the same time. `tests/parity` compares it with
//! transformers.

use crate::models::{prompts, recorded_and_trained, requested};
use crate::rollout::models::{config, llama, responses, search};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::experience::Finish;
use rlhf_hpc::ops::attention::PAGE;
use rlhf_hpc::rollout::{Beams, EarlyStopping};
use rlhf_hpc::tensor::DType;

const LENGTHS: &[usize] = &[3, 90, 64, 17, 33];

fn beams(count: usize) -> Beams {
    Beams { count, early_stopping: EarlyStopping::False, length_penalty: 0.7 }
}

#[test]
fn a_search_is_the_same_for_any_other_requests_batch_chunk_and_cache_size() {
    let (tiny, prompts) = (llama(), prompts(LENGTHS));
    let config = RolloutConfig { stop_token_ids: (40..50).collect(), ..config(40, 3) };
    let requests = requested(&tiny.transformer, &prompts, &config);
    let found = |config: &RolloutConfig, requests| search(&tiny, config, beams(3), requests).expect("a search");
    let expected = found(&config, &requests);
    assert!(expected.iter().any(|response| response.finish == Finish::Stop), "none ends");
    for (request, expected) in requests.chunks(3).zip(expected.chunks(3)) {
        assert_eq!(found(&config, request), expected, "alone");
    }
    // Space for the beams of the longest prompt only, which share the 2 pages of the prompt.
    let pages = 90 / PAGE + 3 * ((90 + 39_usize).div_ceil(PAGE) - 90 / PAGE);
    let kv_bytes_max = (pages * tiny.transformer.kv_page_bytes(DType::F32).iter().sum::<usize>()) as u64;
    for changed in [
        RolloutConfig { batch_max: 1, ..config.clone() },
        RolloutConfig { batch_max: 7, prefill_tokens_max: 3, ..config.clone() },
        RolloutConfig { kv_bytes_max, ..config.clone() },
    ] {
        assert_eq!(found(&changed, &requests), expected, "{changed:?}");
    }
    let tight = RolloutConfig { kv_bytes_max: kv_bytes_max - 1, ..config };
    let refused = search(&tiny, &tight, beams(3), &requests).expect_err("a page too few").message;
    assert!(refused.contains(&format!("prompt 101: 3 beams of up to 130 tokens need {pages} KV pages")), "{refused}");
    let refused = search(&tiny, &tight, beams(2), &requests).expect_err("more than there are").message;
    assert!(refused.contains("prompt 100: at most 2 responses from 2 beams are possible (got 3)"), "{refused}");
}

#[test]
fn scores_use_the_recorded_logprobs_which_equal_those_of_the_training_forward() {
    let (tiny, prompts) = (llama(), prompts(LENGTHS));
    let config = RolloutConfig { stop_token_ids: (40..50).collect(), ..config(25, 4) };
    let found = search(&tiny, &config, beams(4), &requested(&tiny.transformer, &prompts, &config)).expect("a search");
    let [recorded, trained] = recorded_and_trained(&tiny.transformer, &tiny.weights, &prompts, &found, 1.0);
    assert_eq!(recorded, trained);
    for of_prompt in found.chunks(4) {
        assert!(of_prompt.is_sorted_by(|a, b| a.score >= b.score), "the best first");
        for response in of_prompt {
            let sum: f64 = response.logprobs.iter().map(|&l| f64::from(l)).sum();
            let score = sum / (response.tokens.len() as f64).powf(0.7);
            assert!((f64::from(response.score.expect("a score")) - score).abs() < 1e-4, "{response:?}");
        }
    }
}

#[test]
fn a_search_of_one_beam_that_stops_early_is_greedy_decoding() {
    let (tiny, prompts) = (llama(), prompts(LENGTHS));
    let config =
        RolloutConfig { temperature: 0.0, stop_token_ids: (20..50).collect(), response_tokens_min: 5, ..config(30, 1) };
    let one = Beams { early_stopping: EarlyStopping::True, ..beams(1) };
    let found = search(&tiny, &config, one, &requested(&tiny.transformer, &prompts, &config)).expect("a search");
    let greedy = responses(&tiny, &config, &prompts);
    assert!(greedy.iter().any(|response| response.finish == Finish::Stop), "none ends");
    for (found, greedy) in found.iter().zip(&greedy) {
        assert_eq!((&found.tokens, &found.logprobs, found.finish), (&greedy.tokens, &greedy.logprobs, greedy.finish));
    }
}
