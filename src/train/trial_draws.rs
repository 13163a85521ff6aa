//! What a small model draws on a GPU, from the cache, held to what the CPU computes of the same tokens.
//!
//! The job's own settings are tried with exact products alone: what filters and draws reads logits, whoever made them, and with
//! fast products there are no logits of the same bits to draw from again. Where products are fast, as many rows decode together
//! as those take.

use super::trial::{Pair, tokens, within};
use crate::config::rollout::RolloutConfig;
use crate::device::cuda::fast;
use crate::error::{Error, Result};
use crate::experience::{Finish, Response};
use crate::model::{Keys, packed_positions};
use crate::ops::sample::{self, SampleParams, SampleRow, Sampled};
use crate::rng::{Purpose, Rng};
use crate::rollout::{Engine, Hooks, Model, Request, Stop, sample_params};
use crate::tensor::Tensor;
use std::sync::Arc;

/// Nats that a log-probability may be apart.
pub const NATS_APART: f64 = 0.08;
/// How far a draw may lie outside of its token's share of the CPU's distribution.
const BORDER: f64 = 0.02;
/// How near to a border of a distribution the host may draw another token, and how far log-probabilities of the same logits may be
/// apart.
const NEAR: f32 = 1e-4;
const AGAIN_APART: f64 = 1e-4;
const SEED: u64 = 17;
const STEP: u32 = 1;
/// Tokens of the prompts, of which one is longer than a page and than what is read at a time; samples of each; new tokens.
const PROMPTS: [(usize, u32); 2] = [(70, 2), (21, 2)];
/// One more where products are fast: with the others, rows enough for those while they decode.
const MANY: (usize, u32) = (5, fast::EXACT_ROWS_MAX as u32);
const NEW: usize = 6;
const PREFILL: usize = 80;
const PAGES: usize = 24;

/// Samples, and looks at every draw. `is_exact`: what is recorded has the bits of a training forward.
///
/// # Errors
/// `Fault`, naming what differs.
pub fn compare(gpu: Pair, cpu: Pair, graphs: bool, is_exact: bool) -> Result<()> {
    let prompts = PROMPTS.into_iter().chain(fast::is_on().then_some(MANY));
    let (requests, rng) = (requests(gpu.0.arch.vocabulary, prompts, &Asked::plain()), Rng::new(SEED, Purpose::Sample));
    // All ranks that draw together hear of an error before they go on together.
    let responses = gpu.0.tensor().agree(drawn(gpu, &requests, rng, graphs))?;
    let batch = Batch::new(&requests, &responses);
    let of_training = batch.logprobs(gpu);
    let recorded: Vec<f32> = responses.iter().flat_map(|response| response.logprobs.iter().copied()).collect();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    if is_exact && bits(&of_training) != bits(&recorded) {
        let at =
            (0..recorded.len()).find(|i| recorded[*i].to_bits() != of_training[*i].to_bits()).expect("one differs");
        let (prompt, drawn) = (requests[at / NEW].tokens.len(), at % NEW + 1);
        return Err(Error::fault(format!(
            "token {drawn} behind a prompt of {prompt} has the log-probability {} from the cache and {} in training, where \
             both have the same bits",
            recorded[at], of_training[at]
        )));
    }
    let shares = batch.distributions(cpu);
    let uniforms =
        requests.iter().flat_map(|r| (0..NEW).map(|i| rng.sample_uniform(STEP, r.prompt_id, r.sample, i as u32)));
    for (((share, token), uniform), logprob) in shares.iter().zip(&batch.targets).zip(uniforms).zip(&recorded) {
        let (token, uniform) = (*token as usize, f64::from(uniform));
        let gap = (f64::from(*logprob) - share[token].ln()).abs();
        within(|| "the log-probability of a drawn token".into(), gap, NATS_APART, "nats")?;
        let below: f64 = share[..token].iter().sum();
        let outside = (below - uniform).max(uniform - below - share[token]);
        within(|| format!("the draw of token {token}"), outside, BORDER, "of the distribution")?;
    }
    Ok(())
}

