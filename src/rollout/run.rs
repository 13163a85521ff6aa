//! One call of `generate`: forward passes as the scheduler plans them, and one sampled token for every sequence that is
//! ready.

use super::Request;
use super::blocks::BlockTables;
use super::hooks::{Hooks, Progress};
use super::live::Live;
use super::scheduler::{Chunk, Limits, Scheduler};
use super::steps::DecodeSteps;
use crate::comm::{Calls, records};
use crate::device::cuda::decode::DecodeState;
use crate::device::cuda::graph::Graphs;
use crate::device::cuda::{Arg, Memory};
use crate::device::null;
use crate::error::{Error, Result};
use crate::experience::{Finish, Image, Response};
use crate::model::non_finite::Rows;
use crate::model::{Arch, Keys, LayerCache, Transformer, Weights};
use crate::ops::attention::{Paged, PagedSequence};
use crate::ops::sample::{SampleParams, SampleRow, Sampled};
use crate::pictures::{pictures, push_positions};
use crate::rng::Rng;
use crate::tensor::Tensor;
use crate::text::Tokenizer;

/// The model that responses are sampled from.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    pub transformer: &'a Transformer,
    pub weights: &'a Weights,
    /// The tokenizer for texts and stop texts. Without one, responses have no text.
    pub tokenizer: Option<&'a Tokenizer>,
}

/// A sequence's share of a forward: tokens after the `past` cached ones.
pub(super) struct ForwardInput<'a> {
    /// The images of its sequence.
    pub images: &'a [Image],
    pub tokens: &'a [u32],
    pub past: usize,
    pub tables: &'a BlockTables,
    /// Whether the logits after the last token are needed.
    pub complete: bool,
}

impl ForwardInput<'_> {
    /// Its sequence, with the pages of a cache group.
    fn in_group(&self, group: usize) -> PagedSequence<'_> {
        PagedSequence { past: self.past, tokens: self.tokens.len(), blocks: self.tables.of_group(group) }
    }
}

