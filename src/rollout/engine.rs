//! The decode loop: forward passes as the scheduler plans them, and one sampled token for every sequence that is ready.
//! If a GPU only has to decode, `graphs` takes over.

use super::Request;
use super::beams::{self, BeamRun, Beams};
use super::blocks::GroupPages;
use super::cache_size::{GroupNeed, bytes, divide};
use super::hooks::{Hooks, Progress};
use super::live::Live;
use super::prefixes;
use super::run::{Decoder, Model, Outcome, Run};
use super::scheduler::{Limits, Prefixes, Scheduler, Spec};
use super::steps::DecodeSteps;
use crate::config::rollout::RolloutConfig;
use crate::device::cuda::owned_by;
use crate::device::null::{self, Cache};
use crate::error::{Error, Result};
use crate::model::{CacheGroup, Kept, LayerCache};
use crate::ops::attention::PAGE;
use crate::rng::Rng;
use std::collections::HashMap;

/// Generates responses. Keeps its KV cache and its buffers between calls.
#[derive(Debug)]
pub struct Engine {
    config: RolloutConfig,
    /// Maximum bytes of the cache.
    kv_bytes_max: u64,
    cache: Vec<LayerCache>,
    /// Pages of each cache group.
    pages: Vec<usize>,
    /// The decoder, from the first decode step until the cache is released.
    decoder: Option<Decoder>,
    /// The reason why decode steps of the last call used no graphs, after a capture failed on a GPU.
    refused: Option<String>,
    /// Mean number of new tokens in the responses of the last call, or before it the expected one.
    new_tokens_before: Option<usize>,
    steps: DecodeSteps,
}

impl Engine {
    /// `memory_free`: the cache may use half of these bytes if `kv_bytes_max` is 0.
    pub fn new(config: &RolloutConfig, memory_free: u64) -> Self {
        Self {
            config: config.clone(),
            kv_bytes_max: if config.kv_bytes_max > 0 { config.kv_bytes_max } else { memory_free / 2 },
            cache: Vec::new(),
            pages: Vec::new(),
            decoder: None,
            refused: None,
            new_tokens_before: (config.response_tokens_expected > 0).then_some(config.response_tokens_expected),
            steps: DecodeSteps::here(),
        }
    }

    /// Sets the maximum bytes of the cache from the next call on, if the configuration does not set them.
    pub fn allow(&mut self, bytes: u64) {
        if self.config.kv_bytes_max == 0 {
            self.kv_bytes_max = bytes;
        }
    }

    /// The reason why decode steps of the last call used no graphs, if a capture failed.
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Releases the memory of the cache until the next call.
    pub fn release(&mut self) {
        self.decoder = None;
        self.cache = Vec::new();
        self.pages = Vec::new();
    }

    /// The current bytes of the cache.
    pub fn kv_bytes(&self) -> usize {
        self.cache.iter().map(LayerCache::bytes).sum()
    }

    /// Generates a response for each request. `rng` and `step` (the rollout phase) key the random numbers.
    ///
    /// The ranks of the transformer's tensor axis call this together with the same requests, and get the same
    /// responses. Each runs the same schedule on its own heads. If one is stopped or fails, all end.
    ///
    /// # Errors
    /// `Usage` if a request does not fit the cache, the context or the vocabulary, or has stop texts without a
    /// tokenizer. `Fault` if logits are not finite.
    pub fn generate(
        &mut self,
        model: Model,
        rng: Rng,
        step: u32,
        requests: &[Request],
        hooks: &mut Hooks,
    ) -> Result<Outcome> {
        requests.iter().try_for_each(|request| check(request, &model))?;
        let (specs, queue) = (specs(requests), hooks.queue.as_ref());
        let batch_max = queue.map_or(self.config.batch_max, |queue| queue.batch_max.min(self.config.batch_max));
        let config = RolloutConfig { batch_max, ..self.config.clone() };
        let before = self.expected_before(requests, hooks);
        let need = |kept, page_bytes| GroupNeed::of_sequences(&specs, kept, page_bytes, &config, before);
        let pages = self.make_cache(&model, &specs, need);
        let limits = Limits { batch_max, new_tokens_before: before, ..pages };
        let mut scheduler = Scheduler::new(specs.iter().copied(), limits.clone())?;
        // The prompts of a null device are all the same tokens, and states are not kept at the ends of pages.
        if self.steps != DecodeSteps::All {
            scheduler.admit_in_batches();
        } else if !scheduler.has_states() {
            share_prefixes(&mut scheduler, &specs, requests);
        }
        if queue.is_some() {
            scheduler.open();
        }
        // Memory that was short may be free again.
        self.refused = None;
        let mut run = Run {
            model,
            rng,
            step,
            requests,
            scheduler,
            live: requests.iter().map(|_| Live::default()).collect(),
            prompt_logits: specs.iter().map(|_| None).collect(),
            cache: &mut self.cache,
            // A graph continues with the same sequences, but turns end and begin all the time.
            decoder: (self.config.graphs && hooks.turns.is_none()).then_some(&mut self.decoder),
            refused: &mut self.refused,
            limits,
            steps: self.steps,
            outcome: Outcome { responses: requests.iter().map(|_| None).collect(), ..Outcome::default() },
            progress: Progress { total: requests.len(), ..Progress::default() },
            failed: Ok(()),
            stopped: false,
        };
        while !run.is_over(hooks)? {
            run.take_more(hooks);
            run.answer(hooks)?;
            run.fork(hooks)?;
            if !run.decode(hooks)? {
                run.forward(hooks)?;
                run.report(hooks);
            }
        }
        run.outcome.preemptions = run.scheduler.preemptions();
        run.outcome.prefix_hit_tokens = run.scheduler.prefix_hit_tokens();
        let answered = requests.iter().zip(&run.outcome.responses).filter(|(_, response)| response.is_some());
        run.outcome.prompt_tokens = answered.map(|(request, _)| request.tokens.len()).sum();
        let outcome = run.outcome;
        let new_tokens = outcome.responses.iter().flatten().map(|response| response.tokens.len());
        let count = new_tokens.clone().count();
        self.new_tokens_before = new_tokens.sum::<usize>().checked_div(count).or(self.new_tokens_before);
        Ok(outcome)
    }

