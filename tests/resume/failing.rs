//! Runs that fail: their messages, the rank that prints them, and the files that remain.

use crate::resume::job::{Job, place, signal, with_context};
use rlhf_hpc::checkpoint::newest;
use std::path::PathBuf;

/// A reward by length. While the file `fails` is next to it, it fails on one rank, or alone, after the number of calls
/// in that file.
const REWARD: &str = r#"
import os
calls = 0
def reward_func(queries, prompts, labels, **kwargs):
    global calls
    calls += 1
    if os.environ.get("OMPI_COMM_WORLD_RANK", "1") == "1" and os.path.exists("fails") and calls > int(open("fails").read()):
        raise ValueError("the scorer is out of tea")
    return [len(q) - len(p) + 0.5 for q, p in zip(queries, prompts)]
"#;

/// A job whose Python reward fails while the file at the returned path exists.
fn with_reward(job: Job) -> (Job, PathBuf) {
    let dir = place().join(format!("reward-{}", job.dir.file_name().expect("named").to_string_lossy()));
    std::fs::create_dir_all(&dir).expect("writes");
    let (file, fails) = (dir.join("reward.py"), dir.join("fails"));
    std::fs::write(&file, REWARD).expect("writes");
    let _ = std::fs::remove_file(&fails);
    let table = format!(r#"{{ file = "{}", batch = 0, pass_env = ["OMPI_COMM_WORLD_RANK"] }}"#, file.display());
    (job.with("reward.rule=[] checkpoint.every_steps=0").set(format!("reward.python={table}")), fails)
}

#[test]
fn a_reward_that_fails_on_one_rank_ends_the_run_with_a_checkpoint_that_resumes_bitwise() {
    let sets = "job.steps=16 eval.every_steps=0 reward.retries=1";
    let whole = with_reward(Job::ppo("reward-whole").on(2).with(sets)).0.done();
    let (job, fails) = with_reward(Job::ppo("reward-fails").on(2).with(sets));
    let mut running = job.start();
    running.wait_until(|| job.metrics().len() >= 2);
    // The checkpoint is complete or absent.
    std::fs::write(fails.with_file_name("new"), "0").expect("writes");
    std::fs::rename(fails.with_file_name("new"), &fails).expect("renames");
    let ended = running.end();
    ended.assert(
        75,
        &["error: ", "rank 1 (", "ValueError: the scorer is out of tea", "a checkpoint holds all work so far"],
    );
    let log = String::from_utf8(job.read("logs/rank-1.log")).expect("text");
    assert!(log.contains("the scorer is out of tea"), "{log}");
    assert!(log.starts_with("[20") && log.as_bytes()[5] == b'-', "a date that people can read: {log}");
    let saved = newest(&job.checkpoints()).expect("whole").expect("it was saved although none was due");
    assert!(saved.file("work.bin").is_ok() && saved.manifest.step >= 2, "step {}", saved.manifest.step);
    assert_eq!(saved.manifest.step, job.metrics().len() as u64, "no finished step is lost");
    std::fs::remove_file(fails).expect("there");
    job.done().assert_same(&whole);
}

#[test]
fn a_reward_that_fails_in_an_evaluation_ends_the_run_with_a_checkpoint_and_the_rerun_evaluates() {
    let sets = "job.steps=2 eval.every_steps=1 reward.retries=0";
    let whole = with_reward(Job::ppo("eval-whole").with(sets)).0.done();
    let (job, fails) = with_reward(Job::ppo("eval-fails").with(sets));
    // Calls for the greedy and the sampled responses of the first evaluation, and for the first step.
    std::fs::write(&fails, "3").expect("writes");
    job.run().assert(75, &["ValueError: the scorer is out of tea", "a checkpoint holds all work so far"]);
    let saved = newest(&job.checkpoints()).expect("whole").expect("saved").manifest;
    assert!(saved.step == 1 && saved.state["run"]["eval_due"] == true, "step {}", saved.step);
    std::fs::remove_file(fails).expect("there");
    job.done().assert_same(&whole);
}

#[test]
fn groups_with_a_failed_reward_are_not_learned_from_if_failures_are_dropped() {
    let reward = "def reward_func(queries, prompts, labels, prompt_id, **kwargs):\n    \
                  if any(id % 3 == 0 for id in prompt_id): raise ValueError('not this one')\n    \
                  return [len(q) + 0.5 for q in queries]";
    let dir = place().join("reward-drops");
    std::fs::create_dir_all(&dir).expect("writes");
    std::fs::write(dir.join("reward.py"), reward).expect("writes");
    let sets = "job.steps=2 ppo.advantage=grpo eval.every_steps=0 gradient.order=fixed reward.rule=[] reward.on_failure=drop reward.retries=0";
    let of = |name: &str, ranks| Job::ppo(name).on(ranks).with(sets).set("reward.python=reward-drops/reward.py".into());
    let alone = of("drops-1", 0);
    let ended = alone.run();
    let is_said = ended.stderr.contains("samples, because a reward failed on ");
    assert!(ended.code == Some(0) && is_said && ended.stderr.contains("not this one"), "{}", ended.stderr);
    let mut all = 0.0;
    for line in alone.metrics() {
        let [kept, dropped] = ["samples", "samples_dropped"].map(|key| line[key].as_f64().expect("it is recorded"));
        assert!(kept + dropped == 16.0 && dropped > 0.0 && dropped % 2.0 == 0.0, "{kept} kept, {dropped} dropped");
        all += dropped;
    }
    let ledger: serde_json::Value = serde_json::from_slice(&alone.read("ledger.json")).expect("JSON");
    assert_eq!(ledger["samples_dropped"].as_f64(), Some(all), "{ledger}");
    of("drops-2", 2).done().assert_same(&alone);
    // A run that the failure has stopped resumes with the other groups.
    let late = of("drops-late", 0);
    late.clone().with("reward.on_failure=stop").run().assert(75, &["ValueError: not this one"]);
    let late = late.done();
    for file in ["export/model.safetensors", "ledger.json"] {
        assert!(late.read(file) == alone.read(file), "{file} differs");
    }
}

#[test]
fn a_second_run_in_the_same_directory_is_rejected_and_the_first_is_not_disturbed() {
    let sets = "job.steps=100000 checkpoint.every_steps=0 metrics.rollouts_every_steps=0 metrics.tensorboard=false";
    let job = Job::ppo("twice").with(sets);
    let mut first = job.start();
    first.wait_until(|| !job.metrics().is_empty());
    // The second run waits some seconds for the first, and leaves the cores to other tests.
    signal("STOP", first.pid());
    let second = job.clone().on(2).run();
    second.assert(2, &["is in use by another run (process ", "hint: wait for it to end, or set another job.dir"]);
    signal("CONT", first.pid());
    let steps = job.metrics().len();
    first.wait_until(|| job.metrics().len() > steps);
    signal("USR1", first.pid());
    let ended = first.end();
    ended.assert(85, &["stopped at step"]);
}

#[test]
fn rows_beyond_the_context_are_rejected_before_the_first_step() {
    let long = "1+".repeat(200);
    let row =
        format!("{{\"prompt\": \"{long}\", \"response\": \"2\"}}\n{{\"prompt\": \"1+1=\", \"response\": \"2\"}}\n");
    std::fs::write(place().join("long.jsonl"), row).expect("writes");
    let data = "data.prompts=[\"long.jsonl\"] data.prompt_split= data.eval_split=";
    for job in [Job::ppo("long-prompt").on(2).with(data), Job::sft("long-row").with(data)] {
        job.run().assert(65, &["error: 1 row does not fit the model's context of 256 tokens", "hint: set data."]);
        assert!(job.metrics().is_empty());
    }
    with_context("near", 64);
    for role in ["reference", "critic"] {
        let sets = format!("model.{role}=near data.prompt_tokens_max=20 rollout.response_tokens_max=50");
        let job = Job::ppo(&format!("near-{role}")).with(&sets);
        job.run().assert(
            65,
            &["rows may have 70 tokens", &format!("model.{role} has a context of 64"), "hint: lower data."],
        );
    }
    Job::ppo("long-cut")
        .with(data)
        .with("job.steps=1 data.prompt_tokens_max=200 data.long_prompts=truncate_left")
        .done();
    Job::sft("long-row-cut").with(data).with("job.steps=1 data.row_tokens_max=200").done();
}
