//! Whole PPO jobs whose responses are decoded by graphs.

use crate::jobs::{CONFIG, metrics, on_ranks, prepare, rlhf_hpc};
use crate::on_a_real_gpu;

/// Keys of metrics.jsonl that tell other samples, or other updates, from the same ones.
pub const TELLING: [&str; 7] = [
    "reward_mean",
    "entropy",
    "policy_loss",
    "grad_norm_actor",
    "grad_norm_critic",
    "response_tokens_mean",
    "response_truncated_ratio",
];

/// Fewer lanes than samples, an end before the longest length, filters, and stop tokens that are banned at first.
pub const SAMPLING: [&str; 9] = [
    "model.actor=model",
    "rollout.batch_max=5",
    "rollout.samples_per_prompt=3",
    "rollout.response_tokens_max=20",
    "rollout.response_tokens_min=3",
    "rollout.stop=[\"a\"]",
    "rollout.stop_token_ids=[40, 41, 42, 43, 44, 45]",
    "rollout.top_p=0.97",
    "ppo.minibatch_samples=6",
];

#[test]
fn a_job_by_graphs_is_the_one_by_ordinary_steps_and_its_log_probabilities_are_those_of_training() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    prepare(at, CONFIG);
    for job in ["graphs", "ordinary"] {
        let own = [format!("job.dir={job}"), format!("rollout.graphs={}", job == "graphs")];
        let args: Vec<&str> =
            ["run", "ppo.toml"].into_iter().chain(SAMPLING).chain(own.iter().map(String::as_str)).collect();
        rlhf_hpc(at, &args);
    }
    let (by_graphs, ordinary) = (metrics(at, "graphs"), metrics(at, "ordinary"));
    assert_eq!((by_graphs.len(), ordinary.len()), (2, 2));
    for (a, b) in by_graphs.iter().zip(&ordinary) {
        assert_eq!(a["logprob_gap_max"].as_f64(), Some(0.0), "{a}");
        for key in TELLING {
            assert!(a[key].is_number() && a[key] == b[key], "{key}: {a} against {b}");
        }
        let truncated = a["response_truncated_ratio"].as_f64().expect("a share");
        assert!(truncated < 1.0, "none stops: {a}");
    }
    if on_a_real_gpu() {
        return;
    }
    // Ranks with parts of the optimizer's state get their weights anew after each update.
    let own = ["mesh.data=2", "mesh.zero=2", "job.dir=two"];
    on_ranks(2, at, &["run", "ppo.toml"].into_iter().chain(SAMPLING).chain(own).collect::<Vec<_>>(), &[]);
    for step in metrics(at, "two") {
        assert_eq!(step["logprob_gap_max"].as_f64(), Some(0.0), "{step}");
    }
}
