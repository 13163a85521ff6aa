//! The decode loop: forwards as the scheduler plans them, one draw for every sequence that is ready. Where nothing but
//! decoding is to be done on a GPU, `graphs` takes over.

use super::Request;
use super::graphs::Decoder;
use super::live::Live;
use super::scheduler::{Feed, Limits, Scheduler, Spec, pages_wanted};
use crate::config::rollout::RolloutConfig;
use crate::device::cuda::owned_by;
use crate::error::{Error, Result};
use crate::experience::Response;
use crate::model::astray::Rows;
use crate::model::{Keys, Transformer, Weights};
use crate::ops::attention::{KvLayer, PagedSequence};
use crate::ops::sample::{SampleRow, Sampled};
use crate::rng::Rng;
use crate::tensor::Tensor;
use crate::text::Tokenizer;
use std::collections::HashMap;

/// What responses are drawn from.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    pub transformer: &'a Transformer,
    pub weights: &'a Weights,
    /// For texts and stop texts; without one, responses have no text.
    pub tokenizer: Option<&'a Tokenizer>,
}

/// How far a call of `generate` is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub finished: usize,
    pub total: usize,
    pub running: usize,
    /// New tokens drawn so far.
    pub new_tokens: usize,
}

/// What the caller wants to hear, and say, during `generate`.
pub struct Hooks<'a> {
    /// Asked before every forward; true ends the call with what is finished.
    pub stop: &'a dyn Fn() -> bool,
    /// Called after every forward.
    pub progress: &'a mut dyn FnMut(Progress),
    /// Called with the index of a request and its response as soon as it has ended; an error ends the call.
    pub finished: &'a mut dyn FnMut(usize, &Response) -> Result<()>,
}

/// What a call of `generate` did.
#[derive(Debug, Default)]
pub struct Outcome {
    /// One place a request, in their order; `None` where the call was stopped before it ended.
    pub responses: Vec<Option<Response>>,
    /// Forwards of the model.
    pub forwards: usize,
    /// Those of them that were graphs.
    pub graph_steps: usize,
    /// Tokens that went through them.
    pub tokens_fed: usize,
    /// How often a sequence had to be read again because the cache was full.
    pub preemptions: usize,
}

impl Outcome {
    /// Indices of the requests that have no response yet.
    pub fn unfinished(&self) -> Vec<usize> {
        (0..self.responses.len()).filter(|&i| self.responses[i].is_none()).collect()
    }

    /// The responses, in the order of the requests, where the call was not stopped.
    pub fn complete(self) -> Option<Vec<Response>> {
        self.responses.into_iter().collect()
    }
}

/// Generates responses; keeps its KV cache and its buffers from call to call.
#[derive(Debug)]
pub struct Engine {
    batch_max: usize,
    prefill_tokens_max: usize,
    kv_bytes_max: u64,
    /// `kv_bytes_max` is that of the configuration.
    is_given: bool,
    cache: Vec<KvLayer>,
    pages: usize,
    /// From the first step of decoding on, as long as the cache stays.
    decoder: Option<Decoder>,
    /// Whether steps of decoding on a GPU are graphs.
    graphs: bool,
    /// Why they are not, once one could not be captured.
    refused: Option<String>,
    scratch: Scratch,
}

/// Buffers of one step.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    feeds: Vec<Feed>,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    sequences: Vec<PagedSequence<'static>>,
    /// Rows of hidden that a token is drawn from, and the sequences they belong to.
    rows: Vec<u32>,
    ready: Vec<usize>,
    sample_rows: Vec<SampleRow<'static>>,
    drawn: Vec<Sampled>,
}

impl Engine {
    /// `memory_free`: bytes that the cache may take half of where `kv_bytes_max` is 0.
    pub fn new(config: &RolloutConfig, memory_free: u64) -> Self {
        Self {
            batch_max: config.batch_max,
            prefill_tokens_max: config.prefill_tokens_max,
            kv_bytes_max: if config.kv_bytes_max > 0 { config.kv_bytes_max } else { memory_free / 2 },
            is_given: config.kv_bytes_max > 0,
            cache: Vec::new(),
            pages: 0,
            decoder: None,
            graphs: config.graphs,
            refused: None,
            scratch: Scratch::default(),
        }
    }

    /// From the next call on the cache may take `bytes`, where the configuration does not say how many.
    pub fn allow(&mut self, bytes: u64) {
        if !self.is_given {
            self.kv_bytes_max = bytes;
        }
    }

    /// Why steps of decoding are no graphs any more, where one could not be captured.
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Gives the memory of the cache back until the next call.
    pub fn release(&mut self) {
        self.decoder = None;
        self.cache = Vec::new();
        self.pages = 0;
    }

