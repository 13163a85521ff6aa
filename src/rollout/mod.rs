//! Rollout: responses sampled from the training weights, in place.
//!
//! A request is one sample of one prompt. Its result depends on the weights, its tokens and parameters, the seed, the
//! step, the prompt's id and the sample's number. It does not depend on the other requests, the schedule, the size of
//! the cache or the number of threads. The recorded log-probabilities are bit-identical to those of the training
//! forward.

mod admission;
mod beams;
pub mod blocks;
mod cache_size;
pub mod engine;
mod graphs;
mod hooks;
mod live;
mod peak;
mod prefixes;
mod run;
pub mod scheduler;
mod sequence;
mod steps;
pub mod turns;

pub use beams::{Beams, EarlyStopping};
pub use engine::Engine;
pub use graphs::bucket;
pub use hooks::{Hooks, Progress, Queue};
pub use run::{Model, Outcome};

use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::experience::{Image, Prompt, Response};
use crate::model::{Arch, TensorPart, cost};
use crate::ops::sample::SampleParams;
use crate::rng::Rng;
use crate::tensor::DType::Bf16;
use crate::text::Tokenizer;
use std::borrow::Cow;
use std::sync::Arc;

/// Tokens and texts that end a response before its maximum length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stop {
    /// Each of these tokens ends the response, and is its last token.
    pub tokens: Vec<u32>,
    /// Each of these texts ends the response. Its text is cut before the first one. Its tokens keep everything sampled,
    /// because the policy is trained on it.
    pub strings: Vec<String>,
    /// Tokens that are never sampled: the tokens of images and videos, in a job with images.
    pub never_sampled: Vec<u32>,
}

impl Stop {
    /// The stops of the configuration, for a model with the end tokens `eos_tokens` and those of its tokenizer.
    pub fn of_model(config: &RolloutConfig, eos_tokens: &[u32], tokenizer: Option<&Tokenizer>) -> Self {
        let of_tokenizer = tokenizer.map_or(&[][..], Tokenizer::eos_ids).iter().filter(|id| !eos_tokens.contains(id));
        Self::new(config, &eos_tokens.iter().chain(of_tokenizer).copied().collect::<Vec<_>>())
    }

    /// The same for a model that sees images: it does not sample its tokens for them.
    #[must_use]
    pub fn with_images(mut self, tokenizer: &Tokenizer) -> Self {
        self.never_sampled = tokenizer.images().map_or(Vec::new(), |images| images.never_sampled.clone());
        self
    }

    /// The stops of the configuration, for a model whose end tokens are `eos_tokens`.
    pub fn new(config: &RolloutConfig, eos_tokens: &[u32]) -> Self {
        let mut tokens = config.stop_token_ids.clone();
        if !config.ignore_eos {
            tokens.extend_from_slice(eos_tokens);
        }
        Self { tokens, strings: config.stop.clone(), never_sampled: Vec::new() }
    }
}

/// Changes to the logits of a request in addition to its sampling parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Edits {
    /// Biases added to the logits of tokens before the repetition penalty. Each token occurs once, in ascending order.
    pub bias: Vec<(u32, f32)>,
    /// Sequences of tokens that must not occur: the last one is banned after the ones before it.
    pub bad_words: Vec<Vec<u32>>,
}

/// One sample of one prompt.
#[derive(Clone, Debug)]
pub struct Request {
    /// Index of the prompt in the batch, as in the response. Requests with the same index and tokens share the prompt's
    /// forward.
    pub prompt: usize,
    /// The prompt's id over the run; a part of the random key.
    pub prompt_id: u64,
    /// Number among the samples of the prompt; a part of the random key.
    pub sample: u32,
    pub tokens: Arc<[u32]>,
    /// The images among them.
    pub images: Arc<[Image]>,
    pub params: SampleParams,
    /// The minimum number of new tokens before a stop token can be sampled.
    pub new_tokens_min: usize,
    pub new_tokens_max: usize,
    pub stop: Arc<Stop>,
    pub edits: Arc<Edits>,
    /// The number of likeliest tokens recorded at each new token.
    pub top_logprobs: usize,
    /// Whether the set that each new token was sampled from is recorded. Its log-probability is then of the softmax
    /// over that set. Only on CPUs. All requests of a call must agree.
    pub keeps_mask: bool,
    /// The random key, instead of the call's key and the prompt's id.
    pub rng: Option<Rng>,
    /// The step that keys the random numbers, instead of the call's step.
    pub step: Option<u32>,
    /// The result of an earlier call, which reached its token limit. This call continues it.
    pub partial: Option<Arc<Response>>,
}

