//! Steps that answer prompts until they have groups of samples to learn from.

use crate::cli::command;
use crate::resume::job::{Job, place};
use rlhf_hpc::checkpoint::newest;
use serde_json::Value;
use std::collections::BTreeSet;

/// A reward of 1 for responses of even length. While the file `fails` is next to it, it fails on the ninth prompt of a
/// step.
const REWARD: &str = r#"
import os
seen = set()
def reward_func(queries, prompts, labels, prompt_id, **kwargs):
    here = os.path.dirname(os.path.abspath(__file__))
    seen.update(prompt_id)
    if len(seen) > 8 and os.path.exists(os.path.join(here, "fails")):
        raise ValueError("enough for now")
    return [float((len(q) - len(p)) % 2 == 0) for q, p in zip(queries, prompts)]
"#;

/// With a folder of its own for the reward.
fn job(name: &str) -> Job {
    let dir = place().join(format!("rewards-{name}"));
    std::fs::create_dir_all(&dir).expect("writes");
    std::fs::write(dir.join("reward.py"), REWARD).expect("writes");
    let sets = "ppo.advantage=grpo job.steps=3 checkpoint.every_steps=0 eval.every_steps=0 reward.rule=[] reward.retries=0 \
                gradient.order=fixed rollout.dynamic_sampling.prompts_max_factor=6";
    Job::ppo(name).with(sets).set(format!("reward.python=rewards-{name}/reward.py"))
}

fn lines(job: &Job) -> Vec<Value> {
    command::rows(&String::from_utf8(job.read("ledger.jsonl")).expect("text"))
}

#[test]
fn a_step_samples_prompts_until_it_has_its_groups_and_the_ledger_lists_the_dropped_ones() {
    let alone = job("dynamic-1").done();
    let steps = alone.metrics();
    let of = |key: &str| steps.iter().map(|step| step[key].as_f64().expect("it is recorded")).collect::<Vec<_>>();
    assert_eq!((of("samples"), of("score_mean")), (vec![16.0; 3], vec![0.5; 3]), "8 groups of a right and a wrong one");
    assert!(of("rollout_rounds")[0] > 1.0, "{:?}", of("rollout_rounds"));
    // Half of the groups are kept, and later steps expect that in their first round. With this seed, two rounds fall
    // short.
    assert!(of("rollout_rounds")[1..].iter().all(|rounds| *rounds <= 3.0), "{:?}", of("rollout_rounds"));
    assert!(of("groups_surplus").iter().any(|groups| *groups > 0.0), "{:?}", of("groups_surplus"));
    assert!(of("score_sampled_mean").iter().any(|mean| *mean != 0.5));
    let dropped: f64 = of("groups_dropped").iter().sum();
    let ledger: Value = serde_json::from_slice(&alone.read("ledger.json")).expect("JSON");
    assert_eq!(ledger["groups_dropped"].as_f64(), Some(dropped), "{ledger}");
    assert_eq!(ledger["handed_out"].as_f64(), Some(dropped + 24.0), "{ledger}");
    let named: Vec<Value> = lines(&alone).into_iter().filter(|line| line["rule"] == "dynamic_sampling").collect();
    assert_eq!(named.len() as f64, dropped);
    for line in &named {
        let whole = line["score_mean"] == 0.0 || line["score_mean"] == 1.0;
        assert!(whole && line["source"].as_str().is_some_and(|row| row.contains("rows.jsonl:")), "{line}");
    }
    job("dynamic-2").on(2).done().assert_same(&alone);
    job("dynamic-placed").placed(&[("actor", 1), ("reference reward", 1)]).done().assert_same(&alone);
}

#[test]
fn a_step_that_fails_between_its_rounds_resumes_bitwise() {
    let whole = job("dynamic-whole").done();
    let fails = place().join("rewards-dynamic-fails/fails");
    let broken = job("dynamic-fails");
    std::fs::write(&fails, "").expect("writes");
    broken.run().assert(75, &["ValueError: enough for now"]);
    std::fs::remove_file(&fails).expect("there");
    assert!(newest(&broken.checkpoints()).expect("whole").expect("saved").file("work.bin").is_ok());
    let again = broken.done();
    again.assert_same(&whole);
    let all: Vec<String> = lines(&again).iter().map(Value::to_string).collect();
    assert_eq!(all.len(), all.iter().collect::<BTreeSet<_>>().len(), "a line for each");
    assert_eq!(lines(&again), lines(&whole));
}

#[test]
fn a_step_without_enough_groups_trains_on_the_groups_it_has_and_logs_that() {
    let few = job("dynamic-few").with("rollout.dynamic_sampling.prompts_max_factor=2");
    let rare = REWARD.replace("% 2", "% 5");
    std::fs::write(place().join("rewards-dynamic-few/reward.py"), rare).expect("writes");
    let few = few.run();
    assert!(few.code == Some(0) && few.stderr.contains("prompts_max_factor to answer more"), "{}", few.stderr);
    job("dynamic-none")
        .with("rollout.dynamic_sampling.low=0.9")
        .run()
        .assert(65, &["has no samples to learn from", "a checkpoint holds all work so far"]);
    job("dynamic-off")
        .with("rollout.dynamic_sampling.prompts_max_factor=1 rollout.dynamic_sampling.low=0.1")
        .run()
        .assert(2, &["needs prompts_max_factor above 1 (got 1)"]);
}
