//! Responses of several turns: text of the environment is read after the cached tokens, whenever it arrives.

use crate::models::{prompts, recorded_and_trained, requested};
use crate::rollout::models::{STEP, Tiny, alternating, config, llama};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::error::{Error, Result};
use rlhf_hpc::experience::{Finish, Prompt, Response};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::turns::{Answer, Turns};
use rlhf_hpc::rollout::{Engine, Hooks, Model, Outcome};
use rlhf_hpc::tensor::DType;
use std::collections::VecDeque;

/// Answers a turn with its last tokens in reverse order, and ends the third one. The answers arrive after a number of
/// forwards.
struct Echo {
    delay: usize,
    turns: Vec<u32>,
    open: VecDeque<(usize, usize, Answer)>,
    asked: usize,
}

impl Turns for Echo {
    fn ended(&mut self, s: usize, tokens: &[u32], turn: usize, finish: Finish) -> Result<()> {
        self.turns[s] += 1;
        let answer = Answer {
            tokens: tokens[turn..].iter().rev().take(2 + s % 40).copied().collect(),
            images: Vec::new(),
            reward: f64::from(self.turns[s]),
            is_over: self.turns[s] == 3,
            extra: [("last".to_string(), turn as f32)].into(),
            failed: (s == 1).then(|| format!("after {}", finish.name())),
        };
        self.open.push_back((self.asked + self.delay, s, answer));
        Ok(())
    }

    fn answers(&mut self, waits: bool) -> Result<Vec<(usize, Answer)>> {
        self.asked += 1;
        let mut come = Vec::new();
        while let Some((due, ..)) = self.open.front()
            && (*due <= self.asked || (waits && come.is_empty()))
        {
            let (_, s, answer) = self.open.pop_front().expect("there is one");
            come.push((s, answer));
        }
        Ok(come)
    }
}

/// Half of the tokens end a turn.
fn ends(new_tokens: usize) -> RolloutConfig {
    RolloutConfig { stop_token_ids: (0..97).filter(|token| token % 8 == 0).collect(), ..config(new_tokens, 2) }
}

fn answered(tiny: &Tiny, config: &RolloutConfig, prompts: &[Prompt], delay: usize) -> Outcome {
    let requests = requested(&tiny.transformer, prompts, config);
    let mut echo = Echo { delay, turns: vec![0; requests.len()], open: VecDeque::new(), asked: 0 };
    let model = Model { transformer: &tiny.transformer, weights: &tiny.weights, tokenizer: None };
    let mut hooks = Hooks { turns: Some(&mut echo), ..Hooks::default() };
    let rng = Rng::new(42, Purpose::Sample);
    Engine::new(config, 0).generate(model, rng, STEP, &requests, &mut hooks).expect("a rollout")
}

fn given(response: &Response) -> usize {
    response.episode.iter().flat_map(|episode| &episode.given).map(ExactSizeIterator::len).sum()
}

#[test]
fn sampled_tokens_have_the_logprobs_of_the_training_forward_and_others_are_marked() {
    let (tiny, prompts) = (llama(), prompts(&[1, 70, 31, 32, 5]));
    for config in [ends(90), RolloutConfig { top_k: 60, keep_sampling_mask: true, ..ends(90) }] {
        let responses = answered(&tiny, &config, &prompts, 0).complete().expect("all");
        let [recorded, trained] = recorded_and_trained(&tiny.transformer, &tiny.weights, &prompts, &responses, 1.0);
        let mask: Vec<u8> = responses.iter().flat_map(Response::mask).collect();
        assert_eq!(mask.len(), recorded.len());
        for ((recorded, trained), drawn) in recorded.iter().zip(&trained).zip(&mask) {
            assert_eq!(*recorded, if *drawn == 1 { *trained } else { 0.0 });
        }
        assert!(responses.iter().filter(|response| given(response) > 0).count() > 5);
        for (i, response) in responses.iter().enumerate() {
            let episode = response.episode.as_ref().expect("turns");
            let over = response.finish == Finish::Length;
            assert!(response.tokens.len() <= 90 && (1..=3).contains(&episode.turns), "{episode:?}");
            assert_eq!(episode.reward, f64::from(episode.turns * (episode.turns + 1) / 2));
            assert_eq!(episode.failed.is_some(), i == 1, "{episode:?}");
            assert!(over || i == 1 || episode.turns == 3, "{episode:?}");
            for range in &episode.given {
                let turn = response.tokens[..range.start].iter().rev().take(range.len());
                assert!(turn.eq(&response.tokens[range.clone()]), "the appended text follows its turn");
            }
        }
    }
}

#[test]
fn turns_are_the_same_for_any_answer_time_and_any_cache_size() {
    let prompts = prompts(&[3, 90, 64, 17, 33, 20, 21, 22, 9, 9, 9, 9, 9, 9, 9, 9]);
    for tiny in [llama(), alternating()] {
        let expected = answered(&tiny, &ends(150), &prompts, 0);
        let pages = |pages: usize| (pages * tiny.transformer.kv_page_bytes(DType::F32).iter().sum::<usize>()) as u64;
        let mut preemptions = 0;
        for (delay, batch_max, kv_bytes_max) in [(7, 3, 1 << 30), (3, 16, pages(13)), (1000, 16, pages(11))] {
            let config = RolloutConfig { batch_max, kv_bytes_max, ..ends(150) };
            let outcome = answered(&tiny, &config, &prompts, delay);
            assert!(
                outcome.responses == expected.responses,
                "answers after {delay}, {batch_max} at once, {kv_bytes_max} bytes"
            );
            preemptions += outcome.preemptions;
        }
        assert!(preemptions > 0, "no cache was full");
    }
}

#[test]
fn an_error_of_the_environment_ends_the_call() {
    struct Broken;
    impl Turns for Broken {
        fn ended(&mut self, _: usize, _: &[u32], _: usize, _: Finish) -> Result<()> {
            Err(Error::data("no such turn"))
        }
        fn answers(&mut self, _: bool) -> Result<Vec<(usize, Answer)>> {
            Ok(Vec::new())
        }
    }
    let tiny = llama();
    let requests = requested(&tiny.transformer, &prompts(&[5, 6]), &ends(9));
    let model = Model { transformer: &tiny.transformer, weights: &tiny.weights, tokenizer: None };
    let mut hooks = Hooks { turns: Some(&mut Broken), ..Hooks::default() };
    let ended = Engine::new(&ends(9), 0).generate(model, Rng::new(1, Purpose::Sample), STEP, &requests, &mut hooks);
    assert!(ended.is_err_and(|e| e.message.contains("no such turn")));
}
