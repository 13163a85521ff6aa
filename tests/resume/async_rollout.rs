//! A rollout on its own ranks, synchronous and asynchronous.

use crate::resume::arrays::Arrays;
use crate::resume::job::{Job, place};
use rlhf_hpc::checkpoint::newest;

/// Training on the first ranks, the rollout and its reward on the next ones.
fn apart(name: &str, trains: usize, samples: usize) -> Job {
    Job::ppo(name).placed(&[("actor critic reference", trains), ("rollout reward", samples)])
}

/// The same, one step ahead.
pub fn ahead(name: &str, trains: usize, samples: usize) -> Job {
    apart(name, trains, samples).with("mesh.async_updates_max=1")
}

#[test]
fn a_rollout_on_its_own_ranks_is_bitwise_equal_to_one_on_all_ranks() {
    for (i, (ranks, sets)) in [
        (1, "eval.every_steps=2"),
        (2, "mesh.tensor=1 mesh.zero=3 rollout.tensor=2"),
        (2, "mesh.tensor=2 rollout.tensor=1 model.dtype=bf16 ppo.advantage=remax"),
    ]
    .into_iter()
    .enumerate()
    {
        let short = "job.steps=2";
        let together = Job::ppo(&format!("rollout-together-{i}")).on(ranks).with(short).with(sets).done();
        apart(&format!("rollout-apart-{i}"), ranks, ranks).with(short).with(sets).done().assert_same(&together);
    }
}

#[test]
fn samples_generated_one_step_ahead_use_the_weights_of_the_previous_step_on_any_ranks() {
    let sets = "gradient.order=fixed eval.every_steps=2";
    let alone = ahead("ahead-1-1", 1, 1).with(sets).done();
    let of_all = |step: &Arrays| step["weights_step"].iter().all(|weights| *weights == step["weights_step"][0]);
    assert!(alone.rollouts().values().all(of_all), "one version a step");
    assert_eq!(alone.rollouts().values().map(|step| step["weights_step"][0]).collect::<Vec<_>>(), [0.0, 0.0, 1.0, 2.0]);
    let gaps = alone.numbers("logprob_gap_max");
    assert!(gaps[0] == 0.0 && gaps[1..].iter().all(|gap| *gap > 0.0), "{gaps:?}");
    // The second batch is sampled before the first update: like the second step of a job whose first step changes
    // nothing.
    let still = Job::ppo("ahead-still").with(sets).with("ppo.critic_warmup_steps=1").done();
    assert_eq!(alone.rollouts()["step_000002"]["tokens"], still.rollouts()["step_000002"]["tokens"]);
    ahead("ahead-2-2", 2, 2).with(sets).done().assert_same(&alone);
    // The correction uses the trained policy.
    let corrected = ahead("ahead-corrected", 1, 1).with(sets).with("ppo.correction=tis").done();
    assert!(corrected.numbers("logprob_gap_max").iter().all(|gap| *gap == 0.0), "recomputed");
    assert!(corrected.numbers("sampler_gap_max")[1..].iter().all(|gap| *gap > 0.0));
}

/// Responses of up to 12 tokens, in pieces of 4.
#[test]
fn a_partial_response_continues_under_new_weights_and_is_unchanged_if_they_are_equal() {
    let sets = "gradient.order=fixed mesh.async_updates_max=3 rollout.stop=[\"zz\"] rollout.top_k=200 \
                rollout.keep_sampling_mask=true job.steps=6 checkpoint.keep_last=0";
    let alone = ahead("pieces-1-1", 1, 1).with(sets).done();
    let mut longest = 0;
    for (step, (name, arrays)) in (1..).zip(alone.rollouts()) {
        let ends = &arrays["response_offsets"];
        for range in ends.windows(2).map(|ends| ends[0] as usize..ends[1] as usize) {
            longest = longest.max(range.len());
            let before = |token: usize| f64::from((step - 4 + token as i32 / 4).max(0));
            let weights: Vec<f64> = (0..range.len()).map(before).collect();
            assert_eq!(arrays["weights_step"][range], weights, "{name}");
        }
    }
    assert_eq!(longest, 12);
    assert!(alone.numbers("rollout_lag_mean")[3..].iter().all(|lag| (1.0..3.0).contains(lag)));
    ahead("pieces-2-2", 2, 2).with(sets).with("rollout.batch_max=3").done().assert_same(&alone);
    alone.rewound("pieces-killed", 3).done().assert_same(&alone);
    // With constant weights, the samples of each step equal those of a synchronous rollout.
    let still = "optim.actor.lr=0.0 gradient.order=fixed rollout.top_k=200 rollout.keep_sampling_mask=true";
    let in_step = Job::ppo("pieces-whole").with(still).done().rollouts();
    let pieces = ahead("pieces-still", 1, 1).with(still).with("mesh.async_updates_max=3").done().rollouts();
    for (name, arrays) in in_step {
        for key in ["tokens", "logprobs", "sample_logprobs", "finish", "response", "score"] {
            assert_eq!(pieces[&name][key], arrays[key], "{name}, {key}");
        }
    }
}

#[test]
fn an_async_rollout_resumes_bitwise_from_every_checkpoint_and_after_a_failed_reward() {
    let whole = ahead("ahead-whole", 1, 1).done();
    whole.rewound("ahead-killed", 2).done().assert_same(&whole);
    // The third batch is sampled while the second one is trained on. The reward model scores it on the ranks of the
    // actor, or on those of the rollout.
    let reward = "import os\nasked = 0\ndef reward_func(queries, prompts, labels):\n    global asked\n    asked += len(queries)\n    \
                  if asked > 40 and os.path.exists('fails'):\n        raise ValueError('enough for now')\n    return [len(q) % 3 for q in queries]\n";
    std::fs::write(place().join("ahead.py"), reward).expect("writes");
    let job = |name: &str| {
        ahead(name, 1, 1).with("reward.rule=[] reward.retries=0 checkpoint.every_steps=0 reward.python=ahead.py")
    };
    let whole = job("ahead-reward").done();
    std::fs::write(place().join("fails"), "").expect("writes");
    let broken = job("ahead-fails");
    broken.run().assert(75, &["ValueError: enough for now", "a checkpoint holds all work so far"]);
    std::fs::remove_file(place().join("fails")).expect("there");
    assert_eq!(newest(&broken.checkpoints()).expect("whole").expect("saved").manifest.step, 2);
    broken.done().assert_same(&whole);
}

#[test]
fn jobs_that_do_not_support_async_rollout_are_rejected_with_the_keys() {
    let together = Job::ppo("ahead-together").with("mesh.async_updates_max=1");
    let dynamic = ahead("ahead-dynamic", 1, 1).with("rollout.dynamic_sampling.prompts_max_factor=2");
    let critic = Job::ppo("ahead-critic").placed(&[("actor reference", 1), ("rollout reward critic", 1)]);
    let critic = critic.with("mesh.async_updates_max=1");
    let sft = apart("ahead-sft", 1, 1).with("job.kind=sft");
    for (job, words) in [
        (together, "mesh.async_updates_max = 1 needs rollout ranks of their own"),
        (dynamic, "mesh.async_updates_max does not support rollout.dynamic_sampling"),
        (critic, "mesh.async_updates_max = 1 does not support the critic on the rollout ranks"),
        (sft, "rollout ranks of their own are for ppo jobs only (got job.kind = \"sft\")"),
    ] {
        job.run().assert(2, &[words]);
    }
}
