//! A sequence during generation: its tokens, the values recorded for each, and whether it has ended.

use super::Request;
use super::turns::Answer;
use crate::error::Result;
use crate::experience::{Episode, Finish, Image, Response, SamplingMask};
use crate::ops::sample::Sampled;
use crate::text::{StreamDecoder, Tokenizer};
use std::ops::Range;
use std::sync::Arc;

/// Prompt and new tokens of one request, with the record of the new ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Live {
    /// Prompt and new tokens. Empty until the sequence begins.
    pub tokens: Vec<u32>,
    /// The images among them.
    pub images: Arc<[Image]>,
    logprobs: Vec<f32>,
    sample_logprobs: Vec<f32>,
    /// The likeliest tokens at each new token. Empty if not requested.
    pub top_logprobs: Vec<Vec<(u32, f32)>>,
    /// The set that each new token was sampled from. Empty if not requested.
    pub sampling_masks: Vec<SamplingMask>,
    /// A hash of the experts of each new token that was fed.
    experts: Vec<u32>,
    watch: Option<Watch>,
    /// The start of the turn, counted from the first new token.
    turn: usize,
    /// The reason why the turn ended, while it waits for an answer.
    ended: Option<Finish>,
    episode: Option<Episode>,
}

impl Live {
    /// Allocates the whole sequence, so that its steps allocate nothing, and takes over the tokens that an earlier call
    /// sampled.
    ///
    /// # Errors
    /// `Data` if the tokenizer cannot decode them.
    pub fn begin(&mut self, request: &Request, tokenizer: Option<&Tokenizer>) -> Result<()> {
        if !self.tokens.is_empty() {
            return Ok(());
        }
        let new = request.new_tokens_max;
        self.tokens.reserve_exact(request.tokens.len() + new);
        self.tokens.extend_from_slice(&request.tokens);
        self.images = Arc::clone(&request.images);
        self.logprobs.reserve_exact(new);
        self.sample_logprobs.reserve_exact(new);
        if !request.stop.strings.is_empty() {
            self.watch = Some(Watch::new(&request.stop.strings));
        }
        let Some(partial) = &request.partial else { return Ok(()) };
        self.tokens.extend_from_slice(&partial.tokens);
        self.logprobs.extend_from_slice(&partial.logprobs);
        self.sample_logprobs.extend_from_slice(&partial.sample_logprobs);
        self.sampling_masks.clone_from(&partial.sampling_masks);
        if let (Some(watch), Some(tokenizer)) = (&mut self.watch, tokenizer) {
            for &token in &partial.tokens {
                watch.push(tokenizer, token, &request.stop.strings)?;
            }
        }
        Ok(())
    }

    /// Records the experts of tokens from index `past` on, which were fed, unless they are the prompt's.
    pub fn note_experts(&mut self, request: &Request, past: usize, hashes: impl Iterator<Item = u32>) {
        let places = (past..).map(|at| at.checked_sub(request.tokens.len()));
        for (new, hash) in places.zip(hashes).filter_map(|(new, hash)| Some((new?, hash))) {
            self.experts.resize(self.experts.len().max(new + 1), 0);
            self.experts[new] = hash;
        }
    }

    pub fn new_tokens(&self, request: &Request) -> usize {
        self.tokens.len().saturating_sub(request.tokens.len())
    }

    /// Adds a sampled token. Returns the reason if the sequence ends with it.
    ///
    /// # Errors
    /// `Data` if the tokenizer cannot decode.
    pub fn push(&mut self, request: &Request, drawn: Sampled, tokenizer: Option<&Tokenizer>) -> Result<Option<Finish>> {
        self.record(drawn);
        let stopped = request.stop.tokens.contains(&drawn.token);
        let mut found = false;
        if let (Some(watch), Some(tokenizer)) = (&mut self.watch, tokenizer) {
            found = watch.push(tokenizer, drawn.token, &request.stop.strings)?;
        }
        Ok(match () {
            () if stopped => Some(Finish::Stop),
            () if found => Some(Finish::StopString),
            () if self.new_tokens(request) >= request.new_tokens_max => Some(Finish::Length),
            () => None,
        })
    }

    /// Ends a turn. Returns the new tokens, and the index at which the turn's tokens begin.
    pub fn end_turn(&mut self, request: &Request, finish: Finish) -> (&[u32], usize) {
        self.ended = Some(finish);
        (&self.tokens[request.tokens.len()..], self.turn)
    }

