//! Advantages from scores: KL, length penalties, group shaping, returns, whitening.
//!
//! Everything here runs over the whole batch in its global order with f64 sums. So the results depend neither on the
//! number of ranks nor on the rank that computes them.

pub mod details;
pub mod gae;
pub mod group;
pub mod kl;
pub mod scores;
pub mod whitening;

use details::{Details, Whitening};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use crate::config::method::ppo::{Estimator, KlIn, PpoConfig, Truncation};
use crate::error::{Error, Result};
use crate::experience::{Experience, Finish, Response};

/// The results of one batch. Means over tokens are over tokens with mask 1. Deviations are population deviations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdvantageStats {
    /// The mean of the scores that the reward functions returned.
    pub score_mean: f64,
    /// Mean of the scores after running normalization and length penalties, before group shaping, clipping and KL.
    pub reward_mean: f64,
    pub reward_std: f64,
    /// Mean over samples of the greedy response's score. `None` if the estimator needs no greedy response.
    pub greedy_mean: Option<f64>,
    /// Share of samples whose shaped score the clip has changed.
    pub clipped_ratio: f64,
    /// Share of prompts with several samples whose scores are all equal. `None` if each prompt has one sample.
    pub equal_groups_ratio: Option<f64>,
    /// Mean KL per token against the reference, by the configured estimator.
    pub kl_mean: f64,
    /// Mean sum of a sample's per-token rewards: shaped, clipped, with KL if it is in the reward.
    pub return_mean: f64,
    /// Mean of the advantages before whitening.
    pub advantage_mean: f64,
    pub advantage_std: f64,
}

/// The state of advantages from step to step; part of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdvantageState {
    pub kl: kl::KlController,
    pub scores: scores::RunningMoments,
}

impl AdvantageState {
    pub fn new(config: &PpoConfig) -> Self {
        Self { kl: kl::KlController::new(config), scores: scores::RunningMoments::default() }
    }
}

/// Computes one step: fills `kl`, `rewards`, `advantages` and `returns` of every sample from its `score`,
/// `response.logprobs`, `ref_logprobs`, `values` and `mask`. Scores are normalized if configured. The penalty is the
/// controller's beta before the call, `state.kl.beta`. The measured KL then adjusts it for the next step. `samples` is
/// the whole batch in global order, in which samples of a prompt (equal `response.prompt`) are consecutive. For gdpo,
/// `weights` are those of the rewards in `Experience::scores`. A missing weight is 1.
///
/// An empty `ref_logprobs` means no reference: KL 0. `returns` are the targets of the critic (gae), otherwise the
/// reverse cumulative sum of the rewards before whitening. If mask is 0, rewards, advantages and returns are 0. A
/// sample with no learned token still counts in its group's mean. With `mask_truncated`, these are also the samples that
/// were cut by length.
///
/// # Errors
/// `Fault` if a number is not finite.
///
/// # Panics
/// If lengths differ, or a grouped estimator gets a prompt with one sample.
pub fn compute_step(
    config: &PpoConfig,
    weights: &BTreeMap<String, f32>,
    state: &mut AdvantageState,
    samples: &mut [Experience],
) -> Result<AdvantageStats> {
    let details = Details::default();
    let mut stats = compute_rewards(config, &details, weights, state, samples)?;
    (stats.advantage_mean, stats.advantage_std) = compute_advantages(config, &details, samples);
    state.kl.update(stats.kl_mean, samples.len());
    Ok(stats)
}

/// The first half of `compute_step`: fills `kl` and `rewards`.
///
/// # Errors
/// `Fault` if a number is not finite.
///
/// # Panics
/// If lengths differ, or a grouped estimator gets a prompt with one sample.
pub fn compute_rewards(
    config: &PpoConfig,
    details: &Details,
    weights: &BTreeMap<String, f32>,
    state: &mut AdvantageState,
    samples: &mut [Experience],
) -> Result<AdvantageStats> {
    check(config, samples)?;
    if config.mask_truncated {
        scores::mask_truncated(samples);
    }
    let raw: Vec<f64> = samples.iter().map(|s| f64::from(s.score)).collect();
    let (score_mean, _) = whitening::moments(raw.iter().copied());
    let shape = |mut scores: Vec<f64>, samples: &[Experience]| {
        scores::penalize_overlong(config, &mut scores, samples);
        scores::shape_truncated(config, &mut scores, samples);
        scores
    };
    let mut scores = shape(if config.reward_normalize { state.scores.normalize(&raw) } else { raw }, samples);
    let (reward_mean, reward_std) = whitening::moments(scores.iter().copied());
    let equal_groups_ratio = group::equal_ratio(&scores, samples);
    if config.advantage.is_grouped() {
        group::shape(config.advantage, details, weights, &mut scores, samples);
    }
    if config.advantage == Estimator::FlashReinforce {
        scores = scores.into_iter().map(|score| score - reward_mean).collect();
    }
    let mut greedy_mean = None;
    if config.advantage.has_greedy() {
        let greedy = greedy_responses(samples)?;
        let raw: Vec<f64> = greedy.iter().map(|response| f64::from(response.score)).collect();
        greedy_mean = Some(whitening::moments(raw.iter().copied()).0);
        let baselines = shape(if config.reward_normalize { state.scores.scale(&raw) } else { raw }, &greedy);
        scores.iter_mut().zip(baselines).for_each(|(score, baseline)| *score -= baseline);
    }
    let [low, high] = config.reward_clip.map(f64::from);
    let clipped = scores.iter().filter(|score| **score < low || **score > high).count();
    let clipped_ratio = clipped as f64 / samples.len().max(1) as f64;
    let beta = if config.kl_in == KlIn::Reward { f64::from(state.kl.beta) } else { 0.0 };
    for (sample, score) in samples.iter_mut().zip(scores) {
        kl::fill(config.kl_estimator, sample);
        scores::place(beta, score.clamp(low, high), sample);
    }
    let kl_mean = whitening::moments(learned(samples, |s| &s.kl)).0;
    let return_mean = learned(samples, |s| &s.rewards).sum::<f64>() / samples.len().max(1) as f64;
    Ok(AdvantageStats {
        score_mean,
        reward_mean,
        reward_std,
        greedy_mean,
        clipped_ratio,
        equal_groups_ratio,
        kl_mean,
        return_mean,
        ..AdvantageStats::default()
    })
}

