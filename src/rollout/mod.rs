//! Rollout: responses sampled from the training weights, in place.
//!
//! A request is one sample of one prompt. What it gives depends on the weights, its tokens and parameters, the seed,
//! the step, the prompt's id and the sample's number: not on the other requests, the schedule, the size of the cache or
//! the number of threads. The recorded log-probabilities are bitwise those of the training forward.

mod beams;
pub mod blocks;
pub mod engine;
mod graphs;
mod live;
mod prefixes;
mod run;
pub mod scheduler;
mod sequence;
pub mod turns;

pub use beams::{Beams, EarlyStopping};
pub use engine::Engine;
pub use graphs::bucket;
pub use run::{Hooks, Model, Outcome, Progress, Queue};

use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::experience::{Prompt, Response};
use crate::model::{Arch, TensorPart};
use crate::ops::sample::SampleParams;
use crate::rng::Rng;
use crate::tensor::DType::Bf16;
use std::borrow::Cow;
use std::sync::Arc;

/// What ends a response before its longest length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stop {
    /// Any of these tokens ends it, and is its last token.
    pub tokens: Vec<u32>,
    /// Any of these texts ends it. The text is cut before the first one; the tokens keep all that was drawn, as the
    /// policy is trained on what it drew.
    pub strings: Vec<String>,
}

impl Stop {
    /// What the config says, for a model whose end tokens are `eos_tokens`.
    pub fn new(config: &RolloutConfig, eos_tokens: &[u32]) -> Self {
        let mut tokens = config.stop_token_ids.clone();
        if !config.ignore_eos {
            tokens.extend_from_slice(eos_tokens);
        }
        Self { tokens, strings: config.stop.clone() }
    }
}

/// What is done to the logits of a request besides its parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Edits {
    /// Added to the logits of tokens before the repetition penalty: each once, ascending.
    pub bias: Vec<(u32, f32)>,
    /// Sequences of tokens that must not occur: the last one is banned behind those before it.
    pub bad_words: Vec<Vec<u32>>,
}

/// One sample of one prompt.
#[derive(Clone, Debug)]
pub struct Request {
    /// Index of the prompt in the batch, as in the response. Requests with the same index and tokens share the prompt's
    /// forward.
    pub prompt: usize,
    /// The prompt's identity over the run; a part of the randomness.
    pub prompt_id: u64,
    /// Number among the samples of the prompt; a part of the randomness.
    pub sample: u32,
    pub tokens: Arc<[u32]>,
    pub params: SampleParams,
    /// New tokens before which no stop token is drawn.
    pub new_tokens_min: usize,
    pub new_tokens_max: usize,
    pub stop: Arc<Stop>,
    pub edits: Arc<Edits>,
    /// Of each new token so many of the likeliest are recorded.
    pub top_logprobs: usize,
    /// Of each new token it is recorded what it was drawn among, and its log-probability is of the softmax over that. On CPUs; the
    /// requests of a call are alike in it.
    pub keeps_mask: bool,
    /// Keys the draws instead of the call's and the prompt's id.
    pub rng: Option<Rng>,
    /// The same instead of the call's step.
    pub step: Option<u32>,
    /// What an earlier call has drawn of it, before it had as many tokens as that one allowed: this one goes on behind it.
    pub begun: Option<Arc<Response>>,
}

impl Request {
    /// Tokens that may not come behind `tokens`, prompt and new ones.
    fn banned(&self, tokens: &[u32]) -> Cow<'_, [u32]> {
        let is_early = tokens.len() - self.tokens.len() < self.new_tokens_min;
        let mut banned = Cow::Borrowed(if is_early { &self.stop.tokens[..] } else { &[] });
        for (last, before) in self.edits.bad_words.iter().filter_map(|word| word.split_last()) {
            if tokens.ends_with(before) {
                banned.to_mut().push(*last);
            }
        }
        banned
    }

    /// Tokens that are known when it begins.
    fn known_tokens(&self) -> usize {
        self.tokens.len() + self.begun.as_ref().map_or(0, |begun| begun.tokens.len())
    }

    /// Whether its logits are changed before a draw.
    pub fn edits_logits(&self) -> bool {
        self.params.repetition_penalty != 1.0 || self.new_tokens_min > 0 || *self.edits != Edits::default()
    }

    /// Whether its draws need the host, so that no graph can decode it.
    fn needs_host(&self) -> bool {
        *self.edits != Edits::default() || self.top_logprobs > 0
    }
}

