//! What a run records is enough to compute its numbers again, outside, by the definitions.

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
    step.whole("response_offsets").windows(2).map(|w| w[0] as usize..w[1] as usize).collect()
}

fn job() -> Job {
    let sets = format!(
        "job.steps=2 ppo.gamma={GAMMA} ppo.lambda={LAMBDA} ppo.kl_coef={BETA} ppo.aggregation=sequence ppo.epochs=1 \
         ppo.minibatch_samples=16"
    );
    Job::ppo("outside").with(&sets).done()
}

#[test]
fn recorded_arrays_suffice_to_recompute_advantages_and_losses() {
    let job = job();
    for (name, line) in ["step_000001", "step_000002"].iter().zip(job.metrics()) {
        let step = &job.rollouts()[*name];
        let advantages = check_advantages(step);
        let metric = |key: &str| line[key].as_f64().expect("a number");
        // One minibatch: every ratio is 1, so the loss of a token is -A, and values are those at rollout.
        let (mut policy, mut value, mut tokens) = (0.0, 0.0, 0.0);
        let all = responses(step);
        for range in &all {
            let n = range.len() as f64;
            policy -= range.clone().map(|t| advantages[t]).sum::<f64>() / n / all.len() as f64;
            for t in range.clone() {
                value += 0.5 * (f64::from(step.float("values")[t]) - f64::from(step.float("returns")[t])).powi(2);
                tokens += 1.0;
            }
        }
        near(metric("policy_loss"), policy, "policy_loss");
        near(metric("value_loss"), value / tokens, "value_loss");
        let kl = step.float("kl").iter().map(|x| f64::from(*x)).sum::<f64>() / tokens;
        near(metric("kl_mean"), kl, "kl_mean");
        near(metric("response_tokens_mean"), tokens / all.len() as f64, "response_tokens_mean");
        let score = step.float("score").iter().map(|x| f64::from(*x)).sum::<f64>() / all.len() as f64;
        near(metric("score_mean"), score, "score_mean");
    }
}

/// Rewards, returns and whitened advantages from logprobs, ref_logprobs, values, score and mask.
fn check_advantages(step: &Arrays) -> Vec<f64> {
    let get = |name: &str, t: usize| f64::from(step.float(name)[t]);
    let mut raw = vec![0.0; step.float("advantages").len()];
    for (sample, range) in responses(step).into_iter().enumerate() {
        let (mut next_value, mut advantage) = (0.0, 0.0);
        for t in range.clone().rev() {
            assert_eq!(step.whole("mask")[t], 1);
            let kl = get("logprobs", t) - get("ref_logprobs", t);
            near(get("kl", t), kl, "kl");
            let score = if t + 1 == range.end { f64::from(step.float("score")[sample]) } else { 0.0 };
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
fn every_row_is_in_the_ledger_before_and_after_the_end_of_an_epoch() {
    for (steps, trained) in [(3, 24), (20, 120)] {
        let job =
            Job::ppo(&format!("ledger-{steps}")).with(&format!("job.steps={steps} checkpoint.every_steps=0")).done();
        let ledger: serde_json::Value = serde_json::from_slice(&job.read("ledger.json")).expect("JSON");
        let count = |key: &str| ledger[key].as_u64().expect("a count");
        let filtered: u64 =
            ledger["filtered"].as_object().expect("by rule").values().filter_map(serde_json::Value::as_u64).sum();
        assert_eq!((count("rows"), count("trained"), filtered), (128, trained, 8), "{ledger}");
        assert_eq!((count("deferred"), count("handed_out")), (120 - trained, steps * 8), "{ledger}");
    }
}

#[test]
fn prompts_and_responses_are_recorded_as_they_were_sampled() {
    let job = job();
    let step = &job.rollouts()["step_000001"];
    let (tokens, prompts) = (step.whole("token_offsets"), step.whole("prompt_tokens"));
    for (i, range) in responses(step).iter().enumerate() {
        assert_eq!((tokens[i + 1] - tokens[i] - prompts[i]) as usize, range.len());
        assert_eq!(step.whole("sample")[i], (i % 2) as i64);
        assert_eq!(step.whole("prompt_id")[i], step.whole("prompt_id")[i / 2 * 2]);
        let last = step.whole("tokens")[tokens[i + 1] as usize - 1];
        match step.whole("finish")[i] {
            0 => assert!(last <= 1 || (40..60).contains(&last), "token {last} does not stop"),
            1 => assert_eq!(range.len(), 12),
            other => panic!("finish {other}"),
        }
    }
}