    /// The mean number of new tokens of earlier responses. Responses that only end at their maximum are expected to
    /// reach it.
    fn expected_before(&self, requests: &[Request], hooks: &Hooks) -> Option<usize> {
        let runs_to_max = |request: &Request| request.stop.tokens.is_empty() && request.stop.strings.is_empty();
        let all_run_to_max = hooks.turns.is_none() && requests.iter().all(runs_to_max);
        if all_run_to_max { Some(usize::MAX) } else { self.new_tokens_before }
    }

    /// Returns the best responses to each prompt by beam search. Of consecutive requests with the same prompt, the
    /// first gets the best response, the next one the second best, and so on, each with its `score`. The repetition
    /// penalty is the only sampling parameter that applies. Rows and pages have the same limits as in `generate`, and
    /// ranks call it in the same way.
    ///
    /// # Errors
    /// The errors of `generate`, and `Usage` if a prompt has more requests than beams, or its beams do not fit the
    /// cache.
    pub fn beam_search(
        &mut self,
        model: Model,
        beams: Beams,
        requests: &[Request],
        hooks: &mut Hooks,
    ) -> Result<Outcome> {
        requests.iter().try_for_each(|request| check(request, &model))?;
        let RolloutConfig { batch_max, prefill_tokens_max, .. } = self.config;
        let need = |kept, page_bytes| {
            let first = beams::prompts(requests).map(|range| &requests[range.start]);
            let mut pages: Vec<usize> =
                first.map(|request| beams.pages_max(request, kept, prefill_tokens_max)).collect();
            pages.sort_unstable_by(|a, b| b.cmp(a));
            let wanted = pages.iter().take((batch_max / beams.count).max(1)).sum();
            GroupNeed { page_bytes, wanted, expected: wanted, least: pages.first().copied().unwrap_or(0) }
        };
        let limits = self.make_cache(&model, &specs(requests), need);
        BeamRun::new(model, beams, requests, limits, &mut self.cache)?.run(hooks)
    }

