//! Rewards: rules, working and faulty Python files, and mixtures.

mod children;
mod environment;
mod forms;
mod mixture;
mod python;
mod rules;
mod server;
mod services;

use rlhf_hpc::config::reward::RewardConfig;
use rlhf_hpc::experience::{Prompt, Response};

/// The `[reward]` table of a job.
pub fn config(toml: &str) -> RewardConfig {
    toml::from_str(toml).unwrap()
}

pub fn prompt(id: u64, text: &str, label: &str) -> Prompt {
    Prompt { id, text: text.into(), label: label.into(), source: "data/prompts".into(), ..Prompt::default() }
}

#[track_caller]
fn comes_true(what: &str, test: impl Fn() -> bool) {
    for _ in 0..3000 {
        if test() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("never came true: {what}");
}

pub fn response(text: &str, tokens: usize) -> Response {
    Response { text: text.into(), tokens: vec![7; tokens], ..Response::default() }
}

#[test]
fn the_function_of_the_recipe_scores_the_last_number_and_subtracts_a_length_penalty() {
    let job = python::Job::new(include_str!("../../jobs/recipes/reward.py"));
    let scored = python::scores(&job.score("").unwrap());
    assert!(scored[0] > 0.9 && scored[0] < 1.0 && scored[1] <= 0.0, "{scored:?}");
}