impl Model<'_> {
    /// This rank's logits after each complete share, in order.
    pub(super) fn logits(
        self,
        cache: &mut [LayerCache],
        feeds: &[ForwardInput],
        outcome: &mut Outcome,
    ) -> Option<Tensor> {
        let (mut tokens, mut positions, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        let (mut seen, has_images) = (Vec::new(), feeds.iter().any(|feed| !feed.images.is_empty()));
        for feed in feeds {
            let fed = feed.past..feed.past + feed.tokens.len();
            seen.extend(pictures(feed.images, fed.clone(), tokens.len()));
            push_positions(feed.images, fed, has_images, &mut positions);
            tokens.extend_from_slice(feed.tokens);
            if feed.complete {
                rows.push(tokens.len() as u32 - 1);
            }
        }
        let of_group = |group| feeds.iter().map(|feed| feed.in_group(group)).collect();
        let sequences: Vec<Vec<PagedSequence>> = (0..self.transformer.cache_groups().len()).map(of_group).collect();
        let paged: Vec<Paged> = sequences.iter().map(|sequences| sequences.as_slice().into()).collect();
        let keys = Keys::Paged(cache, &paged);
        let hidden = self.transformer.forward_seeing(self.weights, &seen, &tokens, &positions, keys, None);
        outcome.forwards += 1;
        outcome.tokens_fed += tokens.len();
        (!rows.is_empty()).then(|| self.transformer.logits_part(self.weights, &hidden, &rows))
    }

    /// Whether everything is done, or any of the ranks that share matrices stops. If one rank fails, all return its
    /// error.
    pub(super) fn is_over(self, done: bool, stopped: bool, failed: &mut Result<()>, hooks: &Hooks) -> Result<bool> {
        let (tensor, failed) = (self.transformer.tensor(), std::mem::replace(failed, Ok(())));
        let stop = stopped || (!done && failed.is_ok() && hooks.stops());
        let mut ends = [f64::from(u8::from(stop)), f64::from(u8::from(failed.is_err()))];
        tensor.all_reduce_max_f64(&mut ends);
        if ends[1] > 0.0 {
            tensor.agree(failed)?;
        }
        Ok(ends[0] > 0.0 || done)
    }

    /// Reports the reason why no token follows those of a request so far: their logits were not finite. Ranks that
    /// sample together call this together.
    pub(super) fn non_finite(self, request: &Request, live: &Live) -> Error {
        let Live { tokens, images, .. } = live;
        let Model { transformer, weights, .. } = self;
        let (id, n) = (request.prompt_id, tokens.len() - request.tokens.len());
        let what = format!("the logits of prompt {id} are not finite after {n} new tokens");
        let found = |words: Option<String>, hint: &str| {
            let words = words.map(|words| Error::fault(format!("{what}: {words}")).hint(hint));
            transformer.tensor().agree(words.map_or(Ok(()), Err))
        };
        let (mut positions, all) = (Vec::new(), 0..tokens.len());
        push_positions(images, all.clone(), !images.is_empty(), &mut positions);
        let (seen, last) = (pictures(images, all, 0).collect::<Vec<_>>(), [tokens.len() as u32 - 1]);
        let (positions, pictures, cu_seqlens) = (&positions[..], &seen[..], &[0, tokens.len()][..]);
        let of = Rows { tokens, positions, pictures, cu_seqlens, rows: &last, targets: &tokens[..1] };
        // One forward over the prompt and all tokens, because no intermediate results were kept.
        let again = || {
            let place = transformer.not_finite(weights, of, true);
            place.map(|place| {
                format!("the first non-finite result of a forward over its tokens is {place}; all weights are finite")
            })
        };
        let found = found(weights.not_finite(), OF_WEIGHTS).and_then(|()| found(again(), OF_COMPUTING));
        let otherwise = || {
            Error::fault(format!("{what}, but they are finite in a second forward over its tokens")).hint(OF_MACHINE)
        };
        found.err().unwrap_or_else(otherwise)
    }
}

/// The result of a call of `generate`.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The responses in the order of the requests. `None` if the call was stopped before one ended, or did not take it
    /// from the queue.
    pub responses: Vec<Option<Response>>,
    /// The number of forward passes.
    pub forwards: usize,
    /// The number of forward passes that were graphs.
    pub graph_steps: usize,
    /// The number of tokens in all forward passes.
    pub tokens_fed: usize,
    /// The number of times that a sequence was read again because the cache was full.
    pub preemptions: usize,
    /// Tokens of the prompts of all responses, and the number of them that were reused from another sequence instead of
    /// read.
    pub prompt_tokens: usize,
    pub prefix_hit_tokens: usize,
}

impl Outcome {
    /// The responses in the order of the requests, if the call was not stopped.
    pub fn complete(self) -> Option<Vec<Response>> {
        self.responses.into_iter().collect()
    }
}

/// State that an engine keeps for its graphs.
#[derive(Debug)]
pub(super) struct Decoder {
    /// The addresses that graphs read in addition to the tables. Graphs are valid while these stay the same.
    pub model: (Arch, Vec<Arg>),
    /// The graphs, dropped before the memory that they read and write.
    pub graphs: Graphs<Shape>,
    pub tables: DecodeState,
    /// The collectives of each graph.
    pub calls: Vec<(Shape, Calls)>,
    /// The ends of the parts of the vocabulary, i32.
    pub ends: Memory,
    pub changes: Vec<u32>,
    pub multiprocessors: usize,
}

/// The parameters in which graphs differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Rows, including padding.
    pub rows: usize,
    /// The maximum context, if attention is split.
    pub longest: Option<usize>,
    /// Whether a row may have stop tokens that are still banned.
    pub bans: bool,
    /// Whether a row has a repetition penalty, so that its sampled tokens must be recorded.
    pub sees: bool,
}

