//! Beam search: for each prompt the likeliest responses that a search of bounded width finds, token for token like
//! Hugging Face `generate` (`num_beams`, `do_sample=False`).
//!
//! A step continues each of a prompt's N beams by its likeliest tokens, and orders the continuations by their sums of
//! log-probabilities. Continuations among the first N that end (end token, stop text, maximum length) are hypotheses
//! with the score
//!
//!     score = sum_t log p_t / n^length_penalty     (n new tokens)
//!
//! The N best hypotheses are kept. The first N continuations that do not end are the next beams. Wu et al.,
//! arXiv:1609.08144, section 7, introduced the length penalty. Repetition penalty, biases and bans act on
//! log-probabilities. Ties are broken by beam and token, lowest first.
//!
//! Beams hold their KV pages by reference. Continuations of one beam share its pages, and a page shared by others is
//! copied before it is written. A prompt starts when the pages of all its beams at maximum length are available, so
//! none is preempted.

use super::Request;
use super::blocks::{BlockPools, BlockTables, GroupPages, held_max, pages_of};
use super::hooks::{Hooks, Progress};
use super::live::Live;
use super::run::{ForwardInput, Model, Outcome};
use super::scheduler::{Limits, cached_tokens_max};
use crate::error::{Error, Result};
use crate::experience::Finish;
use crate::model::{Kept, LayerCache};
use crate::ops::attention::PAGE;
use crate::ops::sample::{SampleParams, SampleRow, Sampled};
use crate::tensor::Tensor;
use argh::FromArgValue;
use std::collections::VecDeque;
use std::ops::Range;

/// Settings of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beams {
    /// N: the number of beams of a prompt, and of hypotheses kept.
    pub count: usize,
    pub early_stopping: EarlyStopping,
    /// Above 0 it favors long responses, below 0 short ones.
    pub length_penalty: f64,
}

/// The condition for ending the search of a prompt that has N hypotheses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromArgValue)]
pub enum EarlyStopping {
    /// At once.
    True,
    /// When the best beam, if it ended now, would not be better than the worst hypothesis.
    #[default]
    False,
    /// When no beam can become better. With a positive length penalty, its sum is divided by the maximum length.
    Never,
}

impl Beams {
    /// The number of continuations of a prompt that a step considers. N of them do not end, even if all end tokens are
    /// among them.
    fn continuations(&self, request: &Request) -> usize {
        (1 + request.stop.tokens.len()).max(2) * self.count
    }

    fn score(&self, sum: f32, new_tokens: usize) -> f32 {
        sum / (new_tokens as f64).powf(self.length_penalty) as f32
    }

    /// Pages of a cache group for all beams of a request at maximum length. Beams share the pages that the prompt
    /// fills. With a window, one beam reads the prompt in chunks, then each beam needs the pages of its window, or a
    /// state.
    pub(super) fn pages_max(&self, request: &Request, kept: Kept, chunk: usize) -> usize {
        let full = request.tokens.len() / PAGE;
        let tokens = cached_tokens_max(request.tokens.len(), request.new_tokens_max);
        let whole = full + self.count * (pages_of(tokens) - full);
        let [reading, each] = [chunk, 1].map(|chunk| held_max(kept, tokens, chunk));
        if kept == Kept::All { whole } else { whole.min(reading.max(self.count * each)) }
    }
}

struct Beam {
    live: Live,
    /// The sum of the log-probabilities of its new tokens.
    sum: f32,
    tables: BlockTables,
}

/// A beam's continuation: the number of the beam, its tokens, and the sum of their log-probabilities.
type Continuation = (usize, Live, f32);

struct Hypothesis {
    live: Live,
    score: f32,
    finish: Finish,
}

/// The search of one prompt.
struct Search {
    /// The requests that get its hypotheses, the best one first.
    requests: Range<usize>,
    /// The beams, equally long. One beam while the prompt is read.
    beams: Vec<Beam>,
    /// Tokens of each beam in the cache.
    past: usize,
    /// The hypotheses, best first.
    ended: Vec<Hypothesis>,
}

