//! Rewards rise: small models with random weights and fixed seeds learn a simple rule.

use crate::resume::job::Job;

/// A response is right if it begins with a digit, which at first has a chance of 10 in 272.
fn learns(advantage: &str) {
    let name = format!("learns-{advantage}");
    let sets = format!(
        "ppo.advantage={advantage} job.steps=40 rollout.prompts_per_step=16 rollout.samples_per_prompt=4 \
         rollout.response_tokens_max=2 rollout.stop_token_ids=[] ppo.minibatch_samples=32 optim.actor.lr=5e-3 \
         optim.critic.lr=5e-3 ppo.microbatch_tokens_max=512 checkpoint.every_steps=0 metrics.rollouts_every_steps=0"
    );
    let rule = r#"reward.rule={ kind = "regex", pattern = "^[0-9]" }"#;
    let job = Job::ppo(&name).with(&sets).set(rule.to_string()).done();
    assert_eq!(job.numbers("logprob_gap_max"), [0.0; 40], "sampling and training agree to the bit in every step");
    assert_eq!(job.numbers("value_loss").len(), if advantage == "gae" { 40 } else { 0 }, "{advantage}: a critic");
    let scores = job.numbers("score_mean");
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let (first, last) = (mean(&scores[..5]), mean(&scores[35..]));
    println!("{advantage}: {first:.3} -> {last:.3}");
    assert!(first < 0.3 && last > first + 0.4, "{advantage}: {first:.3} -> {last:.3}: {scores:.2?}");
}

#[test]
fn a_simple_rule_is_learned_with_a_critic_and_with_group_batch_and_greedy_baselines() {
    for advantage in ["gae", "grpo", "reinforce++", "remax"] {
        learns(advantage);
    }
}

#[test]
fn sft_lowers_the_loss_on_held_out_rows() {
    let job = Job::sft("sft-learns").with("job.steps=40 eval.every_steps=20 optim.actor.lr=1e-2").done();
    let losses = job.numbers("eval_loss");
    assert!(losses.len() == 3 && losses[2] < 0.6 * losses[0], "{losses:?}");
}
