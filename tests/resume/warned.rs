//! Unusual settings and numbers cause one warning with the key that changes them. Others cause none.

use crate::resume::job::Job;

/// Kind of job, ranks (0: without mpirun), steps (0: a dry run warns), keys, and the warnings.
const WARNED: &[(&str, usize, u32, &str, &[&str])] = &[
    (
        "ppo",
        0,
        0,
        "rollout.response_tokens_max=250 ppo.minibatch_samples=243 rollout.prompts_per_step=121 \
         rollout.top_p=0.5",
        &[
            "exceeds the context of 256",
            "ppo.minibatch_samples = 243 exceeds the 242 samples",
            "rollout.prompts_per_step = 121 exceeds the data's 120 rows: steps repeat rows",
            "ppo.correction to weight the difference",
        ],
    ),
    ("ppo", 2, 0, "rollout.prompts_per_step=1 ppo.minibatch_samples=2", &["= 1 is below the 2 rollout ranks"]),
    (
        "ppo",
        0,
        3,
        "rollout.stop_token_ids=[] rollout.response_tokens_max=2 reward.rule={kind=\"regex\",pattern=\"^\"} data.prompt_tokens_max=6",
        &[
            "all responses are cut",
            "all rewards of a step are equal (1)",
            "of the rows are filtered, as listed in ledger.jsonl (",
            "raise data.prompt_tokens_max, or cut long prompts",
        ],
    ),
    (
        "ppo",
        0,
        0,
        "data.prompt_split= data.eval_split= data.split.by=ratio data.split.eval_ratio=0.6 data.eval_sets=[{name=\"held\",prompts=\"questions\",split=\"test\"}]",
        &["name a held-out file only in data.split.eval_files or data.eval_sets"],
    ),
    (
        "ppo",
        0,
        3,
        "reward.rule={kind=\"regex\",pattern=\"^\"} ppo.advantage=grpo",
        &["all rewards are equal in 100 % of the groups"],
    ),
    (
        "ppo",
        0,
        3,
        "optim.actor.lr=1.0 optim.actor.schedule=constant ppo.reward_clip=[-0.1,0.1]",
        &["raise ppo.kl_coef or lower optim.actor.lr", "ppo.reward_clip = [-0.1, 0.1] clips the rewards"],
    ),
    ("sft", 0, 0, "sft.minibatch_samples=121", &["sft.minibatch_samples = 121 exceeds the data's 120 rows"]),
    ("dpo", 2, 0, "dpo.minibatch_samples=1", &["dpo.minibatch_samples = 1 is below the 2 data ranks"]),
    ("dpo", 0, 3, "optim.actor.lr=0.3 optim.actor.schedule=constant", &["raise dpo.nll_coef"]),
    ("kto", 0, 0, "kto.minibatch_samples=4", &["kto.minibatch_samples = 4 is small: the KL"]),
];

#[test]
fn unusual_settings_cause_one_warning_with_the_key_that_changes_them() {
    for (i, (kind, ranks, steps, sets, said)) in WARNED.iter().enumerate() {
        let rows = match *kind {
            "sft" => "demonstrations",
            "dpo" => "pairs",
            "kto" => "labelled",
            _ => "questions",
        };
        let sets = format!("job.kind={kind} data.prompts=[\"{rows}\"] checkpoint.every_steps=0 {sets}");
        let job = Job::ppo(&format!("warned-{i}")).on(*ranks).with(&sets);
        let job = if *steps == 0 { job.dry() } else { job.with(&format!("job.steps={steps}")) };
        job.run().assert(0, said);
    }
}
