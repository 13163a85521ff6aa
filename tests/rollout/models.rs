//! Tiny random models, and a driver for the engine.

use crate::models::arch;
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::error::Result;
use rlhf_hpc::experience::{Prompt, Response};
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::model::{Head, Transformer, Weights, init};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Engine, Hooks, Model, Outcome, Request, Stop, requests};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::text::Tokenizer;
use std::sync::Arc;

pub const VOCABULARY: usize = 97;
pub const CONTEXT: usize = 256;

/// A transformer with random weights; large enough initial values that its distributions are not flat.
pub struct Tiny {
    pub transformer: Transformer,
    pub weights: Weights,
}

/// Of a family, with the keys of `more` in its config.json.
pub fn tiny(family: &str, more: &serde_json::Value, dtype: DType) -> Tiny {
    let arch = arch(family, more);
    let weights = init::init(&arch, Head::LanguageModel, dtype, 7);
    Tiny { transformer: Transformer::new(&arch, &weights.table), weights }
}

pub fn llama() -> Tiny {
    tiny("llama", &serde_json::json!({}), DType::F32)
}

/// Prompts of the given lengths, with random tokens.
pub fn prompts(lengths: &[usize]) -> Vec<Prompt> {
    let rng = Rng::new(5, Purpose::Synthetic);
    let token = |i: usize, j: usize| 3 + rng.below(VOCABULARY as u64 - 3, [i as u32, j as u32, 0, 0]) as u32;
    let prompt = |(i, &n): (usize, &usize)| Prompt {
        id: 100 + i as u64,
        tokens: (0..n).map(|j| token(i, j)).collect(),
        ..Prompt::default()
    };
    lengths.iter().enumerate().map(prompt).collect()
}

pub fn config(new_tokens: usize, samples: usize) -> RolloutConfig {
    RolloutConfig {
        response_tokens_max: new_tokens,
        samples_per_prompt: samples,
        kv_bytes_max: 1 << 30,
        ..RolloutConfig::default()
    }
}

/// The config's requests for the model, whose end token is 2.
pub fn requested(tiny: &Tiny, prompts: &[Prompt], config: &RolloutConfig) -> Vec<Request> {
    let stop = Arc::new(Stop::new(config, &tiny.transformer.arch.eos_tokens));
    requests(prompts, config, &stop, tiny.transformer.arch.context).expect("legal prompts")
}

/// Runs `requests` to their end.
pub fn run(
    tiny: &Tiny,
    config: &RolloutConfig,
    requests: &[Request],
    tokenizer: Option<&Tokenizer>,
) -> Result<Outcome> {
    run_at_step(tiny, config, requests, tokenizer, &|| false, STEP)
}

/// The step of all runs that do not say otherwise.
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
    let mut hooks = Hooks { stop, progress: &mut |_| {}, finished: &mut |_, _| Ok(()) };
    Engine::new(config, 0).generate(model, Rng::new(42, Purpose::Sample), step, requests, &mut hooks)
}

pub fn responses(tiny: &Tiny, config: &RolloutConfig, prompts: &[Prompt]) -> Vec<Response> {
    let requests = requested(tiny, prompts, config);
    run(tiny, config, &requests, None).expect("a rollout").complete().expect("all of them")
}

/// Log-probabilities of the responses' tokens by the training forward, all rows packed into one batch.
pub fn training_logprobs(tiny: &Tiny, prompts: &[Prompt], responses: &[Response], temperature: f32) -> Vec<Vec<f32>> {
    let mut row = PackedRow::new();
    for response in responses {
        let prompt = &prompts[response.prompt].tokens;
        row.push(&[prompt, &response.tokens[..]].concat(), prompt.len());
    }
    let Tiny { transformer, weights } = tiny;
    let hidden = transformer.forward(weights, &row.tokens, &row.positions, row.keys(), None);
    let (logprobs, _) = transformer.logprobs(weights, &hidden, &row.rows, &row.targets, temperature, false);
    let mut left = &logprobs[..];
    responses
        .iter()
        .map(|response| {
            let (own, rest) = left.split_at(response.tokens.len());
            left = rest;
            own.to_vec()
        })
        .collect()
}