    /// Bytes that the cache takes now.
    pub fn kv_bytes(&self) -> usize {
        self.cache.iter().map(KvLayer::bytes).sum()
    }

    /// A response for each request. `rng` and `step` (the rollout phase) key the draws.
    ///
    /// The ranks of the transformer's tensor axis call this together with the same requests, and get the same
    /// responses: each runs the same schedule on its heads. When one is told to stop, or fails, all end.
    ///
    /// # Errors
    /// `Usage` where a request does not fit the cache, the context or the vocabulary, or names stop texts without a
    /// tokenizer; `Fault` where logits are not finite.
    pub fn generate(
        &mut self,
        model: Model,
        rng: Rng,
        step: u32,
        requests: &[Request],
        hooks: &mut Hooks,
    ) -> Result<Outcome> {
        requests.iter().try_for_each(|request| check(request, &model))?;
        let specs = specs(requests);
        self.make_cache(model.transformer, &specs);
        let longest = specs.iter().map(|spec| spec.prompt_tokens + spec.new_tokens_max).max();
        model.transformer.reserve_positions(longest.unwrap_or(0));
        let limits =
            Limits { batch_max: self.batch_max, prefill_tokens_max: self.prefill_tokens_max, pages: self.pages };
        let scheduler = Scheduler::new(specs.iter().copied(), limits)?;
        let mut run = Run {
            model,
            rng,
            step,
            requests,
            scheduler,
            live: requests.iter().map(|_| Live::default()).collect(),
            prompt_logits: specs.iter().map(|_| None).collect(),
            cache: &mut self.cache,
            decoder: self.graphs.then_some(&mut self.decoder),
            refused: &mut self.refused,
            batch_max: self.batch_max,
            pages: self.pages,
            scratch: &mut self.scratch,
            outcome: Outcome { responses: requests.iter().map(|_| None).collect(), ..Outcome::default() },
            progress: Progress { total: requests.len(), ..Progress::default() },
            failed: Ok(()),
            stopped: false,
        };
        while !run.is_over(hooks)? {
            run.fork(hooks)?;
            if !run.decode(hooks)? {
                run.forward(hooks)?;
                run.report(hooks);
            }
        }
        run.outcome.preemptions = run.scheduler.preemptions();
        Ok(run.outcome)
    }

    /// Pages for as many of the longest sequences as may run at once, within the bytes allowed. A cache that is large
    /// enough is kept.
    fn make_cache(&mut self, transformer: &Transformer, specs: &[Spec]) {
        let needed = pages_wanted(specs.iter().copied(), self.batch_max);
        let allowed = (self.kv_bytes_max / transformer.kv_page_bytes() as u64) as usize;
        // Where ranks have more and less free memory, the least decides for those that share a schedule.
        let mut least = [-(needed.min(allowed) as f64)];
        transformer.tensor().all_reduce_max_f64(&mut least);
        let pages = -least[0] as usize;
        if pages > self.pages {
            self.release();
            self.cache = owned_by("kv cache", || transformer.kv_cache(pages));
            self.pages = pages;
        }
    }
}

/// Numbers requests with the same prompt alike.
fn specs(requests: &[Request]) -> Vec<Spec> {
    let mut groups: HashMap<(usize, &[u32]), usize> = HashMap::new();
    requests
        .iter()
        .map(|request| {
            let next = groups.len();
            let group = *groups.entry((request.prompt, &request.tokens)).or_insert(next);
            Spec { group, prompt_tokens: request.tokens.len(), new_tokens_max: request.new_tokens_max }
        })
        .collect()
}

fn check(request: &Request, model: &Model) -> Result<()> {
    let arch = &model.transformer.arch;
    let (prompt, new, id) = (request.tokens.len(), request.new_tokens_max, request.prompt_id);
    if prompt == 0 || new == 0 {
        return Err(Error::usage(format!(
            "prompt {id}: {prompt} prompt tokens and at most {new} new ones, both need 1"
        )));
    }
    if prompt + new > arch.context {
        let message = format!("prompt {id}: {prompt} + {new} tokens, the model's context is {}", arch.context);
        return Err(Error::usage(message).hint("shorten the prompt or the response"));
    }
    if let Some(token) = request.tokens.iter().chain(&request.stop.tokens).find(|&&t| t as usize >= arch.vocabulary) {
        return Err(Error::usage(format!(
            "prompt {id}: token {token} is outside the vocabulary of {}",
            arch.vocabulary
        )));
    }
    if !request.stop.strings.is_empty() && model.tokenizer.is_none() {
        return Err(Error::usage("stop texts need a tokenizer, and the model directory has none")
            .hint("name stop tokens instead"));
    }
    Ok(())
}

