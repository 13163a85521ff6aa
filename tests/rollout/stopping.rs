//! The conditions that end a response, and requests that are rejected before it begins.

use crate::data::text::by_hand;
use crate::models::{prompts, requested};
use crate::rollout::models::{CONTEXT, config, llama, responses, run};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::error::Kind;
use rlhf_hpc::experience::{Finish, Prompt, Response};
use rlhf_hpc::rollout::{Stop, requests};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::text::Tokenizer;
use serde_json::json;
use std::sync::Arc;

#[test]
fn with_ignore_eos_responses_continue_after_end_tokens() {
    let (tiny, prompts) = (llama(), prompts(&[5; 20]));
    let sampled = responses(&tiny, &RolloutConfig { ignore_eos: true, ..config(60, 1) }, &prompts);
    assert!(sampled.iter().all(|r| r.finish == Finish::Length && r.tokens.len() == 60));
    assert!(sampled.iter().any(|r| r.tokens[..59].contains(&2)), "an end token is sampled like any other");
}

#[test]
fn a_stop_token_of_the_config_ends_a_response_also_with_ignore_eos() {
    let (tiny, prompts) = (llama(), prompts(&[5; 20]));
    let config = RolloutConfig { ignore_eos: true, stop_token_ids: vec![7, 8, 9], ..config(60, 1) };
    for response in responses(&tiny, &config, &prompts) {
        let place = response.tokens.iter().position(|t| [7, 8, 9].contains(t));
        assert_eq!(place, (response.finish == Finish::Stop).then(|| response.tokens.len() - 1));
    }
}

#[test]
fn no_end_token_is_sampled_before_the_minimum_length() {
    let (tiny, prompts) = (llama(), prompts(&[5; 60]));
    let sampled = responses(&tiny, &RolloutConfig { response_tokens_min: 25, ..config(60, 1) }, &prompts);
    assert!(sampled.iter().all(|r| r.tokens.len() > 25 && !r.tokens[..25].contains(&2)));
    assert!(sampled.iter().any(|r| r.finish == Finish::Stop));
}

#[test]
fn a_response_ends_at_the_end_of_the_context() {
    let (tiny, prompts) = (llama(), prompts(&[CONTEXT - 6]));
    let config = RolloutConfig { ignore_eos: true, ..config(60, 2) };
    for response in responses(&tiny, &config, &prompts) {
        assert_eq!((response.tokens.len(), response.finish), (6, Finish::Length));
    }
}

#[test]
fn empty_prompts_and_prompts_as_long_as_the_context_are_rejected_with_their_id() {
    let stop = Arc::new(Stop::default());
    for tokens in [vec![], vec![3; CONTEXT]] {
        let prompt = Prompt { id: 77, tokens, ..Prompt::default() };
        let error = requests(&[prompt], &config(5, 1), &stop, CONTEXT).expect_err("not a prompt");
        assert!(error.kind == Kind::Data && error.message.contains("prompt 77"), "{error}");
    }
}

#[test]
fn a_cache_too_small_for_one_sequence_is_rejected_with_the_key_to_raise() {
    let (tiny, prompts) = (llama(), prompts(&[100]));
    let config = RolloutConfig {
        kv_bytes_max: 2 * tiny.transformer.kv_page_bytes(DType::F32).iter().sum::<usize>() as u64,
        ..config(60, 1)
    };
    let error =
        run(&tiny, &config, &requested(&tiny.transformer, &prompts, &config), None).expect_err("five pages in two");
    assert!(
        error.message.contains("needs 5 KV pages") && error.to_string().contains("rollout.kv_bytes_max"),
        "{error}"
    );
}

#[test]
fn non_finite_weights_end_the_rollout_with_a_clear_error() {
    let mut tiny = llama();
    let (place, unit) =
        (tiny.weights.table.specs().last().expect("a parameter").offset, tiny.weights.table.units().len() - 1);
    tiny.weights.local_mut(unit).part_mut(&(place..place + 1)).f32()[0] = f32::NAN;
    let config = config(5, 1);
    let requests = requested(&tiny.transformer, &prompts(&[4]), &config);
    let error = run(&tiny, &config, &requests, None).expect_err("NaN in the head");
    assert!(error.message.contains("not finite"), "{error}");
}