/// One call of `generate`.
pub(super) struct Run<'a> {
    pub model: Model<'a>,
    pub rng: Rng,
    pub step: u32,
    pub requests: &'a [Request],
    pub scheduler: Scheduler,
    pub live: Vec<Live>,
    /// This rank's logits after the prompt of each group, until all its samples have begun.
    pub prompt_logits: Vec<Option<Tensor>>,
    pub cache: &'a mut [LayerCache],
    /// The decoder of graphs, if decode steps may be graphs.
    pub decoder: Option<&'a mut Option<Decoder>>,
    /// The reason why a graph capture failed. After a failure, none is tried again in this call.
    pub refused: &'a mut Option<String>,
    pub limits: Limits,
    pub steps: DecodeSteps,
    pub outcome: Outcome,
    pub progress: Progress,
    /// The caller's error on a response. The tensor ranks agree on it before the next forward.
    pub failed: Result<()>,
    /// Whether the caller has asked to stop.
    pub stopped: bool,
}

impl Run<'_> {
    /// Whether all sequences have ended, or any of the ranks that share the schedule stops.
    pub fn is_over(&mut self, hooks: &Hooks) -> Result<bool> {
        self.model.is_over(self.scheduler.is_done(), self.stopped, &mut self.failed, hooks)
    }

    pub fn report(&mut self, hooks: &mut Hooks) {
        self.progress.running = self.scheduler.running();
        hooks.report(self.progress);
    }

    /// Takes requests from the queue while there is space.
    pub fn take_more(&mut self, hooks: &mut Hooks) {
        let Some(queue) = &mut hooks.queue else { return };
        while self.scheduler.wants_more() {
            match (queue.next)() {
                Some(requests) => self.scheduler.add(requests),
                None => self.scheduler.close(),
            }
        }
    }

    /// Appends the answers to turns that have arrived. Waits for one if nothing else can be done.
    pub fn answer(&mut self, hooks: &mut Hooks) -> Result<()> {
        let Some(turns) = &mut hooks.turns else { return Ok(()) };
        if !self.scheduler.has_open_turns() {
            return Ok(());
        }
        // The first of the ranks that share the schedule calls the environment for all of them.
        let tensor = self.model.transformer.tensor();
        let waits = self.scheduler.is_stalled();
        let come = if tensor.rank() == 0 { turns.answers(waits) } else { Ok(Vec::new()) };
        let come = tensor.agree(come)?;
        for (s, answer) in records::of_first(tensor, || come) {
            let tokens = answer.tokens.len();
            match self.live[s].answer(&self.requests[s], answer) {
                Some(finish) => self.end(s, finish, hooks)?,
                None => self.scheduler.answer(s, tokens),
            }
        }
        Ok(())
    }

    /// Starts samples whose prompt another sample has read.
    pub fn fork(&mut self, hooks: &mut Hooks) -> Result<()> {
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
            self.live[s].begin(&self.requests[s], self.model.tokenizer)?;
        }
        let drawn = self.draw(&logits, &forks);
        for (s, drawn) in forks.into_iter().zip(drawn) {
            if !self.accept(s, drawn, hooks)?
                && let Some(copies) = self.scheduler.share(s)
            {
                for (group, (from, to)) in copies.into_iter().enumerate() {
                    self.model.transformer.kv_copy_page(self.cache, group, from, to);
                }
            }
            let group = self.scheduler.group(s);
            if !self.scheduler.is_prompt_kept(group) {
                self.prompt_logits[group] = None;
            }
        }
        Ok(())
    }

    /// One forward as the scheduler plans it, and a sampled token for each sequence that it completes.
    pub fn forward(&mut self, hooks: &mut Hooks) -> Result<()> {
        let feeds = self.scheduler.plan().to_vec();
        if feeds.is_empty() {
            return Ok(());
        }
        for (group, from, to) in self.scheduler.take_copies() {
            self.model.transformer.kv_copy_page(self.cache, group, from, to);
        }
        let (decodes, _span) = Chunk::begin(&feeds);
        let times = self.begin_forward(decodes, feeds.iter().map(|feed| feed.sequence));
        let logits = null::times(times, || self.logits(&feeds))?;
        let mut ready = Vec::with_capacity(feeds.len());
        for feed in feeds {
            if self.scheduler.fed(feed) {
                let row = logits.as_ref().expect("a complete feed has logits").row_copy(ready.len());
                self.prompt_logits[self.scheduler.group(feed.sequence)] = Some(row);
            }
            if feed.complete {
                ready.push(feed.sequence);
            }
        }
        let drawn = logits.map_or(Vec::new(), |logits| null::times(times, || self.draw(&logits, &ready)));
        for (s, drawn) in ready.into_iter().zip(drawn) {
            self.accept(s, drawn, hooks)?;
            if decodes {
                self.skip(s, drawn);
            }
        }
        Ok(())
    }

    /// Begins a forward of `sequences`. Returns the number of forward passes that it represents.
    pub(super) fn begin_forward(&self, decodes: bool, sequences: impl Iterator<Item = usize>) -> f64 {
        null::enter(if decodes { null::Phase::Decode } else { null::Phase::Prefill });
        if !decodes || self.steps == DecodeSteps::All {
            return 1.0;
        }
        let steps = sequences.map(|s| self.requests[s].new_tokens_max.saturating_sub(1)).max().unwrap_or(1);
        (steps as f64 / 2.0).max(1.0)
    }

    /// After the first decode step of a response, skips to its last one, unless all steps are run. All decode steps use
    /// the same memory, except for the part that grows with the cached keys, which is largest in the last step.
    pub(super) fn skip(&mut self, s: usize, drawn: Sampled) {
        if self.steps == DecodeSteps::All {
            return;
        }
        let last = self.requests[s].tokens.len() + self.requests[s].new_tokens_max - 1;
        // If there are not enough pages, the response waits until others have ended.
        if self.outcome.responses[s].is_none() && self.scheduler.skip_to(s, last) {
            let filled = self.live[s].fill(&self.requests[s], drawn);
            self.scheduler.lengthen(s, filled);
        }
    }

    /// This rank's logits after each complete feed, in order.
    fn logits(&mut self, feeds: &[Chunk]) -> Result<Option<Tensor>> {
        for feed in feeds {
            self.live[feed.sequence].begin(&self.requests[feed.sequence], self.model.tokenizer)?;
        }
        let fed = |feed: &Chunk| ForwardInput {
            images: &self.live[feed.sequence].images,
            tokens: &self.live[feed.sequence].tokens[feed.past..feed.past + feed.tokens],
            past: feed.past,
            tables: self.scheduler.tables(feed.sequence),
            complete: feed.complete,
        };
        let fed: Vec<ForwardInput> = feeds.iter().map(fed).collect();
        let forward = || self.model.logits(self.cache, &fed, &mut self.outcome);
        let (logits, experts) = self.model.transformer.routers.traced(forward);
        let mut hashes = experts.into_iter();
        for &Chunk { sequence: s, past, tokens, .. } in feeds {
            self.live[s].note_experts(&self.requests[s], past, hashes.by_ref().take(tokens));
        }
        Ok(logits)
    }

    /// The random key of a request: the call's key and the prompt's id, or its own key and no id.
    pub(super) fn draws(&self, request: &Request) -> (Rng, u64) {
        request.rng.map_or((self.rng, request.prompt_id), |own| (own, 0))
    }

    /// Samples a token for each of `sequences` from its row of logits.
    fn draw(&mut self, logits: &Tensor, sequences: &[usize]) -> Vec<Sampled> {
        self.record_top(logits, sequences);
        let of = |s: &usize| (&self.requests[*s], &self.live[*s]);
        let banned: Vec<_> = sequences.iter().map(of).map(|(request, live)| request.banned(&live.tokens)).collect();
        let rows = sequences.iter().map(of).zip(&banned).map(|((request, live), banned)| {
            let ((rng, id), new) = (self.draws(request), live.new_tokens(request) as u32);
            let uniform = rng.sample_uniform(request.step.unwrap_or(self.step), id, request.sample, new);
            SampleRow { params: request.params, uniform, seen: &live.tokens, banned, bias: &request.edits.bias }
        });
        let rows: Vec<SampleRow> = rows.collect();
        let mut drawn = vec![Sampled::default(); rows.len()];
        if !sequences.iter().any(|&s| self.requests[s].keeps_mask) {
            self.model.transformer.sample(logits, &rows, &mut drawn);
            return drawn;
        }
        let masks = self.model.transformer.sample_masked(logits, &rows, &mut drawn);
        for (&s, mask) in sequences.iter().zip(masks) {
            self.live[s].sampling_masks.push(mask);
        }
        drawn
    }

    /// Records the likeliest tokens of each row of logits, if its request asks for them.
    fn record_top(&mut self, logits: &Tensor, sequences: &[usize]) {
        let requests = self.requests;
        let most = sequences.iter().map(|&s| requests[s].top_logprobs).max().unwrap_or(0);
        let n = most.min(self.model.transformer.arch.vocabulary);
        if n == 0 {
            return;
        }
        let plain = |&s: &usize| {
            let params = SampleParams::plain(requests[s].params.temperature);
            SampleRow { params, uniform: 0.0, seen: &[], banned: &[], bias: &[] }
        };
        let rows: Vec<SampleRow> = sequences.iter().map(plain).collect();
        let mut top = vec![Sampled::default(); n * rows.len()];
        self.model.transformer.top(logits, &rows, n, &mut top);
        for (&s, top) in sequences.iter().zip(top.chunks_exact(n)) {
            let top: Vec<(u32, f32)> =
                top.iter().take(requests[s].top_logprobs).map(|found| (found.token, found.logprob)).collect();
            if !top.is_empty() {
                self.live[s].top_logprobs.push(top);
            }
        }
    }

    /// Adds a token to a sequence. Returns true if the sequence ends with it.
    pub fn accept(&mut self, s: usize, drawn: Sampled, hooks: &mut Hooks) -> Result<bool> {
        let request = &self.requests[s];
        if !drawn.logprob.is_finite() {
            return Err(self.model.non_finite(request, &self.live[s]));
        }
        let ends = self.live[s].push(request, drawn, self.model.tokenizer)?;
        self.scheduler.accept(s);
        self.progress.new_tokens += 1;
        if let Some(hear) = &mut hooks.drawn {
            hear(s, drawn.token);
        }
        let Some(finish) = ends else { return Ok(false) };
        if let Some(turns) = &mut hooks.turns {
            let (tokens, turn) = self.live[s].end_turn(request, finish);
            if self.model.transformer.tensor().rank() == 0 && self.failed.is_ok() {
                self.failed = turns.ended(s, tokens, turn, finish);
            }
            self.scheduler.wait(s);
            return Ok(false);
        }
        self.end(s, finish, hooks)?;
        Ok(true)
    }

    /// Ends a sequence.
    fn end(&mut self, s: usize, finish: Finish, hooks: &mut Hooks) -> Result<()> {
        self.scheduler.finish(s);
        let response = self.live[s].finish(&self.requests[s], finish, self.model.tokenizer)?;
        self.progress.finished += 1;
        if self.failed.is_ok() {
            self.failed = hooks.finished(s, &response);
        }
        self.outcome.responses[s] = Some(response);
        Ok(())
    }
}

const OF_WEIGHTS: &str =
    "lower the learning rate: if the weights of the model directory are finite, updates caused this";
const OF_COMPUTING: &str = "lower the learning rate: the weights are finite, but so large that results overflow";
const OF_MACHINE: &str = "check the GPU and its memory for faults, with nvidia-smi -q -d ECC and for Xid lines in the \
                          node's kernel log (dmesg); if it happens again, set rollout.graphs = false to decode without \
                          graphs";