/// One call of `beam_search`.
pub(super) struct BeamRun<'a> {
    model: Model<'a>,
    beams: Beams,
    requests: &'a [Request],
    limits: Limits,
    cache: &'a mut [LayerCache],
    pools: BlockPools,
    /// Requests of the prompts that have not started.
    waiting: VecDeque<Range<usize>>,
    searches: Vec<Search>,
    outcome: Outcome,
    progress: Progress,
    failed: Result<()>,
}

/// The requests of each prompt: consecutive requests with the same tokens.
pub(super) fn prompts(requests: &[Request]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut end = 0;
    requests.chunk_by(|a, b| a.prompt == b.prompt && a.tokens == b.tokens).map(move |same| {
        end += same.len();
        end - same.len()..end
    })
}

impl<'a> BeamRun<'a> {
    /// # Errors
    /// `Usage` if there are more requests of a prompt than beams, or if its beams do not fit the cache.
    pub fn new(
        model: Model<'a>,
        beams: Beams,
        requests: &'a [Request],
        limits: Limits,
        cache: &'a mut [LayerCache],
    ) -> Result<Self> {
        for range in prompts(requests) {
            let (wanted, request) = (range.len(), &requests[range.start]);
            let (id, count) = (request.prompt_id, beams.count);
            Error::need(
                wanted <= count,
                format!("prompt {id}: at most {count} responses from {count} beams are possible (got {wanted})"),
            )?;
            for group in &limits.pages {
                let pages = beams.pages_max(request, group.kept, limits.prefill_tokens_max);
                let tokens = request.tokens.len() + request.new_tokens_max;
                let message = || {
                    format!(
                        "prompt {id}: {count} beams of up to {tokens} tokens need {pages} KV pages of {PAGE} tokens, \
                         but the cache has {}",
                        group.pages
                    )
                };
                if pages > group.pages {
                    return Err(Error::usage(message())
                        .hint("raise rollout.kv_bytes_max, or use fewer beams or shorter responses"));
                }
            }
        }
        Ok(Self {
            model,
            beams,
            requests,
            pools: BlockPools::new(&limits.pages),
            limits,
            cache,
            waiting: prompts(requests).collect(),
            searches: Vec::new(),
            outcome: Outcome { responses: requests.iter().map(|_| None).collect(), ..Outcome::default() },
            progress: Progress { total: requests.len(), ..Progress::default() },
            failed: Ok(()),
        })
    }

    pub fn run(mut self, hooks: &mut Hooks) -> Result<Outcome> {
        loop {
            let done = self.waiting.is_empty() && self.searches.is_empty();
            if self.model.is_over(done, false, &mut self.failed, hooks)? {
                return Ok(self.outcome);
            }
            self.admit()?;
            self.step(hooks)?;
            self.progress.running = self.searches.iter().map(|search| search.beams.len()).sum();
            hooks.report(self.progress);
        }
    }

