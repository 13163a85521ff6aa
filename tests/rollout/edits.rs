//! Biases, bad words, likeliest tokens and seeds of single requests.

use crate::models::{prompts, requested};
use crate::rollout::models::{STEP, complete, config, llama, run, search};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::experience::Response;
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Beams, EarlyStopping, Edits, Request, Stop};
use std::sync::Arc;

fn edited(request: &Request, bias: Vec<(u32, f32)>, bad_words: Vec<Vec<u32>>) -> Request {
    Request { edits: Arc::new(Edits { bias, bad_words }), ..request.clone() }
}

/// Whether `word` occurs after the prompt, or begins within it.
fn occurs(request: &Request, response: &Response, word: &[u32]) -> bool {
    let all = [&request.tokens[..], &response.tokens].concat();
    let first = request.tokens.len().saturating_sub(word.len() - 1);
    all[first..].windows(word.len()).any(|window| window == word)
}

#[test]
fn bad_words_do_not_occur_and_biases_make_tokens_certain_or_impossible() {
    let (tiny, prompts) = (llama(), prompts(&[8, 33]));
    let sampled = RolloutConfig { ignore_eos: true, ..config(30, 2) };
    for config in [sampled.clone(), RolloutConfig { temperature: 0.0, ..sampled.clone() }] {
        let requests = requested(&tiny.transformer, &prompts, &config);
        let free = complete(&tiny, &config, &requests);
        for (request, free) in requests.iter().zip(&free) {
            // A token, a pair, and a pair that begins with the prompt's last token.
            let last = *request.tokens.last().expect("a prompt");
            let words = [vec![free.tokens[7]], free.tokens[2..4].to_vec(), vec![last, free.tokens[0]]];
            let got = complete(&tiny, &config, &[edited(request, vec![], words.to_vec())]).remove(0);
            assert!(words.iter().all(|word| occurs(request, free, word) && !occurs(request, &got, word)), "{got:?}");
            let bias = vec![(11, 1e4), (free.tokens[0], -1e4)];
            let mut bias = if free.tokens[0] == 11 { vec![(11, 1e4)] } else { bias };
            bias.sort_by_key(|(token, _)| *token);
            let got = complete(&tiny, &config, &[edited(request, bias, vec![])]).remove(0);
            assert!(got.tokens.iter().all(|token| *token == 11) && got.logprobs.iter().all(|l| *l < 0.0), "{got:?}");
        }
    }
    let beams = Beams { count: 3, early_stopping: EarlyStopping::False, length_penalty: 1.0 };
    let requests = requested(&tiny.transformer, &prompts, &RolloutConfig { samples_per_prompt: 1, ..sampled });
    let free = search(&tiny, &config(30, 1), beams, &requests).expect("a search");
    for (request, free) in requests.iter().zip(&free) {
        let words = vec![free.tokens[1..3].to_vec(), free.tokens[9..10].to_vec()];
        let request = edited(request, vec![(12, 2.0)], words.clone());
        let got = search(&tiny, &config(30, 1), beams, std::slice::from_ref(&request)).expect("a search").remove(0);
        assert!(words.iter().all(|word| !occurs(&request, &got, word)), "{got:?}");
        // The score includes the bias that was added to a log-probability.
        let more = 2.0 * got.tokens.iter().filter(|token| **token == 12).count() as f32;
        let sum = got.logprobs.iter().sum::<f32>() + more;
        assert!((got.score.expect("a score") - sum / got.tokens.len() as f32).abs() < 1e-4, "{got:?}");
    }
}

