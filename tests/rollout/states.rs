//! Layers with the gated delta rule keep one state of a sequence, and no result changes.

use crate::models::{prompts, recorded_and_trained, requested};
use crate::parity::golden::directory;
use crate::rollout::models::{Tiny, assert_alike, config, responses, run, search};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::null::Null;
use rlhf_hpc::model::{Head, Kept, Transformer, load};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Beams, EarlyStopping, Engine, Hooks, Model};
use rlhf_hpc::tensor::{DType, arena};

/// Two layers with the rule and one with attention; one of each; and the same with experts.
const MODELS: [&str; 4] = ["qwen3_5_text", "qwen3_5", "qwen3_next", "qwen3_5_moe"];

fn golden(name: &str, dtype: DType) -> Tiny {
    let (arch, weights) = load::load(Device::Cpu, &directory(name), Head::LanguageModel, dtype, 0).expect(name);
    Tiny { transformer: Transformer::new(&arch, &weights.table), weights }
}

/// The bytes of a page of each cache group: of states, and of keys.
fn page_bytes(tiny: &Tiny) -> [usize; 2] {
    let bytes = tiny.transformer.kv_page_bytes(tiny.weights.dtype());
    let state = usize::from(tiny.transformer.cache_groups()[0].kept != Kept::State);
    [bytes[state], bytes[1 - state]]
}

#[test]
fn tokens_and_logprobs_are_those_of_one_forward_in_a_cache_with_few_states() {
    let prompts = prompts(&[70, 64, 33, 17, 9, 20, 5, 12]);
    for (name, dtype) in MODELS.into_iter().flat_map(|name| [DType::F32, DType::Bf16].map(|dtype| (name, dtype))) {
        let tiny = golden(name, dtype);
        let [state, keys] = page_bytes(&tiny);
        for temperature in [0.0, 0.9] {
            let roomy = RolloutConfig { temperature, ignore_eos: true, prefill_tokens_max: 32, ..config(50, 3) };
            let tight = RolloutConfig { kv_bytes_max: (3 * state + 9 * keys) as u64, ..roomy.clone() };
            assert_alike(name, &tiny, &prompts, &roomy, &tight);
        }
    }
}

#[test]
fn samples_of_a_prompt_share_its_state_and_prompts_with_the_same_beginning_do_not() {
    let mut prompts = prompts(&[90, 75, 64]);
    let head = prompts[0].tokens[..60].to_vec();
    prompts[1..].iter_mut().for_each(|prompt| prompt.tokens[..60].clone_from_slice(&head));
    let tiny = golden(MODELS[0], DType::F32);
    let config = RolloutConfig { ignore_eos: true, ..config(20, 3) };
    let outcome = run(&tiny, &config, &requested(&tiny.transformer, &prompts, &config), None).expect("a rollout");
    assert_eq!(outcome.prefix_hit_tokens, 2 * (90 + 75 + 64));
    let alone = prompts.iter().flat_map(|prompt| responses(&tiny, &config, std::slice::from_ref(prompt)));
    for (response, alone) in outcome.complete().expect("all").into_iter().zip(alone) {
        assert_eq!((response.tokens, response.logprobs), (alone.tokens, alone.logprobs));
    }
}

#[test]
fn a_cache_has_one_page_of_states_for_each_sequence_and_a_plan_counts_its_bytes() {
    let cache = || {
        let tiny = golden(MODELS[0], DType::F32);
        let config = RolloutConfig { batch_max: 4, prefill_tokens_max: 32, ..config(30, 1) };
        let mut engine = Engine::new(&config, 0);
        let requests = requested(&tiny.transformer, &prompts(&[90; 4]), &config);
        let model = Model { transformer: &tiny.transformer, weights: &tiny.weights, tokenizer: None };
        let done = engine.generate(model, Rng::new(1, Purpose::Sample), 0, &requests, &mut Hooks::default());
        assert!(done.expect("a rollout").complete().is_some());
        let [state, keys] = page_bytes(&tiny);
        (engine.kv_bytes(), 4 * state + 4 * 4 * keys)
    };
    let (real, expected) = cache();
    assert_eq!(real, expected, "four states, and four pages of keys for 119 tokens each");
    let null = Null { threads: 1, memory_bytes: 1 << 30, gpu: None };
    let (counted, _, record) = arena::on_null(null, cache);
    assert_eq!((counted.0, record.cache.expect("a cache").bytes), (real, real));
}

#[test]
fn a_beam_search_has_the_logprobs_of_training() {
    let (tiny, prompts) = (golden(MODELS[1], DType::F32), prompts(&[3, 70, 64, 17, 33]));
    let config = RolloutConfig { stop_token_ids: (40..50).collect(), ..config(40, 3) };
    let requests = requested(&tiny.transformer, &prompts, &config);
    let beams = Beams { count: 3, early_stopping: EarlyStopping::False, length_penalty: 0.7 };
    let expected = search(&tiny, &config, beams, &requests).expect("a search");
    let [recorded, trained] = recorded_and_trained(&tiny.transformer, &tiny.weights, &prompts, &expected, 1.0);
    assert_eq!(recorded, trained);
    let [state, keys] = page_bytes(&tiny);
    let tight = RolloutConfig { kv_bytes_max: (3 * state + (2 + 3 * 3) * keys) as u64, ..config };
    for prefill_tokens_max in [3, 2048] {
        let tight = RolloutConfig { prefill_tokens_max, ..tight.clone() };
        assert_eq!(search(&tiny, &tight, beams, &requests).expect("a search"), expected);
    }
}
