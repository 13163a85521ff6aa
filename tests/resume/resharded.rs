//! Whole jobs whose rollout is laid out otherwise than their training.

use crate::resume::job::Job;

/// Ranks, axes, and whether weights travel between them on the way.
const LAYOUTS: &[(usize, &str, bool)] = &[
    (2, "mesh.tensor=2 rollout.tensor=1", true),
    (2, "mesh.tensor=1 mesh.zero=2 rollout.tensor=2 rollout.data=1", false),
    (4, "mesh.tensor=1 mesh.zero=3 rollout.tensor=2", true),
    (4, "mesh.tensor=2 mesh.zero=3 rollout.tensor=4", true),
    (4, "mesh.sequence=2 mesh.tensor=1 mesh.zero=2 rollout.tensor=4", false),
];

#[test]
fn a_rollout_in_a_layout_of_its_own_has_the_samples_of_one_rank_and_says_what_it_cost() {
    let sets = "job.steps=2 ppo.epochs=1 ppo.minibatch_samples=16 eval.every_steps=2";
    let alone = Job::ppo("resharded-alone").with(sets).done();
    for (i, (ranks, layout, travels)) in LAYOUTS.iter().enumerate() {
        let job = Job::ppo(&format!("resharded-{i}")).on(*ranks).with(sets).with(layout).done();
        let (mine, theirs) = (&job.rollouts()["step_000001"], &alone.rollouts()["step_000001"]);
        for what in ["tokens", "token_offsets", "response_offsets", "prompt_id", "sample", "finish"] {
            assert_eq!(mine.whole(what), theirs.whole(what), "{what} on {layout}");
        }
        let lines: Vec<_> = job.metrics().into_iter().filter(|line| line.contains_key("policy_loss")).collect();
        assert_eq!(lines.len(), 2, "{layout}");
        for line in &lines {
            let number = |key: &str| line.get(key).and_then(serde_json::Value::as_f64);
            assert_eq!(number("reshard_bytes").map(|bytes| bytes > 0.0), Some(*travels), "{layout}");
            assert!(number("time_reshard_s").is_some_and(|seconds| seconds > 0.0), "{layout}");
            // Sums over a cut matrix are others: what sampling recorded is computed again where it is trained.
            assert!(number("time_old_logprobs_s").is_some() && number("sampler_gap_max").is_some(), "{layout}");
            assert_eq!(number("logprob_gap_max"), Some(0.0), "{layout}");
        }
        for key in ["policy_loss", "value_loss", "kl_mean", "grad_norm_actor", "grad_norm_critic", "score_mean"] {
            let (a, b) = (job.numbers(key)[0], alone.numbers(key)[0]);
            assert!((a - b).abs() <= 1e-5 * b.abs().max(1e-3), "{key} on {layout}: {a} against {b}");
        }
        let answered = |job: &Job| job.numbers("eval_samples");
        assert_eq!(answered(&job), answered(&alone), "{layout}");
    }
}

#[test]
fn a_layout_that_cannot_be_is_refused_with_what_can() {
    for (ranks, layout, words) in [
        (4, "rollout.tensor=3", "rollout.tensor = 3"),
        (4, "rollout.tensor=2 rollout.data=4", "needs 8 ranks, the mesh has 4"),
        (8, "rollout.tensor=8", "tensor can be 1, 2, 4"),
    ] {
        let mut job = Job::ppo("resharded-refused").on(ranks).with("mesh.tensor=1 mesh.zero=1").with(layout);
        job.dry = true;
        job.run().assert(2, &[words]);
    }
}
