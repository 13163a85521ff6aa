//! Settings and numbers that seldom mean what was meant are warned of once, with the key that changes them; others are not.

use crate::resume::job::Job;

/// Kind of job, ranks (0: without mpirun), keys, and what is said of them.
const WARNED: &[(&str, usize, &str, &str)] = &[
    ("ppo", 0, "ppo.reward_clip=[-0.1,0.1]", "ppo.reward_clip = [-0.1, 0.1] cuts the rewards"),
    ("ppo", 0, "rollout.response_tokens_max=250", "is more than the context of 256"),
    ("ppo", 2, "rollout.prompts_per_step=1 ppo.minibatch_samples=2", "= 1 for 2 ranks that sample"),
    ("ppo", 0, "ppo.minibatch_samples=17", "ppo.minibatch_samples = 17 is more than the 16 samples"),
    ("ppo", 0, "rollout.prompts_per_step=121", "and the data has 120 rows: steps repeat some"),
    ("ppo", 0, "rollout.top_p=0.5", "ppo.correction weighs the difference"),
    ("ppo", 0, "rollout.stop_token_ids=[] rollout.response_tokens_max=2", "all responses are cut"),
    ("ppo", 0, "reward.rule={kind=\"regex\",pattern=\"^\"}", "all rewards of a step are equal (1)"),
    ("ppo", 0, "reward.rule={kind=\"regex\",pattern=\"^\"} ppo.advantage=grpo", "in 100 % of the groups all rewards"),
    ("ppo", 0, "optim.actor.lr=1.0 optim.actor.schedule=constant", "ppo.kl_coef and optim.actor.lr hold it"),
    ("ppo", 0, "data.prompt_tokens_max=6", "of the rows are filtered ("),
    ("sft", 0, "sft.minibatch_samples=121", "sft.minibatch_samples = 121, and the data has 120 rows"),
    ("dpo", 2, "dpo.minibatch_samples=1", "dpo.minibatch_samples = 1 for 2 ranks that train"),
    ("dpo", 0, "optim.actor.lr=0.3 optim.actor.schedule=constant", "dpo.nll_coef holds them"),
    ("kto", 0, "kto.minibatch_samples=4", "kto.minibatch_samples = 4: the KL"),
];

#[test]
fn what_seldom_is_meant_is_warned_of_once_with_the_key_that_changes_it() {
    for (i, (kind, ranks, sets, said)) in WARNED.iter().enumerate() {
        let rows = match *kind {
            "sft" => "demonstrations",
            "dpo" => "pairs",
            "kto" => "labelled",
            _ => "questions",
        };
        let job = Job::ppo(&format!("warned-{i}")).with(&format!("job.kind={kind} data.prompts=[\"{rows}\"]"));
        let ended = job.on(*ranks).with("job.steps=3 checkpoint.every_steps=0").with(sets).run();
        assert_eq!((ended.code, ended.stderr.matches(said).count()), (Some(0), 1), "{sets}: {}", ended.stderr);
    }
}
