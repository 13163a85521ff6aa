//! Runs that fail: what is said, by whom, and what is left.

use crate::process::Running;
use crate::resume::job::{Job, place, with_context};
use rlhf_hpc::checkpoint::newest;
use rlhf_hpc::comm::Group;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Scores by length; fails on one rank while the file `fails` lies beside it.
const REWARD: &str = r#"
import os
def reward_func(queries, prompts, labels, **kwargs):
    here = os.path.dirname(os.path.abspath(__file__))
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == @RANK and os.path.exists(os.path.join(here, "fails")):
        raise ValueError("the scorer is out of tea")
    return [len(q) - len(p) + 0.5 for q, p in zip(queries, prompts)]
"#;

/// A job whose Python reward fails on `rank` when told to, by the path that is returned.
fn with_reward(job: Job, rank: usize) -> (Job, std::path::PathBuf) {
    let dir = place().join(format!("reward-{}", job.dir.file_name().expect("named").to_string_lossy()));
    std::fs::create_dir_all(&dir).expect("writes");
    let file = dir.join("reward.py");
    std::fs::write(&file, REWARD.replace("@RANK", &format!("\"{rank}\""))).expect("writes");
    let fails = dir.join("fails");
    let _ = std::fs::remove_file(&fails);
    let table = format!(r#"{{ file = "{}", batch = 0, pass_env = ["OMPI_COMM_WORLD_RANK"] }}"#, file.display());
    let job = job.with("reward.rule=[] reward.retries=1").set(format!("reward.python={table}"));
    (job, fails)
}

#[test]
fn a_reward_that_fails_on_one_rank_ends_the_run_with_a_checkpoint_and_the_rerun_goes_on_bitwise() {
    let sets = "job.steps=16 checkpoint.every_steps=0 eval.every_steps=0";
    let (whole, _) = with_reward(Job::ppo("reward-whole").on(2).with(sets), 1);
    let whole = whole.done();
    let (job, fails) = with_reward(Job::ppo("reward-fails").on(2).with(sets), 1);
    let mut running = job.start();
    running.wait_until(|| job.metrics().len() >= 2);
    std::fs::write(&fails, "").expect("writes");
    let since = Instant::now();
    let ended = running.end();
    assert!(since.elapsed().as_secs() < 10, "the end took {:?}", since.elapsed());
    ended.assert(
        75,
        &["error: ", "rank 1 (", "ValueError: the scorer is out of tea", "a checkpoint holds all work so far"],
    );
    let log = String::from_utf8(job.read("logs/rank-1.log")).expect("text");
    assert!(log.contains("the scorer is out of tea"), "{log}");
    let saved = newest(&job.checkpoints()).expect("whole").expect("it was saved although none was due");
    assert!(saved.file("work.bin").is_ok() && saved.manifest.step >= 2, "step {}", saved.manifest.step);
    assert_eq!(saved.manifest.step, job.metrics().len() as u64, "no finished step is lost");
    std::fs::remove_file(fails).expect("there");
    job.done().assert_same(&whole);
}

#[test]
fn a_reward_that_fails_in_an_evaluation_ends_the_run_with_a_checkpoint_and_the_rerun_evaluates() {
    let sets = "job.steps=2 checkpoint.every_steps=0 eval.every_steps=1";
    let (whole, _) = with_reward(Job::ppo("eval-whole").with(sets), 0);
    let whole = whole.done();
    let (job, fails) = with_reward(Job::ppo("eval-fails").with(sets), 0);
    // Scoring a training batch succeeds; the next one, of the evaluation, does not.
    let file = fails.with_file_name("reward.py");
    let text = std::fs::read_to_string(&file).expect("there");
    let only_eval = "    if len(queries) == 8 and os.path.exists(os.path.join(here, \"step1\")):\n        raise ValueError(\"no eval today\")\n    if len(queries) == 16 and os.path.exists(os.path.join(here, \"arm\")):\n        open(os.path.join(here, \"step1\"), \"w\").close()\n    return";
    std::fs::write(&file, text.replace("    return", only_eval)).expect("writes");
    let (arm, armed) = (fails.with_file_name("arm"), fails.with_file_name("step1"));
    std::fs::write(&arm, "").expect("writes");
    let _ = std::fs::remove_file(&armed);
    job.run().assert(75, &["ValueError: no eval today", "a checkpoint holds all work so far"]);
    assert_eq!(newest(&job.checkpoints()).expect("whole").expect("saved").manifest.step, 1);
    std::fs::remove_file(arm).expect("there");
    std::fs::remove_file(armed).expect("there");
    job.done().assert_same(&whole);
}

#[test]
fn nothing_is_learned_from_the_groups_of_responses_that_a_reward_fails_on_where_these_are_dropped() {
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
    let is_said = ended.stderr.contains("samples are dropped, as a reward failed on ");
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
}

/// A shell in a mount namespace of its own, where `place/small` is a file system of `size` bytes; none where the
/// system allows no such thing.
fn on_a_small_disk(size: &str, script: &str) -> Option<Command> {
    let small = place().join("small");
    std::fs::create_dir_all(&small).expect("writes");
    for flags in [&["-m"][..], &["-rm"][..]] {
        let mount = format!("mount -t tmpfs -o size={size} tmpfs {}", small.display());
        let mut command = Command::new("unshare");
        command.args(flags).args(["sh", "-c"]);
        let mut probe = Command::new("unshare");
        probe.args(flags).args(["sh", "-c", &mount]).stderr(Stdio::null());
        if probe.status().is_ok_and(|status| status.success()) {
            command.arg(format!("{mount} && {script}")).current_dir(place());
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
            return Some(command);
        }
    }
    None
}

/// `job` as a word of a shell script.
fn line(job: &Job) -> String {
    let command = job.command();
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| format!("'{}'", word.to_string_lossy())).collect::<Vec<_>>().join(" ")
}

