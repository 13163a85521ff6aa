//! The first steps of a run: shorter responses, and parts of another run's checkpoint.

use crate::resume::async_rollout::ahead;
use crate::resume::job::{Job, place, verb};
use crate::resume::variants::vector;
use serde_json::Value;

/// Every response is cut by length.
const CUT: &str = "rollout.ignore_eos=true rollout.stop_token_ids=[] rollout.response_tokens_schedule=[[1,4],[3,8]] \
                   checkpoint.keep_last=0";

#[test]
fn responses_follow_the_schedule_of_their_lengths_or_grow_earlier_and_resume_bitwise() {
    let grows = "rollout.response_tokens_grow_at=0.5 ppo.overlong_buffer_tokens=2";
    for (name, job, lengths) in [
        ("lengths", Job::ppo(""), [4.0, 8.0, 8.0, 12.0]),
        ("lengths-grown", Job::ppo("").on(2).with(grows), [4.0, 8.0, 12.0, 12.0]),
        ("lengths-ahead", ahead("", 1, 1).with("gradient.order=fixed mesh.async_updates_max=2"), [4.0, 8.0, 8.0, 12.0]),
    ] {
        let whole = job.named(name).with(CUT).with("ppo.mask_truncated=false").done();
        for key in ["response_tokens_mean", "response_tokens_limit"] {
            assert_eq!(whole.numbers(key), lengths, "{name}: {key}");
        }
        whole.rewound(&format!("{name}-again"), 2).done().assert_same(&whole);
        if name == "lengths-grown" {
            let penalties = whole.numbers("score_mean").into_iter().zip(whole.numbers("reward_mean"));
            assert!(penalties.into_iter().all(|(score, reward)| (score - reward - 1.0).abs() < 1e-6), "of each limit");
        }
    }
}

#[test]
fn a_step_whose_responses_are_all_masked_changes_no_weight() {
    let job = Job::ppo("all-masked").with(CUT).with("job.steps=2 ppo.mask_truncated=true").done();
    for key in ["policy_loss", "value_loss", "grad_norm_actor", "grad_norm_critic"] {
        assert_eq!(job.numbers(key), [0.0, 0.0], "{key}");
    }
    assert!(vector(&job, 1, "actor.weights") == vector(&job, 2, "actor.weights"));
}

#[test]
fn a_run_starts_with_the_named_parts_of_another_runs_checkpoint_and_resumes_from_its_own() {
    let sets = "ppo.kl_target=0.1 ppo.kl_horizon=100 checkpoint.keep_last=0";
    let first = Job::ppo("origin").with(sets).with("job.steps=3").done();
    let step = |step: u64| format!("checkpoint.from={}", first.checkpoints().join(format!("step-{step}")).display());
    let still = "job.steps=1 optim.actor.lr=0 optim.critic.lr=0";
    let start = |name: &str, parts: &str| {
        Job::ppo(name).with(sets).with(still).set(step(2)).set(format!("checkpoint.restore={parts}"))
    };
    let rows = |job: &Job, step: &str| job.rollouts()[step]["prompt_id"].clone();
    let updates = |job: &Job| {
        let manifest: Value = serde_json::from_slice(&job.read("checkpoints/step-1/manifest.json")).expect("JSON");
        manifest["state"]["run"]["updates"].clone()
    };
    let beta = first.numbers("kl_coef");
    assert!(beta[0] != beta[2]);

    let weights = start("origin-weights", "[\"weights\"]").on(2).with("mesh.zero=3").done();
    for role in ["actor.weights", "critic.weights"] {
        assert!(vector(&weights, 1, role) == vector(&first, 2, role), "{role}");
    }
    assert_eq!((updates(&weights), weights.numbers("kl_coef")[0]), (serde_json::json!([4, 4]), beta[0]));
    assert_eq!(rows(&weights, "step_000001"), rows(&first, "step_000001"), "the rows begin again");

    let all = start("origin-all", "[\"weights\",\"optimizer\",\"data\",\"state\"]").done();
    assert_eq!((updates(&all), all.numbers("kl_coef")[0]), (serde_json::json!([12, 12]), beta[2]));
    assert_eq!(rows(&all, "step_000001"), rows(&first, "step_000003"), "the rows continue");

    // The newest checkpoint of a run directory is used, and a resumed run does not start again.
    let newest = || Job::ppo("").with(sets).with("job.steps=2").set(format!("checkpoint.from={}", first.dir.display()));
    let whole = newest().named("origin-newest").done();
    assert!(vector(&whole, 1, "actor.weights") != vector(&first, 3, "actor.weights"));
    whole.rewound("origin-newest-again", 1).done().assert_same(&whole);
}

#[test]
fn a_checkpoint_that_does_not_fit_the_job_is_rejected_before_the_models_are_loaded() {
    let first = Job::ppo("origin-of-ppo").with("job.steps=1 ppo.advantage=rloo").done();
    let from = format!("checkpoint.from={}", first.dir.display());
    let sft = |sets: &str| Job::sft("origin-refused").with("job.steps=1").with(sets);
    sft("").set("checkpoint.from=nowhere".into()).run().assert(74, &["checkpoint.from: ", "nowhere"]);
    sft("checkpoint.restore=[\"weights\",\"state\"]")
        .set(from.clone())
        .run()
        .assert(2, &["\"state\" for a sft job that starts from a ppo job"]);
    sft("checkpoint.restore=[\"weights\",\"data\"]")
        .set(from.clone())
        .run()
        .assert(65, &["checkpoint.from: rows have changed"]);
    sft("checkpoint.restore=optimizer").set(from.clone()).run().assert(2, &["must have \"weights\""]);
    let config = std::fs::read_to_string(place().join("config.json")).expect("it was made");
    let wide = config.replace("\"hidden_size\": 32", "\"hidden_size\": 48");
    std::fs::write(place().join("origin-wide.json"), wide).expect("writes");
    verb("init --config origin-wide.json --tokenizer tokenizer --out origin-wide");
    sft("model.actor=origin-wide").set(from.clone()).run().assert(65, &["checkpoint.from: ", "it was saved from"]);
    // Its critic has no weights in the checkpoint.
    let ended = Job::ppo("origin-of-actor").with("job.steps=1").set(from).run();
    ended.assert(0, &["starting from ", "step-1 (step 1): weights", "critic: the checkpoint has none"]);
}