    /// Allocates the pages that cache groups `need` with what they keep and bytes of a page, within the allowed bytes, and the
    /// positions of the longest sequence. A large enough cache is kept.
    fn make_cache(&mut self, model: &Model, specs: &[Spec], need: impl Fn(Kept, usize) -> GroupNeed) -> Limits {
        let RolloutConfig { batch_max, prefill_tokens_max, .. } = self.config;
        let (transformer, dtype) = (model.transformer, model.weights.dtype());
        let (groups, page_bytes) = (transformer.cache_groups(), transformer.kv_page_bytes(dtype));
        let needs: Vec<GroupNeed> =
            groups.iter().zip(&page_bytes).map(|(group, bytes)| need(group.kept, *bytes)).collect();
        let mut allowed = self.kv_bytes_max;
        if self.steps != DecodeSteps::All && self.config.kv_bytes_max == 0 {
            // A plan reports by how much a job is too large, so it continues with pages for one sequence.
            allowed = allowed.max(bytes(&needs, |need| need.least));
        }
        // If the free memory of ranks differs, the least decides for all ranks that share a schedule.
        let least = |pages: usize| -transformer.tensor().max(-(pages as f64)) as usize;
        let pages: Vec<usize> = divide(&needs, allowed).into_iter().map(least).collect();
        let size = |pages: &[usize]| page_bytes.iter().zip(pages).map(|(bytes, pages)| bytes * pages).sum::<usize>();
        let longest = |spec: &Spec| spec.prompt_tokens + spec.new_tokens_max;
        let keys = |kept: Kept| match kept {
            Kept::All => specs.iter().map(longest).sum(),
            Kept::Window(window) => specs.iter().map(|spec| longest(spec).min(window)).sum(),
            // A page for each sequence.
            Kept::State => PAGE * specs.len(),
        };
        let all: Vec<usize> = groups.iter().map(|group| keys(group.kept)).collect();
        let of_tokens = groups.iter().zip(&page_bytes).filter(|(group, _)| group.kept != Kept::State);
        null::note_cache(Cache {
            token_bytes: of_tokens.map(|(_, bytes)| bytes).sum::<usize>() / PAGE,
            bytes: size(&pages),
            bytes_needed: bytes(&needs, |need| need.wanted) as usize,
            bytes_wanted: size(&all) / PAGE,
            samples: specs.len(),
            batch_max,
        });
        self.pages.resize(groups.len(), 0);
        // Counted in layers, because bytes may differ between the ranks that share a schedule.
        let layers = |pages: &[usize]| groups.iter().zip(pages).map(|(group, n)| group.layers.len() * n).sum::<usize>();
        let lacks = |(i, need): (usize, &GroupNeed)| need.least.min(pages[i]) > self.pages[i];
        let grows = layers(&pages) > layers(&self.pages);
        if grows || needs.iter().enumerate().any(lacks) {
            self.release();
            self.cache = owned_by("kv cache", || transformer.kv_cache(dtype, &pages));
            self.pages = pages;
        }
        transformer.reserve_positions(specs.iter().map(longest).max().unwrap_or(0));
        let of_group = |(group, pages): (&CacheGroup, &usize)| GroupPages { kept: group.kept, pages: *pages };
        let pages = groups.iter().zip(&self.pages).map(of_group).collect();
        Limits { batch_max, prefill_tokens_max, pages, new_tokens_before: self.new_tokens_before }
    }
}

/// Lets prompts with the same beginning share its pages.
fn share_prefixes(scheduler: &mut Scheduler, specs: &[Spec], requests: &[Request]) {
    let mut next = 0;
    let of_groups = specs.iter().zip(requests).filter(|(spec, _)| {
        let is_first = spec.group == next;
        next += usize::from(is_first);
        is_first
    });
    let keys = prefixes::keys(of_groups.map(|(_, request)| (&*request.tokens, &*request.images)));
    scheduler.share_prefixes(Prefixes::new(keys.iter().map(|key| &key[..])));
}

/// Gives requests with the same prompt the same group number, except requests that continue after tokens of their own.
fn specs(requests: &[Request]) -> Vec<Spec> {
    let mut groups: HashMap<(usize, &[u32], Option<u32>), usize> = HashMap::new();
    requests
        .iter()
        .map(|request| {
            let next = groups.len();
            let alone = request.partial.as_ref().map(|partial| partial.sample);
            let group = *groups.entry((request.prompt, &request.tokens, alone)).or_insert(next);
            let (known, longest) = (request.known_tokens(), request.tokens.len() + request.new_tokens_max);
            Spec { group, prompt_tokens: known, new_tokens_max: longest - known }
        })
        .collect()
}

fn check(request: &Request, model: &Model) -> Result<()> {
    let arch = &model.transformer.arch;
    let (prompt, new, id) = (request.tokens.len(), request.new_tokens_max, request.prompt_id);
    if prompt == 0 || new == 0 {
        return Err(Error::usage(format!(
            "prompt {id}: the prompt and the response need at least 1 token each (got {prompt} and {new})"
        )));
    }
    if prompt + new > arch.context {
        let message = format!("prompt {id}: {prompt} + {new} tokens exceed the model's context of {}", arch.context);
        return Err(Error::usage(message).hint("shorten the prompt or the response"));
    }
    let is_outside = |token: &&u32| **token as usize >= arch.vocabulary;
    if let Some(token) = request.tokens.iter().find(is_outside) {
        return Err(Error::usage(format!(
            "prompt {id}: token {token} is outside the vocabulary of {} tokens",
            arch.vocabulary
        )));
    }
    if let Some(token) = request.stop.tokens.iter().find(is_outside) {
        let message = format!("the stop token {token} is outside the model's vocabulary of {} tokens", arch.vocabulary);
        return Err(Error::usage(message).hint(
            "correct eos_token_id in the model's generation_config.json or config.json, eos_token in \
             tokenizer_config.json or special_tokens_map.json, or rollout.stop_token_ids",
        ));
    }
    if !request.stop.strings.is_empty() && model.tokenizer.is_none() {
        return Err(Error::usage("stop texts need a tokenizer, but the model directory has none")
            .hint("use stop tokens instead"));
    }
    Ok(())
}