    /// Starts prompts while there are rows and pages for their beams.
    fn admit(&mut self) -> Result<()> {
        while let Some(range) = self.waiting.front() {
            let request = &self.requests[range.start];
            let rows = (self.searches.len() + 1) * self.beams.count;
            // Pages that the running searches may need.
            let held = self.searches.iter().map(|search| &self.requests[search.requests.start]).chain([request]);
            let chunk = self.limits.prefill_tokens_max;
            let fits = |group: &GroupPages| {
                let pages = held.clone().map(|request| self.beams.pages_max(request, group.kept, chunk));
                pages.sum::<usize>() <= group.pages
            };
            if !self.searches.is_empty() && (rows > self.limits.batch_max || !self.limits.pages.iter().all(fits)) {
                break;
            }
            let mut live = Live::default();
            live.begin(request, self.model.tokenizer)?;
            let beams = vec![Beam { live, sum: 0.0, tables: BlockTables::new(self.pools.len()) }];
            self.searches.push(Search { requests: range.clone(), beams, past: 0, ended: Vec::new() });
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// One forward: a token of every beam, and prompt tokens within the budget. Then the next beams of each prompt.
    fn step(&mut self, hooks: &mut Hooks) -> Result<()> {
        let mut budget = self.limits.prefill_tokens_max.max(1);
        // The tokens of each search that this forward reads.
        let mut shares = Vec::with_capacity(self.searches.len());
        for search in &mut self.searches {
            let left = search.beams[0].live.tokens.len() - search.past;
            let tokens = if left == 1 { 1 } else { left.min(budget) };
            budget -= if left == 1 { 0 } else { tokens };
            // Beams share pages, so all leave their old pages before one needs a new page.
            search.beams.iter_mut().for_each(|beam| self.pools.slide(&mut beam.tables, search.past));
            for beam in &mut search.beams {
                cover(&mut self.pools, self.model, self.cache, &mut beam.tables, search.past..search.past + tokens);
            }
            shares.push((tokens, tokens == left));
        }
        let feeds = self.searches.iter().zip(&shares).filter(|(_, (tokens, _))| *tokens > 0).flat_map(
            |(search, &(tokens, complete))| {
                let images = &*self.requests[search.requests.start].images;
                search.beams.iter().map(move |beam| ForwardInput {
                    images,
                    tokens: &beam.live.tokens[search.past..search.past + tokens],
                    past: search.past,
                    tables: &beam.tables,
                    complete,
                })
            },
        );
        let logits = self.model.logits(self.cache, &feeds.collect::<Vec<_>>(), &mut self.outcome);
        let mut best = logits.map_or(Vec::new(), |logits| self.best(&logits, &shares)).into_iter();
        let searches = std::mem::take(&mut self.searches);
        for (mut search, (tokens, complete)) in searches.into_iter().zip(shares) {
            search.past += tokens;
            if complete {
                let best: Vec<Vec<Sampled>> = best.by_ref().take(search.beams.len()).collect();
                let request = &self.requests[search.requests.start];
                if let Some(at) = best.iter().position(|row| row[0].logprob.is_nan()) {
                    return Err(self.model.non_finite(request, &search.beams[at].live));
                }
                self.progress.new_tokens += search.beams.len();
                let next = self.advance(&mut search, &best)?;
                self.replace(&mut search, next);
            }
            if search.beams.is_empty() { self.finish(search, hooks)? } else { self.searches.push(search) }
        }
        Ok(())
    }

    /// The likeliest next tokens of each beam of the searches whose share of the forward is complete.
    fn best(&self, logits: &Tensor, shares: &[(usize, bool)]) -> Vec<Vec<Sampled>> {
        let complete = self.searches.iter().zip(shares).filter(|(_, (_, complete))| *complete);
        let (mut of_rows, mut most) = (Vec::with_capacity(logits.rows()), 1);
        for (search, _) in complete {
            let request = &self.requests[search.requests.start];
            most = most.max(self.beams.continuations(request));
            let tokens = search.beams.iter().map(|beam| &beam.live.tokens[..]);
            of_rows.extend(tokens.map(|tokens| (request, tokens, request.banned(tokens))));
        }
        let rows = of_rows.iter().map(|(request, seen, banned)| SampleRow {
            params: SampleParams { repetition_penalty: request.params.repetition_penalty, ..SampleParams::greedy() },
            uniform: 0.0,
            seen,
            banned,
            bias: &request.edits.bias,
        });
        let rows: Vec<SampleRow> = rows.collect();
        let n = most.min(self.model.transformer.arch.vocabulary);
        let mut best = vec![Sampled::default(); n * rows.len()];
        self.model.transformer.top(logits, &rows, n, &mut best);
        best.chunks_exact(n).map(<[Sampled]>::to_vec).collect()
    }

    /// The beams that continue those of `search` by the tokens `best` of each, with the numbers of the beams that they
    /// continue. Empty if the search is over. Beams that end are kept as hypotheses.
    fn advance(&self, search: &mut Search, best: &[Vec<Sampled>]) -> Result<Vec<Continuation>> {
        let Beams { count, early_stopping, length_penalty } = self.beams;
        let request = &self.requests[search.requests.start];
        let of_beam = |(at, (beam, best)): (usize, (&Beam, &Vec<Sampled>))| {
            let sum = beam.sum;
            best.iter().map(move |found| (sum + found.sample_logprob, at, *found)).collect::<Vec<_>>()
        };
        let mut all: Vec<(f32, usize, Sampled)> = search.beams.iter().zip(best).enumerate().flat_map(of_beam).collect();
        all.retain(|(sum, ..)| *sum > f32::NEG_INFINITY);
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2.token).cmp(&(b.1, b.2.token))));
        all.truncate(self.beams.continuations(request));
        let mut next: Vec<Continuation> = Vec::with_capacity(count);
        for (i, (sum, at, found)) in all.into_iter().enumerate() {
            if i >= count && next.len() == count {
                break;
            }
            let mut live = search.beams[at].live.clone();
            let ends = live.push(request, found, self.model.tokenizer)?;
            match ends {
                None if next.len() < count => next.push((at, live, sum)),
                Some(finish) if i < count => {
                    let score = self.beams.score(sum, live.new_tokens(request));
                    search.ended.push(Hypothesis { live, score, finish });
                }
                _ => {}
            }
        }
        search.ended.sort_by(|a, b| b.score.total_cmp(&a.score));
        search.ended.truncate(count);
        let new_tokens = search.beams[0].live.new_tokens(request) + 1;
        if let [.., worst] = &search.ended[..]
            && search.ended.len() == count
        {
            let is_far = early_stopping == EarlyStopping::Never && length_penalty > 0.0;
            let length = if is_far { request.new_tokens_max } else { new_tokens };
            let improves = |(.., sum): &Continuation| self.beams.score(*sum, length) > worst.score;
            if early_stopping == EarlyStopping::True || !next.first().is_some_and(improves) {
                next.clear();
            }
        }
        Ok(next)
    }

    /// Gives each of the next beams the pages of the one that it continues.
    fn replace(&mut self, search: &mut Search, next: Vec<Continuation>) {
        let mut before = std::mem::take(&mut search.beams);
        for (at, live, sum) in next {
            let tables = &before[at].tables;
            search.beams.push(Beam { live, sum, tables: self.pools.share(tables, tables.len()) });
        }
        for beam in &mut before {
            self.pools.clear(&mut beam.tables);
        }
    }

    /// Returns the hypotheses of a finished search.
    fn finish(&mut self, search: Search, hooks: &mut Hooks) -> Result<()> {
        let Search { requests, ended, .. } = search;
        let first = &self.requests[requests.start];
        if ended.len() < requests.len() {
            let (id, found, wanted) = (first.prompt_id, ended.len(), requests.len());
            return Err(Error::usage(format!("prompt {id}: the search found {found} of {wanted} responses"))
                .hint("use fewer responses or more beams"));
        }
        for (i, Hypothesis { mut live, score, finish }) in requests.zip(ended) {
            let mut response = live.finish(&self.requests[i], finish, self.model.tokenizer)?;
            response.score = Some(score);
            self.progress.finished += 1;
            if self.failed.is_ok() {
                self.failed = hooks.finished(i, &response);
            }
            self.outcome.responses[i] = Some(response);
        }
        Ok(())
    }
}

/// Makes `tables` cover the tokens `fed`, with own pages for the tokens that are written.
fn cover(pools: &mut BlockPools, model: Model, cache: &mut [LayerCache], tables: &mut BlockTables, fed: Range<usize>) {
    const RESERVED: &str = "a search has reserved the pages of its beams";
    for (group, from, to) in pools.unshare(tables, fed.start / PAGE).expect(RESERVED) {
        model.transformer.kv_copy_page(cache, group, from, to);
    }
    pools.cover(tables, fed.end).expect(RESERVED);
    for (group, from, to) in pools.take_copies() {
        model.transformer.kv_copy_page(cache, group, from, to);
    }
}