/// The second half of `compute_step`: fills `advantages` and `returns` from `rewards` and `values`. Returns the mean and
/// the deviation of the advantages before whitening.
pub fn compute_advantages(config: &PpoConfig, details: &Details, samples: &mut [Experience]) -> (f64, f64) {
    for sample in &mut *samples {
        estimate(config, sample);
    }
    let (mean, std) = whitening::moments(learned(samples, |s| &s.advantages));
    let is_whitened = match details.whitening {
        Whitening::ByEstimator => config.advantage.is_whitened(),
        Whitening::None => false,
        Whitening::Population | Whitening::Sample => true,
    };
    if is_whitened {
        let is_sample = details.whitening == Whitening::Sample;
        let std_in_force = if is_sample { unbiased(std, learned(samples, |s| &s.advantages).count()) } else { std };
        whitening::whiten(config.advantage_std, mean, std_in_force, samples);
    }
    (mean, std)
}

/// The unbiased standard deviation of `n` numbers with this population deviation.
fn unbiased(std: f64, n: usize) -> f64 {
    std * (n as f64 / (n as f64 - 1.0).max(1.0)).sqrt()
}

/// The greedy response to each sample's prompt, with the fields that shape its score.
fn greedy_responses(samples: &[Experience]) -> Result<Vec<Experience>> {
    let of = |sample: &Experience| {
        let id = sample.prompt.id;
        let greedy = sample.greedy.ok_or_else(|| Error::fault(format!("prompt {id} has no greedy response")))?;
        let response = Response { tokens: vec![0; greedy.tokens], finish: greedy.finish, ..Response::default() };
        Ok(Experience { response, score: greedy.score, ..Experience::default() })
    };
    samples.iter().map(of).collect()
}

/// Computes advantages and returns of one sample from its rewards, before whitening. Without a critic, values are 0 and
/// lambda is 1, so both are the discounted sum of the rewards from a token on.
fn estimate(config: &PpoConfig, sample: &mut Experience) {
    let zeros = vec![0.0; sample.mask.len()];
    let tokens = sample.mask.iter().filter(|mask| **mask != 0).count();
    let (gamma, [policy, critic], values) = match config.advantage {
        Estimator::Gae => (f64::from(config.gamma), config.lambdas(tokens), &sample.values),
        Estimator::ReinforcePp => (f64::from(config.gamma), [1.0; 2], &zeros),
        _ => (1.0, [1.0; 2], &zeros),
    };
    let bootstraps = config.advantage.has_critic() && config.truncation == Truncation::Bootstrap;
    let is_cut = sample.response.finish == Finish::Length;
    let last = if bootstraps && is_cut { sample.last_value } else { 0.0 };
    let with = |lambda| gae::gae(gamma, lambda, &sample.rewards, values, last, &sample.mask);
    let (advantages, mut returns) = with(policy);
    // The critic's targets have a lambda of their own (arXiv:2504.05118).
    if critic != policy {
        returns = with(critic).1;
    }
    (sample.advantages, sample.returns) = (advantages, returns);
}

/// The values of `pick` for all learned tokens.
fn learned(samples: &[Experience], pick: fn(&Experience) -> &[f32]) -> impl Iterator<Item = f64> + Clone {
    let of = move |sample| {
        let tokens = pick(sample).iter().zip(&sample.mask);
        tokens.filter(|(_, mask)| **mask != 0).map(|(x, _)| f64::from(*x))
    };
    samples.iter().flat_map(of)
}

fn check(config: &PpoConfig, samples: &[Experience]) -> Result<()> {
    for (i, sample) in samples.iter().enumerate() {
        let Experience { response: r, mask, values, ref_logprobs, .. } = sample;
        let n = r.tokens.len();
        let has_values = !config.advantage.has_critic() || values.len() == n;
        assert!(r.logprobs.len() == n && mask.len() == n && has_values, "a number for each token of sample {i}");
        assert!(
            ref_logprobs.is_empty() || ref_logprobs.len() == n,
            "a number of the reference for each token of sample {i}"
        );
        let numbers: [(&str, &[f32]); 5] = [
            ("the actor's log-probability", &r.logprobs),
            ("the reference's log-probability", ref_logprobs),
            ("the critic's value", values),
            ("the critic's value after the last token", std::slice::from_ref(&sample.last_value)),
            ("the score", std::slice::from_ref(&sample.score)),
        ];
        let found = numbers.iter().find_map(|(what, xs)| Some((what, xs, xs.iter().position(|x| !x.is_finite())?)));
        if let Some((what, xs, at)) = found {
            let index = format!("sample {i} (prompt {}, sample {})", sample.prompt.id, r.sample);
            let token = if xs.len() == n { format!(" of response token {at}") } else { String::new() };
            return Err(Error::fault(format!("{index}: {what}{token} must be finite (got {})", xs[at])));
        }
    }
    Ok(())
}
