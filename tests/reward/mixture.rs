use std::path::Path;

use rlhf_hpc::error::Kind;
use rlhf_hpc::reward::{Reward, RewardContext, RewardOutput, mixture::mix};

use crate::reward::{config, prompt, response};

fn says(score: Option<f32>) -> RewardOutput {
    RewardOutput { score, ..RewardOutput::default() }
}

#[test]
fn rewards_mix_by_weight_and_each_is_logged_under_its_name() {
    let toml = "rule = [{ kind = \"number\", weight = 2.0 }, { kind = \"regex\", pattern = 'so', weight = 0.5, name = \"style\" }]";
    let mut reward = Reward::new(&config(toml), Path::new("."), &RewardContext::default()).unwrap();
    let prompts = [prompt(0, "", "7"), prompt(1, "", "8")];
    let responses = [response("so 7", 1), response("so 7", 1)];
    let scored = reward.score(&prompts.each_ref(), &responses.each_ref()).unwrap();
    assert_eq!((scored[0].score, scored[1].score), (2.5, 0.5));
    assert_eq!((scored[1].extra["number"], scored[1].extra["style"]), (0.0, 1.0));
}

#[test]
fn rewards_with_the_same_name_are_distinguished() {
    let mut reward =
        Reward::new(&config("rule = [\"exact\", \"exact\"]"), Path::new("."), &RewardContext::default()).unwrap();
    let scored = reward.score(&[&prompt(0, "", "7")], &[&response("7", 1)]).unwrap();
    assert_eq!(scored[0].extra.keys().collect::<Vec<_>>(), ["exact", "exact_2"]);
    assert!(reward.score(&[], &[]).unwrap().is_empty(), "no responses need no scores");
}

#[test]
fn a_reward_that_abstains_leaves_the_sum_to_the_others() {
    let parts = [("a", 2.0), ("b", 3.0)];
    let prompts = [prompt(0, "", ""), prompt(1, "", "")];
    let outputs = vec![vec![says(None), says(Some(1.0))], vec![says(Some(0.5)), says(Some(1.0))]];
    let scored = mix(&parts, outputs, &prompts.each_ref(), false).unwrap();
    assert_eq!((scored[0].score, scored[1].score), (1.5, 5.0));
    assert!(!scored[0].extra.contains_key("a"), "an abstention has no number");
}

#[test]
fn a_response_for_which_all_rewards_abstain_is_an_error_and_not_a_zero() {
    let prompts = [prompt(0, "", ""), prompt(9, "", "")];
    let mixed = |others| mix(&[("a", 1.0)], vec![vec![says(Some(1.0)), says(None)]], &prompts.each_ref(), others);
    assert_eq!(mixed(true).unwrap()[1].score, 0.0, "a reward model scores it");
    let error = mixed(false).unwrap_err();
    assert_eq!(error.kind, Kind::Service);
    assert!(error.message.contains("prompt 9"), "{error}");
}