/// Samples with the settings of the job's rollout, and draws every token again on the host, from the same logits: filters, penalty,
/// tokens that end a response and those that must not yet. With exact products the logits of training are those that were
/// drawn from.
///
/// # Errors
/// `Fault`, naming what differs.
pub fn compare_settings((model, w): Pair, config: &RolloutConfig, eos_tokens: &[u32]) -> Result<()> {
    let vocabulary = model.arch.vocabulary;
    let asked = Asked::by(config, eos_tokens, vocabulary);
    if asked == Asked::plain() {
        return Ok(());
    }
    let (requests, rng) = (requests(vocabulary, PROMPTS, &asked), Rng::new(SEED + 1, Purpose::Sample));
    let responses = drawn((model, w), &requests, rng, config.graphs)?;
    let batch = Batch::new(&requests, &responses);
    let logits = model.logits(w, &batch.hidden((model, w)), &batch.rows).to_host();
    let mut rows = logits.chunks(vocabulary);
    for (request, response) in requests.iter().zip(&responses) {
        for (i, token) in response.tokens.iter().enumerate() {
            let seen = [&request.tokens[..], &response.tokens[..i]].concat();
            let banned = if i < asked.least { &asked.stop.tokens[..] } else { &[] };
            let uniform = rng.sample_uniform(STEP, request.prompt_id, request.sample, i as u32);
            let row = SampleRow { params: asked.params, uniform, seen: &seen, banned };
            let logits = Tensor::from_slice(1, vocabulary, rows.next().expect("logits of every token"));
            let got = [response.logprobs[i], response.sample_logprobs[i]];
            drawn_again(&logits, &row, *token, got)
                .map_err(|error| error.within(format!("token {} of a response with the job's settings", i + 1)))?;
        }
        let ends = response.tokens.iter().position(|token| asked.stop.tokens.contains(token));
        let (count, stopped) = (response.tokens.len(), response.finish == Finish::Stop);
        if ends.map_or(count != NEW || stopped, |end| end + 1 != count || !stopped) {
            let (tokens, finish) = (&response.tokens, response.finish.name());
            return Err(Error::fault(format!("a response of {tokens:?} has ended by {finish}, with {:?}", asked.stop)));
        }
    }
    Ok(())
}

/// Draws on the host what the GPU has drawn as `token`, with its log-probabilities among all and among the filtered tokens.
fn drawn_again(logits: &Tensor, row: &SampleRow, token: u32, got: [f32; 2]) -> Result<()> {
    let again = |row: SampleRow| {
        let mut out = [Sampled::default()];
        sample::forward(logits, &[row], &mut out);
        out[0]
    };
    let want = again(*row);
    if want.token != token {
        // Sums may round to the other side of a border.
        let near = [-NEAR, NEAR].into_iter().flat_map(|near| [-NEAR, 0.0, NEAR].map(|p| (near, p)));
        let params = |p: f32| SampleParams { top_p: (row.params.top_p + p).clamp(0.0, 1.0), ..row.params };
        let moved =
            |(near, p): (f32, f32)| SampleRow { uniform: (row.uniform + near).max(0.0), params: params(p), ..*row };
        if near.map(moved).any(|row| again(row).token == token) {
            return Ok(());
        }
        let message = format!("is {token}, where the host draws {} from the same logits", want.token);
        return Err(Error::fault(format!("{message} ({:?}, uniform {})", row.params, row.uniform)));
    }
    for (what, got, want) in [
        ("log-probability", got[0], want.logprob),
        ("log-probability among filtered tokens", got[1], want.sample_logprob),
    ] {
        within(|| format!("its {what}"), f64::from((got - want).abs()), AGAIN_APART, "nats")?;
    }
    Ok(())
}

/// How requests are answered.
#[derive(Clone, Debug, PartialEq)]
struct Asked {
    params: SampleParams,
    stop: Stop,
    /// New tokens before which no stop token is drawn.
    least: usize,
}

impl Asked {
    fn plain() -> Self {
        Self { params: SampleParams::plain(1.0), stop: Stop::default(), least: 0 }
    }