/// A tokenizer whose token i, from 3 on, is one of a few texts; 0, 1, 2 are special.
fn tokenizer() -> Tokenizer {
    let pieces = ["a", "b", "c", "d", " e", "ab", "cd", "é"];
    let special = ["<unk>", "<s>", "</s>"];
    let mut vocab = serde_json::Map::new();
    for i in 0..97 {
        let piece = if i < 3 { special[i] } else { pieces[i % 8] };
        // Texts must differ, so later tokens get a number.
        let text = if vocab.contains_key(piece) { format!("{piece}{i}") } else { piece.to_owned() };
        vocab.insert(text, i.into());
    }
    let added = [0, 1, 2].map(|i| {
        json!({"id": i, "content": special[i], "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    });
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"});
    let dir = by_hand(&[("added_tokens", json!(added)), ("decoder", json!({"type": "Fuse"})), ("model", model)]);
    Tokenizer::load(dir.path()).expect("a tokenizer")
}

fn stopped_by(strings: &[&str], tokenizer: &Tokenizer) -> (Vec<Response>, Vec<Response>) {
    let (tiny, prompts) = (llama(), prompts(&[5; 30]));
    let free = config(40, 1);
    let stopping = RolloutConfig { stop: strings.iter().map(|&s| s.to_owned()).collect(), ..free.clone() };
    let all = |config: &RolloutConfig| {
        let requests = requested(&tiny.transformer, &prompts, config);
        run(&tiny, config, &requests, Some(tokenizer)).expect("a rollout").complete().expect("all of them")
    };
    (all(&free), all(&stopping))
}

#[test]
fn a_stop_text_ends_a_response_also_across_tokens_and_is_cut_from_the_text() {
    let tokenizer = tokenizer();
    for strings in [&["ba"][..], &["d11 e", "c"], &["bcd", "ea"]] {
        let (free, stopped) = stopped_by(strings, &tokenizer);
        let mut hits = 0;
        for (free, stopped) in free.iter().zip(&stopped) {
            let n = stopped.tokens.len();
            assert_eq!(free.tokens[..n], stopped.tokens, "a stop text changes no sample");
            assert_eq!(free.logprobs[..n], stopped.logprobs);
            let text = tokenizer.decode(&stopped.tokens, true).expect("text");
            let before = tokenizer.decode(&stopped.tokens[..n - 1], true).expect("text");
            let place = |text: &str| strings.iter().filter_map(|s| text.find(s)).min();
            assert_eq!(place(&before), None, "it stopped too late");
            if stopped.finish == Finish::StopString {
                hits += 1;
                assert_eq!(stopped.text, text[..place(&text).expect("the stop text")]);
            } else {
                assert_eq!((place(&text), &stopped.text), (None, &text));
                assert_eq!(free, stopped);
            }
        }
        assert!(hits > 0, "{strings:?} never occurred");
    }
}

#[test]
fn a_special_token_can_be_named_as_stop_text() {
    let tokenizer = tokenizer();
    let (tiny, prompts) = (llama(), prompts(&[5; 30]));
    let config = RolloutConfig { ignore_eos: true, stop: vec!["</s>".to_owned()], ..config(40, 1) };
    let requests = requested(&tiny.transformer, &prompts, &config);
    let outcome = run(&tiny, &config, &requests, Some(&tokenizer)).expect("a rollout");
    let all = outcome.complete().expect("all of them");
    for response in &all {
        let place = response.tokens.iter().position(|&t| t == 2);
        assert_eq!(place, (response.finish == Finish::StopString).then(|| response.tokens.len() - 1));
        assert!(!response.text.contains("</s>"));
    }
    assert!(all.iter().any(|r| r.finish == Finish::StopString));
}

#[test]
fn stop_texts_without_a_tokenizer_are_rejected() {
    let (tiny, prompts) = (llama(), prompts(&[5]));
    let config = RolloutConfig { stop: vec!["x".to_owned()], ..config(5, 1) };
    let error = run(&tiny, &config, &requested(&tiny.transformer, &prompts, &config), None).expect_err("no tokenizer");
    assert!(error.kind == Kind::Usage && error.message.contains("tokenizer"), "{error}");
}
