//! Methods with one sample per prompt, against torch's numbers (tests/golden/single_rollout.py).

use rlhf_hpc::config::method::ppo::{Estimator, KlIn, PpoConfig};
use rlhf_hpc::experience::{Experience, Finish, Prompt, Response};
use rlhf_hpc::loss::aggregation::{Totals, weights};
use rlhf_hpc::loss::policy::{PolicyTokens, policy_loss};
use serde_json::{Map, Value};

fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/single_rollout.json")).expect("JSON")
}

fn list(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

fn single(value: &Value) -> Vec<f32> {
    list(value).into_iter().map(|x| x as f32).collect()
}

fn mask(value: &Value) -> Vec<u8> {
    value.as_array().expect("a list").iter().map(|x| u8::from(x == true)).collect()
}

/// The defaults of `[ppo]` with those of the keys in `given` that they have.
fn with(given: &Value) -> PpoConfig {
    let mut all = serde_json::to_value(PpoConfig::default()).expect("JSON");
    let keys: &mut Map<String, Value> = all.as_object_mut().expect("a table");
    for (key, value) in given.as_object().expect("a table") {
        keys.get_mut(key).into_iter().for_each(|known| known.clone_from(value));
    }
    serde_json::from_value(all).expect("keys of ppo")
}

#[track_caller]
fn near(got: f64, want: f64, within: f64, what: &str) {
    assert!((got - want).abs() <= within * want.abs().max(1e-3), "{what}: {got}, torch has {want}");
}

#[test]
fn masked_ratios_and_trusted_sequences_have_the_losses_and_derivatives_of_torch() {
    let golden = golden();
    let sequences = golden["sequences"].as_array().expect("a list");
    let masks: Vec<Vec<u8>> = sequences.iter().map(|s| mask(&s["mask"])).collect();
    let mut totals = Totals::default();
    for mask in &masks {
        totals.add_mask(mask);
    }
    for case in golden["losses"].as_array().expect("a list") {
        let config = with(case);
        let (mut loss, mut left_out) = (0.0, 0);
        for ((s, mask), wanted) in sequences.iter().zip(&masks).zip(case["derivatives"].as_array().expect("a list")) {
            let mut of = Vec::new();
            weights(config.aggregation_in_force(), mask, totals, 64, &mut of);
            let [logprobs, old, advantages] = ["logprobs", "old", "advantages"].map(|key| single(&s[key]));
            let tokens = PolicyTokens {
                logprobs: &logprobs,
                old_logprobs: &old,
                advantages: &advantages,
                weights: &of,
                ..PolicyTokens::default()
            };
            let mut slopes = vec![f32::NAN; logprobs.len()];
            let sums = policy_loss(&config, 0.0, &tokens, &mut slopes, &mut []);
            (loss, left_out) = (loss + sums.loss, left_out + sums.clipped);
            for (t, (got, want)) in slopes.iter().zip(list(wanted)).enumerate() {
                near(f64::from(*got), want, 1e-6, &format!("{:?}, derivative {t}", config.loss));
            }
        }
        near(loss, case["value"].as_f64().expect("a number"), 1e-6, "the loss");
        assert_eq!(Some(left_out), case["left_out"].as_u64(), "{:?}", config.loss);
    }
}

/// A response with a score, and a number for each of its tokens.
fn sample(i: u64, score: f32, values: Vec<f32>, mask: Vec<u8>) -> Experience {
    let n = mask.len();
    let response = Response { prompt: i as usize, tokens: vec![1; n], logprobs: vec![-1.0; n], ..Response::default() };
    Experience { prompt: Prompt { id: i, ..Prompt::default() }, response, score, values, mask, ..Experience::default() }
}

#[test]
fn the_policys_lambda_grows_with_the_learned_tokens_and_the_critic_has_its_own() {
    let golden = golden();
    let masks = golden["sequences"].as_array().expect("a list").iter().map(|s| mask(&s["mask"]));
    let masks: Vec<Vec<u8>> = masks.collect();
    for case in golden["gae"].as_array().expect("a list") {
        // Whitening is linear, so it is undone with the measured moments.
        let config = PpoConfig { kl_in: KlIn::None, ..with(case) };
        let wanted = case["samples"].as_array().expect("a list");
        let of = |(i, (s, mask)): (usize, (&Value, &Vec<u8>))| {
            sample(i as u64, s["score"].as_f64().expect("a number") as f32, single(&s["values"]), mask.clone())
        };
        let mut samples: Vec<Experience> = wanted.iter().zip(&masks).enumerate().map(of).collect();
        let stats = super::compute(&config, 0.0, &mut samples).expect("finite");
        for (s, wanted) in samples.iter().zip(wanted) {
            for (got, want) in s.advantages.iter().zip(list(&wanted["advantages"])) {
                let raw = if want == 0.0 { 0.0 } else { f64::from(*got) * stats.advantage_std + stats.advantage_mean };
                near(raw, want, 1e-5, "an advantage");
            }
            for (got, want) in s.returns.iter().zip(list(&wanted["returns"])) {
                near(f64::from(*got), want, 1e-5, "a return");
            }
        }
    }
    let fixed = PpoConfig { lambda: 0.9, ..PpoConfig::default() };
    assert_eq!(fixed.lambdas(7), [f64::from(0.9f32); 2]);
    assert_eq!(PpoConfig { lambda_alpha: 0.05, ..fixed }.lambdas(3)[0], 0.0, "not below 0");
}

#[test]
fn flash_reinforce_subtracts_the_mean_score_of_the_batch() {
    let config =
        PpoConfig { advantage: Estimator::FlashReinforce, kl_in: KlIn::None, gamma: 0.5, ..PpoConfig::default() };
    let scores = [1.0f32, 0.0, 0.0, 0.5, 1.0];
    let of = |(i, score): (usize, &f32)| sample(i as u64, *score, Vec::new(), vec![1; 1 + i]);
    let mut samples: Vec<Experience> = scores.iter().enumerate().map(of).collect();
    super::compute(&config, 0.0, &mut samples).expect("finite");
    for (sample, score) in samples.iter().zip(scores) {
        assert!(sample.advantages.iter().all(|a| (a - (score - 0.5)).abs() < 1e-7), "{:?}", sample.advantages);
    }
}

#[test]
fn responses_cut_by_length_give_no_loss_and_still_count_in_the_baseline() {
    let config =
        PpoConfig { advantage: Estimator::DrGrpo, kl_in: KlIn::None, mask_truncated: true, ..PpoConfig::default() };
    let cut = |i: usize| Experience {
        response: Response {
            prompt: 0,
            sample: i as u32,
            tokens: vec![1; 4],
            logprobs: vec![-1.0; 4],
            finish: [Finish::Length, Finish::Stop, Finish::StopString][i],
            ..Response::default()
        },
        score: [3.0, 0.0, 0.0][i],
        mask: vec![1, 0, 1, 1],
        ..Experience::default()
    };
    let mut samples: Vec<Experience> = (0..3).map(cut).collect();
    super::compute(&config, 0.0, &mut samples).expect("finite");
    assert_eq!((&samples[0].mask, &samples[0].advantages), (&vec![0; 4], &vec![0.0; 4]));
    for sample in &samples[1..] {
        assert_eq!((&sample.mask, &sample.advantages), (&vec![1, 0, 1, 1], &vec![-1.0, 0.0, -1.0, -1.0]));
    }
    for sample in &mut samples {
        sample.response.finish = Finish::Length;
    }
    let stats = super::compute(&config, 0.0, &mut samples).expect("finite");
    assert!((stats.kl_mean, stats.advantage_std) == (0.0, 0.0), "no token is left: {stats:?}");
}

#[test]
fn the_score_is_placed_on_the_last_token_that_the_model_wrote() {
    let config = PpoConfig { kl_in: KlIn::None, ..PpoConfig::default() };
    // An environment wrote the last two tokens.
    let mut samples = [sample(0, 2.0, vec![0.0; 5], vec![1, 0, 1, 0, 0])];
    super::compute(&config, 0.0, &mut samples).expect("finite");
    assert_eq!(samples[0].rewards, [0.0, 0.0, 2.0, 0.0, 0.0]);
}
