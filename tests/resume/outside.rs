//! The records of a run suffice to recompute its numbers from their definitions.

use crate::resume::arrays::Arrays;
use crate::resume::job::Job;

const GAMMA: f64 = 0.95;
const LAMBDA: f64 = 0.9;
const BETA: f64 = 0.05;

fn near(a: f64, b: f64, what: &str) {
    assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{what}: {a} against {b}");
}

/// The response tokens of each sample.
fn responses(step: &Arrays) -> Vec<std::ops::Range<usize>> {
    step["response_offsets"].windows(2).map(|w| w[0] as usize..w[1] as usize).collect()
}

#[test]
fn recorded_arrays_suffice_to_recompute_advantages_and_losses() {
    let sets = format!(
        "job.steps=2 ppo.gamma={GAMMA} ppo.lambda={LAMBDA} ppo.kl_coef={BETA} ppo.aggregation=sequence ppo.epochs=1 \
         ppo.minibatch_samples=16"
    );
    let job = Job::ppo("outside").with(&sets).done();
    for (name, line) in ["step_000001", "step_000002"].iter().zip(job.metrics()) {
        let step = &job.rollouts()[*name];
        check_responses(step);
        let advantages = check_advantages(step);
        let metric = |key: &str| line[key].as_f64().expect("a number");
        // One minibatch: every ratio is 1, so the loss of a token is -A, and values are those at rollout.
        let (mut policy, mut value, mut tokens) = (0.0, 0.0, 0.0);
        let all = responses(step);
        for range in &all {
            let n = range.len() as f64;
            policy -= range.clone().map(|t| advantages[t]).sum::<f64>() / n / all.len() as f64;
            for t in range.clone() {
                value += 0.5 * (step["values"][t] - step["returns"][t]).powi(2);
                tokens += 1.0;
            }
        }
        near(metric("policy_loss"), policy, "policy_loss");
        near(metric("value_loss"), value / tokens, "value_loss");
        let kl = step["kl"].iter().sum::<f64>() / tokens;
        near(metric("kl_mean"), kl, "kl_mean");
        near(metric("response_tokens_mean"), tokens / all.len() as f64, "response_tokens_mean");
        let score = step["score"].iter().sum::<f64>() / all.len() as f64;
        near(metric("score_mean"), score, "score_mean");
    }
}

/// Prompts and responses as they were sampled.
fn check_responses(step: &Arrays) {
    let index = |name: &str, i: usize| step[name][i] as usize;
    for (i, range) in responses(step).iter().enumerate() {
        let end = index("token_offsets", i + 1);
        assert_eq!(end - index("token_offsets", i) - index("prompt_tokens", i), range.len());
        assert_eq!(index("sample", i), i % 2);
        assert_eq!(index("prompt_id", i), index("prompt_id", i / 2 * 2));
        let last = index("tokens", end - 1);
        match index("finish", i) {
            0 => assert!(last <= 1 || (40..60).contains(&last), "token {last} does not stop"),
            1 => assert_eq!(range.len(), 12),
            other => panic!("finish {other}"),
        }
    }
}

/// Rewards, returns and whitened advantages from logprobs, ref_logprobs, values, score and mask.
fn check_advantages(step: &Arrays) -> Vec<f64> {
    let get = |name: &str, t: usize| step[name][t];
    let mut raw = vec![0.0; step["advantages"].len()];
    for (sample, range) in responses(step).into_iter().enumerate() {
        let (mut next_value, mut advantage) = (0.0, 0.0);
        for t in range.clone().rev() {
            assert_eq!(get("mask", t), 1.0);
            let kl = get("logprobs", t) - get("ref_logprobs", t);
            near(get("kl", t), kl, "kl");
            let score = if t + 1 == range.end { get("score", sample) } else { 0.0 };
            near(get("rewards", t), score - BETA * kl, "rewards");
            let delta = score - BETA * kl + GAMMA * next_value - get("values", t);
            advantage = delta + GAMMA * LAMBDA * advantage;
            next_value = get("values", t);
            near(get("returns", t), advantage + get("values", t), "returns");
            raw[t] = advantage;
        }
    }
    let n = raw.len() as f64;
    let mean = raw.iter().sum::<f64>() / n;
    let std = (raw.iter().map(|a| (a - mean).powi(2)).sum::<f64>() / n).sqrt();
    let whitened: Vec<f64> = raw.iter().map(|a| (a - mean) / std).collect();
    whitened.iter().enumerate().for_each(|(t, a)| near(get("advantages", t), *a, "advantages"));
    whitened
}

#[test]
fn every_row_is_in_the_ledger_of_a_run() {
    let job = Job::ppo("ledger").with("job.steps=3 checkpoint.every_steps=0").done();
    let ledger: serde_json::Value = serde_json::from_slice(&job.read("ledger.json")).expect("JSON");
    let count = |key: &str| ledger[key].as_u64().expect("a count");
    let filtered: u64 =
        ledger["filtered"].as_object().expect("by rule").values().filter_map(serde_json::Value::as_u64).sum();
    assert_eq!((count("rows"), count("trained"), count("held_out"), filtered), (128, 24, 8, 0), "{ledger}");
    assert_eq!((count("deferred"), count("handed_out")), (96, 24), "{ledger}");
}