/// A run is at work when something else takes all that is left on its disk.
#[test]
fn a_full_disk_is_an_io_error_and_leaves_the_older_checkpoints_whole() {
    let mut job = Job::ppo("disk").on(2).with("job.steps=100000 checkpoint.keep_last=3 metrics.rollouts_every_steps=0");
    job.dir = place().join("small/run");
    let kept = place().join("kept");
    let _ = std::fs::remove_dir_all(&kept);
    let script = format!(
        "export OMPI_MCA_mpi_yield_when_idle=1; {} & \
         while [ \"$(ls -d {run}/checkpoints/step-* 2>/dev/null | wc -l)\" -lt 3 ]; do \
         kill -0 $! || exit 99; sleep 0.02; done; \
         cat /dev/zero > {run}/filler 2>/dev/null; \
         wait $!; code=$?; cp -r {run}/checkpoints {kept}; cp -r {run}/logs {kept}/logs; exit $code",
        line(&job),
        run = job.dir.display(),
        kept = kept.display()
    );
    let Some(command) = on_a_small_disk("12m", &script) else {
        println!("not tried: this system mounts no tmpfs for us");
        return;
    };
    Running::new(command).end().assert(74, &["error: "]);
    let left = newest(&kept).expect("what is there verifies").expect("earlier checkpoints are there");
    assert!(left.manifest.step >= 3 && left.skipped.is_empty(), "step {}", left.manifest.step);
    let names: Vec<String> = std::fs::read_dir(&kept)
        .expect("lists")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    let steps: Vec<u64> = names.iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    assert!(steps.len() >= 3, "{names:?}");
    for step in steps {
        let older = rlhf_hpc::checkpoint::Checkpoint::open(&kept.join(format!("step-{step}"))).expect("committed");
        older.verify(&Group::one()).expect("whole");
    }
    assert!(!names.iter().any(|name| name.contains("partial")), "{names:?}");
}

#[test]
fn a_second_run_in_the_same_directory_is_refused_and_the_first_is_not_disturbed() {
    let sets = "job.steps=100000 checkpoint.every_steps=0 metrics.rollouts_every_steps=0 metrics.tensorboard=false";
    let job = Job::ppo("twice").with(sets);
    let mut first = job.start();
    first.wait_until(|| !job.metrics().is_empty());
    // The second waits some seconds for the first: cores are for other tests meanwhile.
    crate::resume::job::signal("STOP", first.pid());
    let second = job.clone().on(2).run();
    second.assert(2, &["is in use by another run (process ", "hint: wait for it to end, or set another job.dir"]);
    crate::resume::job::signal("CONT", first.pid());
    let steps = job.metrics().len();
    first.wait_until(|| job.metrics().len() > steps);
    crate::resume::job::signal("USR1", first.pid());
    let ended = first.end();
    ended.assert(85, &["stopped at step"]);
}

#[test]
fn rows_beyond_the_context_are_refused_before_the_first_step() {
    let long = "1+".repeat(200);
    let row =
        format!("{{\"prompt\": \"{long}\", \"response\": \"2\"}}\n{{\"prompt\": \"1+1=\", \"response\": \"2\"}}\n");
    std::fs::write(place().join("long.jsonl"), row).expect("writes");
    let data = "data.prompts=[\"long.jsonl\"] data.prompt_split= data.eval_split=";
    for job in [Job::ppo("long-prompt").on(2).with(data), Job::sft("long-row").with(data)] {
        job.run().assert(65, &["error: 1 rows do not fit the model's context of 256 tokens", "hint: set data."]);
        assert!(job.metrics().is_empty());
    }
    with_context("near", 64);
    for role in ["reference", "critic"] {
        let sets = format!("model.{role}=near data.prompt_tokens_max=20 rollout.response_tokens_max=50");
        let job = Job::ppo(&format!("near-{role}")).with(&sets);
        job.run().assert(65, &[&format!("rows of 70, model.{role} has a context of 64"), "hint: lower data."]);
    }
    Job::ppo("long-cut")
        .with(data)
        .with("job.steps=1 data.prompt_tokens_max=200 data.long_prompts=truncate_left")
        .done();
    Job::sft("long-row-cut").with(data).with("job.steps=1 data.row_tokens_max=200").done();
}
