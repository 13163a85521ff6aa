//! Tiny random models, and a driver for the engine.

use crate::models::{arch, recorded_and_trained, requested};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::error::Result;
use rlhf_hpc::experience::{Prompt, Response};
use rlhf_hpc::model::{Head, Transformer, Weights, init};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Beams, Engine, Hooks, Model, Outcome, Request};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::text::Tokenizer;

pub const CONTEXT: usize = 256;

/// A transformer with random weights; large enough initial values that its distributions are not flat.
pub struct Tiny {
    pub transformer: Transformer,
    pub weights: Weights,
}

/// A tiny model of a family, with the keys of `more` in its config.json.
pub fn tiny(family: &str, more: &serde_json::Value, dtype: DType) -> Tiny {
    let arch = arch(family, more);
    let weights = init::init(&arch, Head::LanguageModel, dtype, 7);
    Tiny { transformer: Transformer::new(&arch, &weights.table), weights }
}

pub fn llama() -> Tiny {
    tiny("llama", &serde_json::json!({}), DType::F32)
}

/// A window of 21 keys in the first of two layers.
pub fn alternating() -> Tiny {
    let types = ["sliding_attention", "full_attention"];
    let keys = serde_json::json!({"sliding_window": 21, "layer_types": types, "use_sliding_window": true});
    tiny("smollm3", &keys, DType::F32)
}

pub fn config(new_tokens: usize, samples: usize) -> RolloutConfig {
    RolloutConfig {
        response_tokens_max: new_tokens,
        samples_per_prompt: samples,
        kv_bytes_max: 1 << 30,
        ..RolloutConfig::default()
    }
}

/// Generates all responses to `requests`.
pub fn run(
    tiny: &Tiny,
    config: &RolloutConfig,
    requests: &[Request],
    tokenizer: Option<&Tokenizer>,
) -> Result<Outcome> {
    run_at_step(tiny, config, requests, tokenizer, &|| false, STEP)
}

/// The step of all runs that do not set one.
pub const STEP: u32 = 3;

pub fn run_at_step(
    tiny: &Tiny,
    config: &RolloutConfig,
    requests: &[Request],
    tokenizer: Option<&Tokenizer>,
    stop: &dyn Fn() -> bool,
    step: u32,
) -> Result<Outcome> {
    let model = Model { transformer: &tiny.transformer, weights: &tiny.weights, tokenizer };
    let mut hooks = Hooks { stop: Some(stop), ..Hooks::default() };
    Engine::new(config, 0).generate(model, Rng::new(42, Purpose::Sample), step, requests, &mut hooks)
}

/// All responses to `requests`.
pub fn complete(tiny: &Tiny, config: &RolloutConfig, requests: &[Request]) -> Vec<Response> {
    run(tiny, config, requests, None).expect("a rollout").complete().expect("all of them")
}

pub fn responses(tiny: &Tiny, config: &RolloutConfig, prompts: &[Prompt]) -> Vec<Response> {
    complete(tiny, config, &requested(&tiny.transformer, prompts, config))
}

/// Searches for what `requests` ask.
pub fn search(tiny: &Tiny, config: &RolloutConfig, beams: Beams, requests: &[Request]) -> Result<Vec<Response>> {
    let model = Model { transformer: &tiny.transformer, weights: &tiny.weights, tokenizer: None };
    let mut hooks = Hooks::default();
    let outcome = Engine::new(config, 0).beam_search(model, beams, requests, &mut hooks)?;
    Ok(outcome.complete().expect("all of them"))
}

/// Three samples of each prompt. The first four prompts have short responses, so the scheduler expects short ones; the
/// long ones then meet a full cache.
fn mixed(tiny: &Tiny, prompts: &[Prompt], config: &RolloutConfig) -> Vec<Request> {
    let mut requests = requested(&tiny.transformer, prompts, config);
    requests.iter_mut().filter(|request| request.prompt < 4).for_each(|request| request.new_tokens_max = 4);
    requests
}

/// Asserts that a cache which is `tight` for the `mixed` requests changes no result, and that training computes the
/// recorded log-probabilities.
pub fn assert_alike(name: &str, tiny: &Tiny, prompts: &[Prompt], roomy: &RolloutConfig, tight: &RolloutConfig) {
    let requests = mixed(tiny, prompts, roomy);
    let [ample, found] = [roomy, tight].map(|config| run(tiny, config, &requests, None).expect("a rollout"));
    assert_eq!(ample.preemptions, 0);
    assert!(found.preemptions > 0, "{name}: the cache was not tight");
    let [ample, found] = [ample, found].map(|outcome| outcome.complete().expect("all of them"));
    assert_eq!(found, ample, "{name} at temperature {}", roomy.temperature);
    let temperature = if roomy.temperature == 0.0 { 1.0 } else { roomy.temperature };
    let [recorded, trained] = recorded_and_trained(&tiny.transformer, &tiny.weights, prompts, &found, temperature);
    assert_eq!(recorded, trained, "{name} at temperature {temperature}");
}
