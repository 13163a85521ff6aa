//! Properties of advantages.

use rlhf_hpc::advantage::{self, AdvantageState, gae::gae, scores::RunningMoments, whitening};
use rlhf_hpc::config::method::ppo::{Estimator, KlEstimator, KlIn, PpoConfig, Truncation};
use rlhf_hpc::experience::{Experience, Finish, Greedy, Prompt, Response};
use rlhf_hpc::rng::{Purpose, Rng};
use std::collections::BTreeMap;

/// Seeded samples of 1 to 9 tokens: `prompts` prompts, `per_prompt` samples each.
fn batch(prompts: usize, per_prompt: usize) -> Vec<Experience> {
    let rng = Rng::new(5, Purpose::Sample);
    let mut samples = Vec::new();
    for i in 0..prompts * per_prompt {
        let n = 1 + rng.below(9, [0, i as u32, 0, 0]) as usize;
        let row = |stream: u32, shift: f32| -> Vec<f32> {
            (0..n).map(|t| shift + 0.3 * rng.normal_pair([stream, i as u32, t as u32, 0])[0]).collect()
        };
        let response = Response {
            prompt: i / per_prompt,
            sample: (i % per_prompt) as u32,
            tokens: vec![1; n],
            logprobs: row(1, -2.0),
            ..Response::default()
        };
        samples.push(Experience {
            prompt: Prompt { id: (i / per_prompt) as u64, ..Prompt::default() },
            response,
            score: rng.normal_pair([4, i as u32, 0, 0])[0],
            ref_logprobs: row(2, -2.0),
            values: row(3, 0.0),
            mask: vec![1; n],
            ..Experience::default()
        });
    }
    samples
}

#[track_caller]
fn near(got: f32, want: f64) {
    assert!((f64::from(got) - want).abs() < 1e-5, "got {got}, needed {want}");
}

#[test]
fn environment_tokens_are_skipped() {
    let (rewards, values) = ([0.5, 9.0, 9.0, -0.25, 1.0], [0.1, 7.0, 7.0, 0.2, 0.3]);
    let (advantages, returns) = gae(0.9, 0.8, &rewards, &values, 0.0, &[1, 0, 0, 1, 1]);
    let (short, short_returns) = gae(0.9, 0.8, &[0.5, -0.25, 1.0], &[0.1, 0.2, 0.3], 0.0, &[1, 1, 1]);
    assert_eq!(advantages, [short[0], 0.0, 0.0, short[1], short[2]]);
    assert_eq!(returns, [short_returns[0], 0.0, 0.0, short_returns[1], short_returns[2]]);
}

#[test]
fn only_responses_cut_by_length_are_bootstrapped() {
    let run = |truncation, finish| {
        let config = PpoConfig { truncation, gamma: 0.9, kl_in: KlIn::None, ..PpoConfig::default() };
        let mut samples = batch(2, 1);
        for sample in &mut samples {
            (sample.response.finish, sample.last_value) = (finish, 2.0);
        }
        super::compute(&config, 0.0, &mut samples).unwrap();
        *samples[0].returns.last().unwrap()
    };
    let ended = run(Truncation::Bootstrap, Finish::Stop);
    assert_eq!(ended, run(Truncation::Zero, Finish::Stop));
    assert_eq!(ended, run(Truncation::Zero, Finish::Length));
    assert_eq!(ended, run(Truncation::Bootstrap, Finish::StopString));
    near(run(Truncation::Bootstrap, Finish::Length), f64::from(ended) + 0.9 * 2.0);
}

