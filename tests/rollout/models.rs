//! Tiny random models, and a driver for the engine.

use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::error::Result;
use rlhf_hpc::experience::{Prompt, Response};
use rlhf_hpc::model::{Arch, Head, Keys, Transformer, Weights, init, packed_positions};
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

/// `model_type` of config.json, and keys that differ from the plain ones.
pub fn tiny(model_type: &str, class: &str, extra: &serde_json::Value, dtype: DType) -> Tiny {
    let mut config = serde_json::json!({
        "model_type": model_type, "architectures": [class], "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "initializer_range": 0.15, "eos_token_id": 2
    });
    let object = config.as_object_mut().expect("an object");
    object.extend(extra.as_object().cloned().unwrap_or_default());
    let arch = Arch::from_config(object).expect("a model that is known");
    let weights = init::init(&arch, Head::LanguageModel, dtype, 7);
    Tiny { transformer: Transformer::new(&arch, &weights.table), weights }
}

pub fn llama() -> Tiny {
    tiny("llama", "LlamaForCausalLM", &serde_json::json!({}), DType::F32)
}

/// Prompts of the given lengths, with random tokens.
pub fn prompts(lengths: &[usize]) -> Vec<Prompt> {
    let rng = Rng::new(5, Purpose::Corpus);
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

pub fn rng() -> Rng {
    Rng::new(42, Purpose::Sample)
}

/// Runs `requests` to their end.
pub fn run(
    tiny: &Tiny,
    config: &RolloutConfig,
    requests: &[Request],
    tokenizer: Option<&Tokenizer>,
) -> Result<Outcome> {
    run_while(tiny, config, requests, tokenizer, &|| false)
}

pub fn run_while(
    tiny: &Tiny,
    config: &RolloutConfig,
    requests: &[Request],
    tokenizer: Option<&Tokenizer>,
    stop: &dyn Fn() -> bool,
) -> Result<Outcome> {
    drive(tiny, config, requests, tokenizer, stop, STEP)
}

pub fn run_at_step(tiny: &Tiny, config: &RolloutConfig, requests: &[Request], step: u32) -> Result<Outcome> {
    drive(tiny, config, requests, None, &|| false, step)
}

/// The step of all runs that do not say otherwise.
const STEP: u32 = 3;

fn drive(
    tiny: &Tiny,
    config: &RolloutConfig,
    requests: &[Request],
    tokenizer: Option<&Tokenizer>,
    stop: &dyn Fn() -> bool,
    step: u32,
) -> Result<Outcome> {
    let mut engine = Engine::new(config, 0);
    let model = Model { transformer: &tiny.transformer, weights: &tiny.weights, tokenizer };
    let mut hooks = Hooks { stop, progress: &mut |_| {}, finished: &mut |_, _| Ok(()) };
    engine.generate(model, rng(), step, requests, &mut hooks)
}

pub fn responses(tiny: &Tiny, config: &RolloutConfig, prompts: &[Prompt]) -> Vec<Response> {
    let requests = requested(tiny, prompts, config);
    run(tiny, config, &requests, None).expect("a rollout").complete().expect("all of them")
}

/// Log-probabilities of the responses' tokens by the training forward, all rows packed into one batch.
pub fn training_logprobs(tiny: &Tiny, prompts: &[Prompt], responses: &[Response], temperature: f32) -> Vec<Vec<f32>> {
    let (mut tokens, mut cu_seqlens, mut rows, mut targets) = (Vec::new(), vec![0], Vec::new(), Vec::new());
    for response in responses {
        let prompt = &prompts[response.prompt].tokens;
        let start = tokens.len();
        tokens.extend_from_slice(prompt);
        tokens.extend_from_slice(&response.tokens);
        for i in 0..response.tokens.len() {
            rows.push((start + prompt.len() + i - 1) as u32);
            targets.push(response.tokens[i]);
        }
        cu_seqlens.push(tokens.len());
    }
    let keys = Keys::Packed { cu_seqlens: &cu_seqlens };
    let Tiny { transformer, weights } = tiny;
    let hidden = transformer.forward(weights, &tokens, &packed_positions(&cu_seqlens), keys, None);
    let (logprobs, _) = transformer.logprobs(weights, &hidden, &rows, &targets, temperature, false);
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