/// One call of `generate`.
pub(super) struct Run<'a> {
    pub model: Model<'a>,
    pub rng: Rng,
    pub step: u32,
    pub requests: &'a [Request],
    pub scheduler: Scheduler,
    pub live: Vec<Live>,
    /// By group: this rank's logits behind its prompt, while samples of it have not begun.
    prompt_logits: Vec<Option<Tensor>>,
    pub cache: &'a mut [KvLayer],
    /// What graphs need, where steps of decoding may be graphs.
    pub decoder: Option<&'a mut Option<Decoder>>,
    /// Why a graph could not be captured: then none is tried again.
    pub refused: &'a mut Option<String>,
    pub batch_max: usize,
    /// Pages of the cache.
    pub pages: usize,
    scratch: &'a mut Scratch,
    pub outcome: Outcome,
    progress: Progress,
    /// What the caller said to a response; the tensor ranks agree on it before the next forward.
    pub failed: Result<()>,
    /// The caller has said that the call is to end.
    pub stopped: bool,
}

impl Run<'_> {
    /// Whether all sequences have ended or any of the ranks that share the schedule is to stop.
    fn is_over(&mut self, hooks: &Hooks) -> Result<bool> {
        let failed = std::mem::replace(&mut self.failed, Ok(()));
        let done = self.scheduler.is_done();
        let stop = self.stopped || (!done && failed.is_ok() && (hooks.stop)());
        let tensor = self.model.transformer.tensor();
        let mut ends = [f64::from(u8::from(stop)), f64::from(u8::from(failed.is_err()))];
        tensor.all_reduce_max_f64(&mut ends);
        if ends[1] > 0.0 {
            tensor.agree(failed)?;
        }
        Ok(done || ends[0] > 0.0)
    }

    pub fn report(&mut self, hooks: &mut Hooks) {
        self.progress.running = self.scheduler.running();
        (hooks.progress)(self.progress);
    }

    /// Starts samples whose prompt another sample has read.
    fn fork(&mut self, hooks: &mut Hooks) -> Result<()> {
        let forks = self.scheduler.admit().to_vec();
        if forks.is_empty() {
            return Ok(());
        }
        let kept = |s: usize| {
            let kept = self.prompt_logits[self.scheduler.group(s)].as_ref();
            kept.expect("a group that was read keeps its logits")
        };
        let logits = Tensor::stacked(&forks.iter().map(|&s| kept(s)).collect::<Vec<_>>());
        for &s in &forks {
            self.live[s].begin(&self.requests[s]);
        }
        self.draw(&logits, &forks);
        for (i, &s) in forks.iter().enumerate() {
            if !self.accept(s, self.scratch.drawn[i], hooks)?
                && let Some((from, to)) = self.scheduler.share(s)
            {
                self.model.transformer.kv_copy_page(self.cache, from, to);
            }
            let group = self.scheduler.group(s);
            if !self.scheduler.is_prompt_kept(group) {
                self.prompt_logits[group] = None;
            }
        }
        Ok(())
    }

    /// One forward of what the scheduler plans, and a draw for each sequence that it completes.
    fn forward(&mut self, hooks: &mut Hooks) -> Result<()> {
        let mut feeds = std::mem::take(&mut self.scratch.feeds);
        feeds.clear();
        feeds.extend_from_slice(self.scheduler.plan());
        if !feeds.is_empty() {
            let logits = self.logits(&feeds);
            let mut ready = std::mem::take(&mut self.scratch.ready);
            ready.clear();
            for &feed in &feeds {
                if self.scheduler.fed(feed) {
                    let row = logits.as_ref().expect("a complete feed has logits").row_copy(ready.len());
                    self.prompt_logits[self.scheduler.group(feed.sequence)] = Some(row);
                }
                if feed.complete {
                    ready.push(feed.sequence);
                }
            }
            if let Some(logits) = logits {
                self.draw(&logits, &ready);
            }
            for (i, &s) in ready.iter().enumerate() {
                self.accept(s, self.scratch.drawn[i], hooks)?;
            }
            self.scratch.ready = ready;
        }
        self.scratch.feeds = feeds;
        Ok(())
    }

    /// This rank's logits behind each feed that is complete, in order.
    fn logits(&mut self, feeds: &[Feed]) -> Option<Tensor> {
        let scratch = &mut *self.scratch;
        scratch.tokens.clear();
        scratch.positions.clear();
        scratch.rows.clear();
        let mut sequences = recycled(std::mem::take(&mut scratch.sequences));
        for feed in feeds {
            let (s, all) = (feed.sequence, feed.past..feed.past + feed.tokens);
            self.live[s].begin(&self.requests[s]);
            scratch.tokens.extend_from_slice(&self.live[s].tokens[all.clone()]);
            scratch.positions.extend(all.map(|i| i as u32));
            sequences.push(PagedSequence { past: feed.past, tokens: feed.tokens, blocks: self.scheduler.blocks(s) });
            if feed.complete {
                scratch.rows.push(scratch.tokens.len() as u32 - 1);
            }
        }
        let Model { transformer, weights, .. } = self.model;
        let keys = Keys::Paged { cache: self.cache, sequences: &sequences };
        let hidden = transformer.forward(weights, &scratch.tokens, &scratch.positions, keys, None);
        self.outcome.forwards += 1;
        self.outcome.tokens_fed += scratch.tokens.len();
        scratch.sequences = recycled(sequences);
        (!scratch.rows.is_empty()).then(|| transformer.logits_part(weights, &hidden, &scratch.rows))
    }

    /// Draws a token for each of `sequences` from its row of logits, into `scratch.drawn`.
    fn draw(&mut self, logits: &Tensor, sequences: &[usize]) {
        let mut rows = recycled(std::mem::take(&mut self.scratch.sample_rows));
        for &s in sequences {
            let (request, live) = (&self.requests[s], &self.live[s]);
            let new = live.new_tokens(request);
            let uniform = self.rng.sample_uniform(self.step, request.prompt_id, request.sample, new as u32);
            let banned = if new < request.new_tokens_min { &request.stop.tokens[..] } else { &[] };
            rows.push(SampleRow { params: request.params, uniform, seen: &live.tokens, banned });
        }
        self.scratch.drawn.resize(sequences.len(), Sampled::default());
        self.model.transformer.sample(logits, &rows, &mut self.scratch.drawn);
        self.scratch.sample_rows = recycled(rows);
    }

    /// Adds a token to a sequence; true if the sequence ends with it.
    pub fn accept(&mut self, s: usize, drawn: Sampled, hooks: &mut Hooks) -> Result<bool> {
        let request = &self.requests[s];
        if !drawn.logprob.is_finite() {
            return Err(self.astray(s));
        }
        let ends = self.live[s].push(request, drawn, self.model.tokenizer)?;
        self.scheduler.accept(s);
        self.progress.new_tokens += 1;
        let Some(finish) = ends else { return Ok(false) };
        self.scheduler.finish(s);
        let response = self.live[s].finish(request, finish, self.model.tokenizer)?;
        self.progress.finished += 1;
        if self.failed.is_ok() {
            self.failed = (hooks.finished)(s, &response);
        }
        self.outcome.responses[s] = Some(response);
        Ok(true)
    }
}