#[test]
fn equal_scores_give_zero_advantages_and_whiten_to_zero_not_to_infinity() {
    use Estimator::{DrGrpo, Grpo, ReinforcePp, ReinforcePpBaseline, Rloo};
    for advantage in [Rloo, Grpo, DrGrpo, ReinforcePp, ReinforcePpBaseline] {
        let config = PpoConfig { advantage, kl_in: KlIn::None, ..PpoConfig::default() };
        let mut samples = batch(3, 4);
        for sample in &mut samples {
            sample.score = 0.7;
        }
        super::compute(&config, 0.0, &mut samples).unwrap();
        assert!(samples.iter().all(|s| s.advantages.iter().all(|a| a.abs() < 1e-6)), "{advantage:?}");
    }
}

#[test]
fn kl_in_the_loss_or_nowhere_does_not_change_rewards() {
    for kl_in in [KlIn::Loss, KlIn::None] {
        let config = PpoConfig { kl_in, kl_estimator: KlEstimator::K3, ..PpoConfig::default() };
        let mut samples = batch(2, 1);
        let stats = super::compute(&config, 0.5, &mut samples).unwrap();
        assert!(stats.kl_mean > 0.0);
        for sample in &samples {
            let sum: f32 = sample.rewards.iter().sum();
            assert_eq!(sum, sample.score);
        }
    }
}

#[test]
fn gdpo_scales_each_reward_by_itself_before_it_adds_them_up() {
    let config = PpoConfig {
        advantage: Estimator::Gdpo,
        kl_in: KlIn::None,
        advantage_std: false,
        overlong_buffer_tokens: 4,
        overlong_tokens_max: 8,
        ..PpoConfig::default()
    };
    let weights = BTreeMap::from([("right".to_string(), 1.0), ("form".to_string(), 0.5)]);
    let mut samples = batch(2, 4);
    for (i, sample) in samples.iter_mut().enumerate() {
        let (right, form) = ((i % 3) as f32, 100.0 * (i % 2) as f32);
        sample.scores.insert("right".to_string(), right);
        // One sample of the second group is not scored by the second reward.
        if i != 5 {
            sample.scores.insert("form".to_string(), form);
        }
        sample.score = right + 0.5 * sample.scores.get("form").copied().unwrap_or(0.0);
    }
    advantage::compute_step(&config, &weights, &mut AdvantageState::new(&config), &mut samples).unwrap();
    let scaled = |of: &dyn Fn(&Experience) -> Option<f64>, group: &[Experience], own: &Experience| {
        let known: Vec<f64> = group.iter().filter_map(of).collect();
        let mean = known.iter().sum::<f64>() / known.len() as f64;
        let variance = known.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (known.len() - 1) as f64;
        of(own).map_or(0.0, |own| (own - mean) / (variance.sqrt() + 1e-9))
    };
    let of = |name: &'static str| move |sample: &Experience| sample.scores.get(name).map(|score| f64::from(*score));
    let penalty = |sample: &Experience| Some(-(sample.response.tokens.len().saturating_sub(4).min(4) as f64) / 4.0);
    let shaped: Vec<f64> = samples
        .chunks(4)
        .flat_map(|group| {
            let sum = |own| {
                scaled(&of("right"), group, own) + 0.5 * scaled(&of("form"), group, own) + scaled(&penalty, group, own)
            };
            group.iter().map(sum).collect::<Vec<_>>()
        })
        .collect();
    let lengths = samples.iter().map(|sample| sample.mask.iter().filter(|m| **m != 0).count() as f64);
    let tokens: f64 = lengths.clone().sum();
    let mean = shaped.iter().zip(lengths).map(|(score, length)| score * length).sum::<f64>() / tokens;
    for (sample, score) in samples.iter().zip(&shaped) {
        let learned = sample.advantages.iter().zip(&sample.mask).filter(|(_, m)| **m != 0);
        assert!(learned.clone().all(|(a, _)| (f64::from(*a) - (score - mean)).abs() < 1e-5), "{sample:?}, {score}");
    }
}