/// The sampling parameters of a config.
pub fn sample_params(config: &RolloutConfig) -> SampleParams {
    SampleParams {
        temperature: config.temperature,
        top_k: config.top_k,
        top_p: config.top_p,
        min_p: config.min_p,
        repetition_penalty: config.repetition_penalty,
    }
}

/// Whether the config has logits changed before a draw.
pub fn edits_logits(config: &RolloutConfig) -> bool {
    config.repetition_penalty != 1.0 || config.response_tokens_min > 0
}

/// Most new tokens behind a prompt of `prompt_tokens`; `context` is the model's longest row.
pub fn new_tokens_max(config: &RolloutConfig, prompt_tokens: usize, context: usize) -> usize {
    config.response_tokens_max.min(context.saturating_sub(prompt_tokens))
}

/// `samples_per_prompt` requests for each prompt, in order; `context` is the model's longest row.
///
/// # Errors
/// `Data`, naming the prompt, where one is empty or leaves no room for a token.
pub fn requests(prompts: &[Prompt], config: &RolloutConfig, stop: &Arc<Stop>, context: usize) -> Result<Vec<Request>> {
    let params = sample_params(config);
    let mut all = Vec::with_capacity(prompts.len() * config.samples_per_prompt);
    for (index, prompt) in prompts.iter().enumerate() {
        let length = prompt.tokens.len();
        if length == 0 {
            return Err(Error::data(format!("prompt {} of {} is empty", prompt.id, prompt.source)));
        }
        if length >= context {
            let message = format!(
                "prompt {} of {} has {length} tokens, the model's context is {context}",
                prompt.id, prompt.source
            );
            return Err(Error::data(message).hint("lower data.prompt_tokens_max"));
        }
        let tokens: Arc<[u32]> = prompt.tokens.as_slice().into();
        for sample in 0..config.samples_per_prompt as u32 {
            all.push(Request {
                prompt: index,
                prompt_id: prompt.id,
                sample,
                tokens: tokens.clone(),
                params,
                new_tokens_min: config.response_tokens_min,
                new_tokens_max: new_tokens_max(config, length, context),
                stop: stop.clone(),
                edits: Arc::default(),
                top_logprobs: 0,
                keeps_mask: config.keep_sampling_mask,
                rng: None,
                step: None,
                begun: None,
            });
        }
    }
    Ok(all)
}

/// The most that a rank of `tensor` takes of a GPU beside weights and cache while it answers `samples` requests: the forward that reads
/// prompts beside those that decode, what graphs of decoding keep (their small tables left out), and logits that are changed
/// before a draw, where they `are_edited`.
pub fn forward_bytes(arch: &Arch, tensor: usize, rollout: &RolloutConfig, samples: usize, are_edited: bool) -> u64 {
    let (part, rows) = (TensorPart::fullest(arch, tensor), samples.min(rollout.batch_max));
    let (queries, keys) = (part.heads(arch).len() * arch.head_dim, part.kv_heads(arch).len() * arch.head_dim);
    let row = 3 * arch.width + 2 * queries + 2 * keys + 3 * part.range(arch.mlp_width).len();
    let logits = part.range(arch.vocabulary).len() * size_of::<f32>();
    // `rows` of the tokens go through the head.
    let forward = |tokens: usize| tokens * row * Bf16.bytes() + rows * (arch.width * Bf16.bytes() + logits);
    let graphs = if rollout.graphs { forward(rows) } else { 0 };
    let edited = if are_edited { rows * arch.vocabulary * size_of::<f32>() } else { 0 };
    (forward(rollout.prefill_tokens_max + rows) + graphs + edited) as u64
}
