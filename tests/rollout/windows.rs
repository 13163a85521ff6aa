//! Layers with a sliding window keep only the pages of their window, and no result changes.

use crate::models::{prompts, recorded_and_trained, requested};
use crate::parity::golden::directory;
use crate::rollout::models::{Tiny, alternating, assert_alike, config, responses, run, search, tiny};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::null::Null;
use rlhf_hpc::model::{Head, Transformer, load};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Beams, EarlyStopping, Engine, Hooks, Model};
use rlhf_hpc::tensor::{DType, arena};
use serde_json::json;

/// Windows in all layers, in all but some, and in every other one.
const MODELS: [&str; 6] = ["mistral", "phi3-short", "gemma3_text", "olmo3", "gemma2", "smollm3-window"];

fn golden(name: &str) -> Tiny {
    let (arch, weights) = load::load(Device::Cpu, &directory(name), Head::LanguageModel, DType::F32, 0).expect(name);
    Tiny { transformer: Transformer::new(&arch.for_rows(usize::MAX), &weights.table), weights }
}

/// The bytes of `pages` pages in all layers.
fn bytes(tiny: &Tiny, pages: usize) -> u64 {
    (pages * tiny.transformer.kv_page_bytes(DType::F32).iter().sum::<usize>()) as u64
}

#[test]
fn tokens_and_logprobs_are_those_of_one_forward_in_a_cache_that_holds_only_windows() {
    let prompts = prompts(&[70, 64, 33, 17, 9, 20, 5, 12]);
    for name in MODELS {
        let tiny = golden(name);
        for temperature in [0.0, 0.9] {
            let roomy = RolloutConfig { temperature, ignore_eos: true, prefill_tokens_max: 32, ..config(60, 3) };
            let tight = RolloutConfig { kv_bytes_max: bytes(&tiny, 4), ..roomy.clone() };
            assert_alike(name, &tiny, &prompts, &roomy, &tight);
        }
    }
}

#[test]
fn prompts_with_a_common_prefix_share_pages_whatever_the_windows() {
    let mut prompts = prompts(&[90, 75, 100, 66]);
    for i in 1..4 {
        let head = prompts[0].tokens[..70].to_vec();
        let end = head.len().min(prompts[i].tokens.len());
        prompts[i].tokens[..end].clone_from_slice(&head[..end]);
    }
    for name in MODELS {
        let tiny = golden(name);
        for (prefill_tokens_max, pages) in [(20, 1000), (400, 1000), (20, 5)] {
            let kv_bytes_max = bytes(&tiny, pages);
            let config = RolloutConfig { prefill_tokens_max, kv_bytes_max, ignore_eos: true, ..config(20, 2) };
            let outcome = run(&tiny, &config, &requested(&tiny.transformer, &prompts, &config), None);
            let outcome = outcome.expect("a rollout");
            if pages == 1000 {
                let found = outcome.prefix_hit_tokens;
                assert_eq!(found, 331 + 3 * 64, "{name}: two pages of three prompts, and second samples");
            }
            let alone = prompts.iter().flat_map(|prompt| responses(&tiny, &config, std::slice::from_ref(prompt)));
            for (i, (response, alone)) in outcome.complete().expect("all").into_iter().zip(alone).enumerate() {
                let same = response.tokens == alone.tokens && response.logprobs == alone.logprobs;
                assert!(same, "{name}: response {i} with {pages} pages");
            }
        }
    }
}