#[test]
fn remax_subtracts_the_greedy_score_shaped_like_the_samples() {
    let config = PpoConfig {
        advantage: Estimator::Remax,
        kl_in: KlIn::None,
        overlong_buffer_tokens: 4,
        overlong_tokens_max: 8,
        truncated_score_coef: 0.5,
        ..PpoConfig::default()
    };
    let mut samples = batch(3, 2);
    for sample in &mut samples {
        let greedy = Greedy { score: 0.25 * sample.prompt.id as f32, tokens: 6, finish: Finish::Length };
        (sample.score, sample.greedy) = (2.0, Some(greedy));
    }
    let stats = super::compute(&config, 0.0, &mut samples).unwrap();
    assert_eq!(stats.greedy_mean, Some(0.25));
    for sample in &samples {
        let over = sample.response.tokens.len().saturating_sub(4).min(4) as f32 / 4.0;
        let wanted = 2.0 - over - 0.5 * (0.25 * sample.prompt.id as f32 - 0.5);
        assert!(sample.advantages.iter().all(|a| (a - wanted).abs() < 1e-6), "{:?}, {wanted}", sample.advantages);
    }
    samples[3].greedy = None;
    assert!(super::compute(&config, 0.0, &mut samples).unwrap_err().message.contains("no greedy response"));
}

#[test]
fn shaped_scores_are_clipped() {
    let config =
        PpoConfig { advantage: Estimator::DrGrpo, kl_in: KlIn::None, reward_clip: [-1.0, 1.0], ..PpoConfig::default() };
    let mut samples = batch(1, 4);
    for (sample, score) in samples.iter_mut().zip([100.0, 100.5, 99.5, 104.0]) {
        sample.score = score;
    }
    // Mean 101: the clip acts on -1, -0.5, -1.5 and 3, not on raw scores around 100.
    let stats = super::compute(&config, 0.0, &mut samples).unwrap();
    let got: Vec<f32> = samples.iter().map(|s| s.advantages[0]).collect();
    assert_eq!(got, [-1.0, -0.5, -1.0, 1.0]);
    assert_eq!(stats.score_mean, 101.0);
}

#[test]
fn running_moments_equal_the_moments_of_all_scores_so_far() {
    let scores: Vec<f64> = (0..40).map(|i| f64::from(i * i % 17) * 0.3 - 2.0).collect();
    let mut running = RunningMoments::default();
    for cut in [&scores[..3], &scores[3..4], &scores[4..40]] {
        running.normalize(cut);
    }
    let (mean, std) = whitening::moments(scores.iter().copied());
    assert!((running.mean - mean).abs() < 1e-12);
    assert!(((running.deviation / 40.0).sqrt() - std).abs() < 1e-12);
    let last = running.clone().normalize(&[]);
    assert!(last.is_empty());
}

#[test]
fn state_survives_serde_and_later_steps_are_bitwise_equal() {
    let config = PpoConfig { reward_normalize: true, kl_target: 0.05, kl_horizon: 40.0, ..PpoConfig::default() };
    let mut state = AdvantageState::new(&config);
    let first = state.kl.beta;
    advantage::compute_step(&config, &BTreeMap::new(), &mut state, &mut batch(4, 2)).unwrap();
    assert_ne!(state.kl.beta, first);
    let mut restored: AdvantageState = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
    assert_eq!(restored, state);
    let (mut a, mut b) = (batch(3, 2), batch(3, 2));
    let stats = advantage::compute_step(&config, &BTreeMap::new(), &mut state, &mut a).unwrap();
    assert_eq!(advantage::compute_step(&config, &BTreeMap::new(), &mut restored, &mut b).unwrap(), stats);
    assert_eq!((a, state), (b, restored));
}

#[test]
fn numbers_that_are_not_finite_are_named() {
    let config = PpoConfig::default();
    let mut samples = batch(2, 1);
    samples[1].score = f32::NAN;
    let error = super::compute(&config, 0.0, &mut samples).unwrap_err();
    assert!(
        error.message.contains("sample 1") && error.message.contains("the score must be finite (got NaN)"),
        "{error}"
    );
}