#[test]
fn tokens_that_mean_images_are_never_sampled_and_not_in_the_kept_set() {
    let (tiny, prompts) = (llama(), prompts(&[8, 33]));
    let config = RolloutConfig { ignore_eos: true, keep_sampling_mask: true, ..config(30, 2) };
    let requests = requested(&tiny.transformer, &prompts, &config);
    let free = complete(&tiny, &config, &requests);
    for (request, free) in requests.iter().zip(&free) {
        let mut never_sampled = vec![free.tokens[0], free.tokens[7]];
        never_sampled.sort_unstable();
        let stop = Stop { never_sampled: never_sampled.clone(), ..Stop::clone(&request.stop) };
        let request = Request { stop: Arc::new(stop), ..request.clone() };
        let got = complete(&tiny, &config, std::slice::from_ref(&request)).remove(0);
        assert!(request.edits_logits() && got.tokens.iter().all(|token| !never_sampled.contains(token)), "{got:?}");
        for mask in &got.sampling_masks {
            assert!(!mask.is_whole() && mask.ids().all(|id| !never_sampled.contains(&id)), "{got:?}");
        }
    }
}

#[test]
fn requests_without_edits_sample_the_same_next_to_requests_with_edits() {
    let (tiny, prompts) = (llama(), prompts(&[8, 33, 20]));
    let config = RolloutConfig { repetition_penalty: 1.1, ..config(25, 2) };
    let plain = requested(&tiny.transformer, &prompts, &config);
    let expected = complete(&tiny, &config, &plain);
    let mut mixed = plain.clone();
    for request in mixed.iter_mut().step_by(2) {
        *request = edited(request, vec![(5, 1.0)], vec![vec![40]]);
        request.top_logprobs = 2;
        request.rng = Some(Rng::new(8, Purpose::Sample));
    }
    let got = complete(&tiny, &config, &mixed);
    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert_eq!(got == expected, i % 2 == 1, "response {i}");
    }
}

#[test]
fn the_likeliest_tokens_are_returned_with_the_recorded_logprobs() {
    let (tiny, prompts) = (llama(), prompts(&[8, 33]));
    for (temperature, top_p) in [(0.0, 1.0), (0.7, 0.5)] {
        let config = RolloutConfig { temperature, top_p, ..config(20, 3) };
        let mut requests = requested(&tiny.transformer, &prompts, &config);
        let expected = complete(&tiny, &config, &requests);
        for (i, request) in requests.iter_mut().enumerate() {
            request.top_logprobs = [4, 0, 200][i % 3];
        }
        let got = run(&tiny, &config, &requests, None).expect("a rollout").complete().expect("all of them");
        for (i, (got, expected)) in got.into_iter().zip(expected).enumerate() {
            let n = [4, 0, 97][i % 3];
            assert_eq!(got.top_logprobs.len(), if n > 0 { got.tokens.len() } else { 0 });
            for (top, (token, logprob)) in got.top_logprobs.iter().zip(got.tokens.iter().zip(&got.logprobs)) {
                assert_eq!(top.len(), n);
                assert!(top.is_sorted_by(|a, b| a.1 >= b.1), "{top:?}");
                let found = top.iter().find(|(of, _)| of == token);
                assert!(found.map_or(n < 97, |(_, told)| told == logprob), "{token} {logprob} in {top:?}");
                assert!(temperature > 0.0 || top[0] == (*token, *logprob), "the greedy one is the first");
            }
            assert_eq!(Response { top_logprobs: Vec::new(), ..got }, expected, "samples are the same");
        }
    }
}

#[test]
fn a_request_with_its_own_seed_samples_from_it_at_any_position() {
    let (tiny, prompts) = (llama(), prompts(&[8, 33]));
    let requests = requested(&tiny.transformer, &prompts, &config(20, 2));
    let own = Rng::new(42, Purpose::Sample);
    let by_id: Vec<Request> = requests.iter().map(|request| Request { prompt_id: 0, ..request.clone() }).collect();
    let by_seed: Vec<Request> = requests.iter().map(|request| Request { rng: Some(own), ..request.clone() }).collect();
    // The calls of these tests also use seed 42.
    assert_eq!(complete(&tiny, &config(20, 2), &by_seed), complete(&tiny, &config(20, 2), &by_id), "step {STEP}");
}
