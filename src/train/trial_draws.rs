//! What a small model draws on a GPU, from the cache, held to what the CPU computes of the same tokens.

use super::trial::{Pair, tokens, within};
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::experience::Response;
use crate::model::{Keys, packed_positions};
use crate::ops::sample::SampleParams;
use crate::rng::{Purpose, Rng};
use crate::rollout::{Engine, Hooks, Model, Request, Stop};
use crate::tensor::Tensor;
use std::sync::Arc;

/// Nats that a log-probability may be apart.
pub const NATS_APART: f64 = 0.08;
/// How far a draw may lie outside of its token's share of the CPU's distribution.
const BORDER: f64 = 0.02;
const SEED: u64 = 17;
const STEP: u32 = 1;
/// Tokens of the prompts, of which one is longer than a page and than what is read at a time; samples of each; new tokens.
const PROMPTS: [usize; 2] = [70, 21];
const SAMPLES: u32 = 2;
const NEW: usize = 6;
const PREFILL: usize = 80;
const PAGES: u64 = 24;

/// Samples, and looks at every draw. `is_exact`: what is recorded has the bits of a training forward.
///
/// # Errors
/// `Fault`, naming what differs.
pub fn compare(gpu: Pair, cpu: Pair, graphs: bool, is_exact: bool) -> Result<()> {
    let (requests, rng) = (requests(gpu.0.arch.vocabulary), Rng::new(SEED, Purpose::Sample));
    let responses = drawn(gpu, &requests, rng, graphs)?;
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

fn requests(vocabulary: usize) -> Vec<Request> {
    let stop = Arc::new(Stop::default());
    let of = |prompt: usize, len: usize| {
        let (tokens, stop): (Arc<[u32]>, _) = (tokens(prompt, len, vocabulary).into(), stop.clone());
        (0..SAMPLES).map(move |sample| Request {
            prompt,
            prompt_id: prompt as u64,
            sample,
            tokens: tokens.clone(),
            params: SampleParams::plain(1.0),
            new_tokens_min: 0,
            new_tokens_max: NEW,
            stop: stop.clone(),
        })
    };
    PROMPTS.iter().enumerate().flat_map(|(prompt, len)| of(prompt, *len)).collect()
}

fn drawn((transformer, weights): Pair, requests: &[Request], rng: Rng, graphs: bool) -> Result<Vec<Response>> {
    let config = RolloutConfig {
        batch_max: requests.len(),
        prefill_tokens_max: PREFILL,
        kv_bytes_max: PAGES * transformer.kv_page_bytes() as u64,
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
        let of = |row: &[f32]| {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let each: Vec<f64> = row.iter().map(|x| f64::from(x - most).exp()).collect();
            let sum: f64 = each.iter().sum();
            each.into_iter().map(|e| e / sum).collect()
        };
        logits.data().chunks(logits.width()).map(of).collect()
    }
}