    /// As a job asks, of a vocabulary that may be smaller. Texts that end a response are the host's.
    fn by(config: &RolloutConfig, eos_tokens: &[u32], vocabulary: usize) -> Self {
        let mut stop = Stop::new(config, eos_tokens);
        stop.tokens.iter_mut().for_each(|token| *token %= vocabulary as u32);
        stop.strings.clear();
        Self { params: sample_params(config), stop, least: config.response_tokens_min.min(NEW / 2) }
    }
}

/// Of prompts of these lengths, with so many samples each.
fn requests(vocabulary: usize, prompts: impl IntoIterator<Item = (usize, u32)>, asked: &Asked) -> Vec<Request> {
    let stop = Arc::new(asked.stop.clone());
    let of = |(prompt, (len, samples)): (usize, (usize, u32))| {
        let (tokens, stop): (Arc<[u32]>, _) = (tokens(prompt, len, vocabulary).into(), stop.clone());
        (0..samples).map(move |sample| Request {
            prompt,
            prompt_id: prompt as u64,
            sample,
            tokens: tokens.clone(),
            params: asked.params,
            new_tokens_min: asked.least,
            new_tokens_max: NEW,
            stop: stop.clone(),
        })
    };
    prompts.into_iter().enumerate().flat_map(of).collect()
}

fn drawn((transformer, weights): Pair, requests: &[Request], rng: Rng, graphs: bool) -> Result<Vec<Response>> {
    let config = RolloutConfig {
        batch_max: requests.len(),
        prefill_tokens_max: PREFILL,
        kv_bytes_max: ((PAGES + requests.len()) * transformer.kv_page_bytes()) as u64,
        graphs,
        ..RolloutConfig::default()
    };
    let mut hooks = Hooks { stop: &|| false, progress: &mut |_| {}, finished: &mut |_, _| Ok(()) };
    let model = Model { transformer, weights, tokenizer: None };
    let outcome = Engine::new(&config, 0).generate(model, rng, STEP, requests, &mut hooks)?;
    outcome.complete().ok_or_else(|| Error::fault("a response did not end"))
}

/// Prompts and responses in one packed row.
struct Batch {
    ends: Vec<usize>,
    tokens: Vec<u32>,
    /// Of the tokens that were drawn.
    rows: Vec<u32>,
    targets: Vec<u32>,
}

impl Batch {
    fn new(requests: &[Request], responses: &[Response]) -> Self {
        let mut all = Self { ends: vec![0], tokens: Vec::new(), rows: Vec::new(), targets: Vec::new() };
        for (request, response) in requests.iter().zip(responses) {
            let first = all.tokens.len() + request.tokens.len() - 1;
            all.rows.extend((first..first + response.tokens.len()).map(|row| row as u32));
            all.targets.extend(&response.tokens);
            // The last token is fed to nobody.
            let fed = request.tokens.iter().chain(&response.tokens[..response.tokens.len() - 1]);
            all.tokens.extend(fed);
            all.ends.push(all.tokens.len());
        }
        all
    }

    fn hidden(&self, (model, w): Pair) -> Tensor {
        let keys = Keys::Packed { cu_seqlens: &self.ends };
        model.forward(w, &self.tokens, &packed_positions(&self.ends), keys, None)
    }

    fn logprobs(&self, (model, w): Pair) -> Vec<f32> {
        model.logprobs(w, &self.hidden((model, w)), &self.rows, &self.targets, 1.0, false).0
    }

    /// The probabilities of all tokens where each was drawn.
    fn distributions(&self, (model, w): Pair) -> Vec<Vec<f64>> {
        let logits = model.logits(w, &self.hidden((model, w)), &self.rows);
        let logits_of = logits.to_host();
        let of = |row: &[f32]| {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let each: Vec<f64> = row.iter().map(|x| f64::from(x - most).exp()).collect();
            let sum: f64 = each.iter().sum();
            each.into_iter().map(|e| e / sum).collect()
        };
        logits_of.chunks(logits.width()).map(of).collect()
    }
}