    /// Appends the answer to a turn. Returns the reason if the sequence ends with it. An answer that leaves no space
    /// for another token is dropped.
    pub fn answer(&mut self, request: &Request, answer: Answer) -> Option<Finish> {
        let Answer { tokens, images, reward, is_over, extra, failed } = answer;
        let finish = self.ended.take().expect("a turn that was answered has ended");
        let new = self.new_tokens(request);
        let episode = self.episode.get_or_insert_default();
        episode.turns += 1;
        episode.reward += reward;
        episode.extra.extend(extra);
        episode.failed = failed;
        if is_over || finish == Finish::Length || episode.failed.is_some() {
            return Some(finish);
        }
        if new + tokens.len() >= request.new_tokens_max {
            return Some(Finish::Length);
        }
        self.turn = new + tokens.len();
        if !tokens.is_empty() {
            episode.given.push(new..self.turn);
        }
        self.logprobs.resize(self.turn, 0.0);
        self.sample_logprobs.resize(self.turn, 0.0);
        if request.keeps_mask {
            self.sampling_masks.resize(self.turn, SamplingMask::default());
        }
        if !images.is_empty() {
            let first = self.tokens.len();
            let given = images.into_iter().map(|image| Image { at: first + image.at, ..image });
            self.images = self.images.iter().cloned().chain(given).collect();
        }
        self.tokens.extend(tokens);
        self.watch = self.watch.take().map(|_| Watch::new(&request.stop.strings));
        None
    }

    /// Adds tokens like `drawn`, up to the one before the last. Returns their number.
    pub fn fill(&mut self, request: &Request, drawn: Sampled) -> usize {
        let missing = request.new_tokens_max.saturating_sub(self.new_tokens(request) + 1);
        (0..missing).for_each(|_| self.record(drawn));
        missing
    }

    fn record(&mut self, drawn: Sampled) {
        self.tokens.push(drawn.token);
        self.logprobs.push(drawn.logprob);
        self.sample_logprobs.push(drawn.sample_logprob);
    }

    /// The response. Leaves the sequence empty.
    pub fn finish(&mut self, request: &Request, finish: Finish, tokenizer: Option<&Tokenizer>) -> Result<Response> {
        let mut live = std::mem::take(self);
        let tokens = live.tokens[request.tokens.len()..].to_vec();
        let mut text = tokenizer.map_or(Ok(String::new()), |t| t.decode(&tokens, true))?;
        // Text of earlier turns is included, too.
        if finish == Finish::StopString
            && live.episode.is_none()
            && let Some(cut) = request.stop.strings.iter().filter_map(|s| text.find(s.as_str())).min()
        {
            text.truncate(cut);
        }
        if let Some(episode) = &mut live.episode {
            episode.images = live.images[request.images.len()..].to_vec();
        }
        if let (Some(episode), Some(tokenizer)) = (&mut live.episode, tokenizer) {
            let at = |end: usize| {
                let before = tokenizer.decode(&tokens[..end], true)?;
                // A character of several tokens belongs to the last one.
                Ok(before.chars().zip(text.chars()).take_while(|(a, b)| a == b).count())
            };
            let span = |given: &Range<usize>| Ok((at(given.start)?, at(given.end)?));
            episode.written = episode.given.iter().map(span).collect::<Result<_>>()?;
        }
        Ok(Response {
            prompt: request.prompt,
            sample: request.sample,
            tokens,
            logprobs: live.logprobs,
            sample_logprobs: live.sample_logprobs,
            sampling_masks: live.sampling_masks,
            experts: live.experts,
            finish,
            weights: request.partial.as_ref().map_or_else(Vec::new, |partial| partial.weights.clone()),
            text,
            episode: live.episode,
            score: None,
            top_logprobs: live.top_logprobs,
        })
    }
}

/// Searches for stop texts in the growing text. Special tokens are part of that text, so they can be stop texts as
/// well.
#[derive(Clone, Debug)]
struct Watch {
    decoder: StreamDecoder,
    /// The end of the text: as much as a match of a stop text may need.
    tail: String,
    keep: usize,
}

impl Watch {
    fn new(strings: &[String]) -> Self {
        let keep = strings.iter().map(String::len).max().unwrap_or(1).saturating_sub(1);
        Self { decoder: StreamDecoder::default(), tail: String::new(), keep }
    }

    fn push(&mut self, tokenizer: &Tokenizer, token: u32, strings: &[String]) -> Result<bool> {
        self.tail.push_str(&self.decoder.push(tokenizer, token)?);
        let found = strings.iter().any(|s| self.tail.contains(s.as_str()));
        let at_most = self.tail.len().saturating_sub(self.keep);
        let cut = (0..=at_most).rev().find(|&i| self.tail.is_char_boundary(i)).unwrap_or(0);
        self.tail.drain(..cut);
        Ok(found)
    }
}