#[test]
fn a_cache_with_windows_is_smaller_and_a_plan_counts_its_bytes() {
    /// The number of cache groups, and the pages of the cache in units of a layer.
    fn cache(window: usize, config: &RolloutConfig) -> (usize, usize, usize) {
        let types = ["sliding_attention", "full_attention"];
        let keys = json!({"sliding_window": window, "layer_types": types, "use_sliding_window": true});
        let tiny = tiny("smollm3", &keys, DType::F32);
        let mut engine = Engine::new(config, 0);
        let requests = requested(&tiny.transformer, &prompts(&[90; 4]), config);
        let model = Model { transformer: &tiny.transformer, weights: &tiny.weights, tokenizer: None };
        let done = engine.generate(model, Rng::new(1, Purpose::Sample), 0, &requests, &mut Hooks::default());
        assert!(done.expect("a rollout").complete().is_some());
        let layer = bytes(&tiny, 1) as usize / 2;
        (tiny.transformer.cache_groups().len(), engine.kv_bytes() / layer, engine.kv_bytes())
    }
    let config = RolloutConfig { batch_max: 4, prefill_tokens_max: 32, ..config(150, 1) };
    // Four rows of 239 tokens have 8 pages each. Windows of 33 keys have 3, and what a forward reads has 2 more.
    for (window, config, groups, pages) in [
        (256, config.clone(), 1, 2 * 32),
        (33, config.clone(), 2, 32 + 4 * 3 + 2),
        // 13 pages are those of one sequence. The other 12 are shared by the ratio of the wanted ones, 32 to 14.
        (33, RolloutConfig { kv_bytes_max: 25 * 2 * 2 * 6 * 32 * 4, ..config.clone() }, 2, 8 + 5 + 8 + 3),
    ] {
        let real = cache(window, &config);
        assert_eq!((real.0, real.1), (groups, pages), "a window of {window}");
        let null = Null { threads: 1, memory_bytes: 1 << 30, gpu: None };
        let (counted, _, record) = arena::on_null(null, || cache(window, &config));
        assert_eq!((counted, record.cache.expect("a cache").bytes), (real, real.2), "a window of {window}");
    }
}

/// Rows are longer than the windows. The last layer of `gemma3_text` alone has none.
#[test]
fn a_plan_counts_the_bytes_that_the_cache_of_a_family_with_windows_has_in_a_run() {
    let config = RolloutConfig { batch_max: 4, prefill_tokens_max: 32, ..config(60, 1) };
    for name in ["mistral", "gemma3_text"] {
        let cache = || {
            let model = golden(name);
            let mut engine = Engine::new(&config, 0);
            let requests = requested(&model.transformer, &prompts(&[60; 4]), &config);
            let sampled = Model { transformer: &model.transformer, weights: &model.weights, tokenizer: None };
            let done = engine.generate(sampled, Rng::new(1, Purpose::Sample), 0, &requests, &mut Hooks::default());
            assert!(done.expect("a rollout").complete().is_some(), "{name}");
            (engine.kv_bytes(), bytes(&model, 4 * 4) as usize)
        };
        let (real, whole) = cache();
        assert!(real < whole, "{name}: {real} bytes, {whole} without windows");
        let null = Null { threads: 1, memory_bytes: 1 << 30, gpu: None };
        let (_, _, record) = arena::on_null(null, cache);
        let planned = record.cache.expect("a cache").bytes;
        assert!((planned as f64 / real as f64 - 1.0).abs() <= 0.02, "{name}: {planned} planned, {real} bytes");
    }
}

#[test]
fn a_beam_search_is_the_same_in_the_smallest_cache_that_holds_its_windows() {
    let (tiny, prompts) = (alternating(), prompts(&[3, 90, 64, 17, 33]));
    let config = RolloutConfig { stop_token_ids: (40..50).collect(), ..config(40, 3) };
    let requests = requested(&tiny.transformer, &prompts, &config);
    let beams = Beams { count: 3, early_stopping: EarlyStopping::False, length_penalty: 0.7 };
    let expected = search(&tiny, &config, beams, &requests).expect("a search");
    let [recorded, trained] = recorded_and_trained(&tiny.transformer, &tiny.weights, &prompts, &expected, 1.0);
    assert_eq!(recorded, trained);
    // Two pages that the longest prompt fills and three of each beam; two of each beam in windows.
    let page = bytes(&tiny, 1) / 2;
    let tight = RolloutConfig { kv_bytes_max: (2 + 3 * 3 + 3 * 2) * page, ..config };
    for prefill_tokens_max in [3, 2048] {
        let tight = RolloutConfig { prefill_tokens_max, ..tight.clone() };
        assert_eq!(search(&tiny, &tight, beams, &requests).expect("a search"), expected);
    }
    let refused = RolloutConfig { kv_bytes_max: tight.kv_bytes_max - 1, ..tight };
    let refused = search(&tiny, &refused, beams, &requests).expect_err("a page too few").message;
    assert!(refused.contains("prompt 101: 3 beams of up to 130 tokens need "), "{refused}");
}