impl Request {
    /// Tokens that must not follow `tokens`, prompt and new ones.
    fn banned(&self, tokens: &[u32]) -> Cow<'_, [u32]> {
        let is_early = tokens.len() - self.tokens.len() < self.new_tokens_min;
        let mut banned = Cow::Borrowed(if is_early { &self.stop.tokens[..] } else { &[] });
        if !self.stop.never_sampled.is_empty() {
            banned.to_mut().extend_from_slice(&self.stop.never_sampled);
        }
        for (last, before) in self.edits.bad_words.iter().filter_map(|word| word.split_last()) {
            if tokens.ends_with(before) {
                banned.to_mut().push(*last);
            }
        }
        banned
    }

    /// The number of tokens that are known when it begins.
    fn known_tokens(&self) -> usize {
        self.tokens.len() + self.partial.as_ref().map_or(0, |partial| partial.tokens.len())
    }

    /// Whether its logits are changed before sampling.
    pub fn edits_logits(&self) -> bool {
        let is_banned = self.new_tokens_min > 0 || !self.stop.never_sampled.is_empty();
        self.params.repetition_penalty != 1.0 || is_banned || *self.edits != Edits::default()
    }

    /// Whether its sampling needs the host, so that no graph can decode it.
    fn needs_host(&self) -> bool {
        *self.edits != Edits::default() || self.top_logprobs > 0 || !self.stop.never_sampled.is_empty()
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

/// Whether the configuration changes logits before sampling.
pub fn edits_logits(config: &RolloutConfig) -> bool {
    config.repetition_penalty != 1.0 || config.response_tokens_min > 0
}

/// The maximum number of new tokens after a prompt of `prompt_tokens`. `context` is the model's longest row.
pub fn new_tokens_max(config: &RolloutConfig, prompt_tokens: usize, context: usize) -> usize {
    config.response_tokens_max.min(context.saturating_sub(prompt_tokens))
}

/// `samples_per_prompt` requests for each prompt, in order. `context` is the model's longest row.
///
/// # Errors
/// `Data`, which names the prompt, if one is empty or leaves no space for a token.
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
                "prompt {} of {} has {length} tokens, which leaves no space in the model's context of {context}",
                prompt.id, prompt.source
            );
            return Err(Error::data(message).hint("lower data.prompt_tokens_max"));
        }
        let (tokens, images) = (Arc::from(&prompt.tokens[..]), Arc::from(&prompt.images[..]));
        for sample in 0..config.samples_per_prompt as u32 {
            all.push(Request {
                prompt: index,
                prompt_id: prompt.id,
                sample,
                tokens: Arc::clone(&tokens),
                images: Arc::clone(&images),
                params,
                new_tokens_min: config.response_tokens_min,
                new_tokens_max: new_tokens_max(config, length, context),
                stop: stop.clone(),
                edits: Arc::default(),
                top_logprobs: 0,
                keeps_mask: config.keep_sampling_mask,
                rng: None,
                step: None,
                partial: None,
            });
        }
    }
    Ok(all)
}

/// The maximum GPU memory of a rank of `tensor`, except weights and cache, while it answers `samples` requests. It
/// covers the forward that reads prompts while other sequences decode, and the memory of decode graphs without their
/// small tables. If logits `are_edited` before sampling, it also covers their copy.
pub fn forward_bytes(arch: &Arch, tensor: usize, rollout: &RolloutConfig, samples: usize, are_edited: bool) -> u64 {
    let (part, rows) = (TensorPart::fullest(arch, tensor), samples.min(rollout.batch_max));
    let row = cost::forward_values(arch, part);
    let logits = part.range(arch.vocabulary).len() * size_of::<f32>();
    // `rows` of the tokens go through the head.
    let forward = |tokens: usize| tokens * row * Bf16.bytes() + rows * (arch.width * Bf16.bytes() + logits);
    let graphs = if rollout.graphs { forward(rows) } else { 0 };
    let edited = if are_edited { rows * arch.vocabulary * size_of::<f32>() } else { 0 };
    (forward(rollout.prefill_tokens_max + rows) + graphs + edited) as u64
}