impl Run<'_> {
    /// Why there is no next token of a sequence: its logits were not finite. Ranks that draw together call this together.
    fn astray(&self, s: usize) -> Error {
        let (request, tokens, Model { transformer, weights, .. }) =
            (&self.requests[s], &self.live[s].tokens, self.model);
        let (id, n) = (request.prompt_id, self.live[s].new_tokens(request));
        let what = format!("the logits after {n} new tokens of prompt {id} are not finite");
        let found = |words: Option<String>, hint: &str| {
            let words = words.map(|words| Error::fault(format!("{what}: {words}")).hint(hint));
            transformer.tensor().agree(words.map_or(Ok(()), Err))
        };
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let last = [tokens.len() as u32 - 1];
        let of =
            Rows { tokens, positions: &positions, cu_seqlens: &[0, tokens.len()], rows: &last, targets: &tokens[..1] };
        // Of the prompt and all tokens before, in one forward: more is not kept of any.
        let again = || {
            let place = transformer.not_finite(weights, of, true);
            place.map(|place| format!("the first of a forward over its tokens is {place}, all weights are finite"))
        };
        let found = found(weights.not_finite(), OF_WEIGHTS).and_then(|()| found(again(), OF_COMPUTING));
        let otherwise = || Error::fault(format!("{what}, and they are in a forward over its tokens")).hint(OF_MACHINE);
        found.err().unwrap_or_else(otherwise)
    }
}

const OF_WEIGHTS: &str =
    "where those of the model directory are finite, updates have left this: lower the learning rate";
const OF_COMPUTING: &str =
    "weights that are finite have grown until what they compute overflows: lower the learning rate";
const OF_MACHINE: &str = "a fault of the GPU or of its memory: nvidia-smi -q -d ECC and lines with Xid in the log of the node's \
                          kernel (dmesg) tell; where it comes again, rollout.graphs = false goes without graphs";

/// The same allocation for elements of the next step, which borrow from elsewhere.
fn recycled<A, B>(mut used: Vec<A>) -> Vec<B> {
    used.clear();
    used.into_iter().map(|_| unreachable!("it is empty")).collect()
}
