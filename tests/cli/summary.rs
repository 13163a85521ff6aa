//! What a run shows at its start and at its end, and what a dry run checks.

use super::fixture::Fixture;
use serde_json::{Value, json};
use std::fs;

/// `2.5 MiB` in bytes.
fn bytes(text: &str) -> f64 {
    let (number, unit) = text.trim().split_once(' ').expect("a number and a unit");
    let power = ["bytes", "KiB", "MiB", "GiB"].iter().position(|name| *name == unit).expect("a unit");
    number.parse::<f64>().expect("a number") * 1024f64.powi(power as i32)
}

#[test]
fn the_parts_of_the_planned_memory_add_up() {
    let ended = Fixture::new().job(&["--dry-run"]).well();
    let line = ended.stderr.lines().find(|line| line.contains("planned per rank: ")).expect("a row of the banner");
    let (all, parts) = line.trim().trim_start_matches("memory").split_once("planned per rank: ").expect("both");
    let parts: f64 =
        parts.split(", ").map(|part| bytes(&part[part.find(|c: char| c.is_ascii_digit()).unwrap()..])).sum();
    let all = bytes(all);
    // Each is shown with two digits or more.
    assert!((parts - all).abs() < 0.03 * all, "{line}");
}

#[test]
fn a_start_without_new_steps_reports_that_and_a_dry_run_resumes_nothing() {
    let fixture = Fixture::new();
    fixture.job(&[]).well().assert(0, &["\n2 steps in "]);
    let dry = fixture.job(&["--dry-run", "job.steps=3"]).well();
    assert!(dry.stderr.contains(", would resume from step 2\n"), "{}", dry.stderr);
    let again = fixture.job(&[]).well();
    again.assert(0, &["nothing left to do", "\nno new steps; 2 steps in total\n"]);
    let more = fixture.job(&["job.steps=3"]).well();
    assert!(more.stderr.contains("\n1 step in ") && more.stderr.contains(", 3 in total\n"), "{}", more.stderr);
}

#[test]
fn a_run_with_steps_lowered_to_the_finished_ones_ends_with_its_evaluation() {
    let fixture = Fixture::new();
    fixture.job(&["job.steps=4", "eval.every_steps=4"]).well();
    let checkpoints = fixture.path("run/checkpoints");
    fs::remove_dir_all(checkpoints.join("step-4")).expect("the last checkpoint");
    let ended = fixture.job(&["job.steps=3", "eval.every_steps=4"]).well();
    assert!(!ended.stderr.contains("nothing left"), "{}", ended.stderr);
    let metrics = fixture.text("run/metrics.jsonl");
    let lines: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let evaluated = |step: u64| lines.iter().any(|line| line["step"] == step && line["eval_samples"].is_number());
    assert_eq!([0, 3, 4].map(evaluated), [true, true, false], "{metrics}");
    fixture.job(&["job.steps=3", "eval.every_steps=4"]).well().assert(0, &["nothing left to do"]);
}

#[test]
fn a_run_without_a_name_is_named_after_its_directory() {
    let fixture = Fixture::new();
    let title = |sets: &[&str]| {
        let ended = fixture.job(&[&["--dry-run"], sets].concat()).well();
        ended.stderr.lines().next().expect("a title").to_string()
    };
    assert!(title(&["job.dir=runs/short/"]).ends_with("  PPO  short"));
    assert!(title(&["job.dir=a", "job.name=given"]).ends_with("  PPO  given"));
}

#[test]
fn an_evaluation_of_all_rows_shows_their_key_and_mean_scores() {
    let fixture = Fixture::new();
    let whole = ["job.kind=eval", "data.prompt_split=", "data.eval_split="];
    let ended = fixture.job(&whole).well();
    assert!(ended.stderr.contains("\n  data.prompts  ") && !ended.stderr.contains("eval split"), "{}", ended.stderr);
    // A single value has no curve.
    assert!(!ended.stderr.contains(" ->"), "{}", ended.stderr);
    let samples = fixture.run(&["samples", "run"]).well();
    assert!(samples.stdout.contains("correct, score ") && !samples.stdout.contains("margin"), "{}", samples.stdout);
    let ended = fixture.job(&["job.kind=eval", "job.dir=split"]).well();
    assert!(ended.stderr.contains("eval split"), "{}", ended.stderr);
}

#[test]
fn a_dry_run_of_a_job_for_gpus_checks_the_rest_on_a_machine_without_one() {
    let fixture = Fixture::new();
    // Kernels support heads of 32 and more.
    fixture.edit("config.json", |config| {
        (config["num_attention_heads"], config["num_key_value_heads"]) = (json!(1), json!(1));
    });
    let init = "init --config config.json --tokenizer tokenizer --out wide";
    fixture.run(&init.split(' ').collect::<Vec<_>>()).well();
    let dry = |sets: &[&str]| {
        fixture.job(&[&["--dry-run", "job.device=gpu", "model.actor=wide", "job.collectives=nccl"], sets].concat())
    };
    if fixture.run(&["info"]).well().stdout.contains("computing on the CPU") {
        let ended = dry(&[]).well();
        ended.assert(0, &["warning: no GPU: ", "not checked: GPU, memory", "checked without a GPU: ", "the first row"]);
        dry(&["job.steps=0"]).refused(2, &["job.steps must be at least 1"]);
        dry(&["model.actor=model"]).refused(2, &["head dim"]);
        dry(&["data.prompts=missing.jsonl"]).refused(65, &["missing.jsonl"]);
        dry(&["model.dtype=f32"]).refused(2, &["model.dtype"]);
        fixture.write("broken.py", "raise ValueError('nothing')");
        dry(&["reward.python=broken.py", "reward.retries=0"]).refused(2, &["nothing"]);
        assert!(!fixture.path("run").join("metrics.jsonl").exists());
    }
}

#[test]
fn a_dry_run_that_was_started_alone_checks_a_job_for_several_ranks() {
    let fixture = Fixture::new();
    let placed =
        r#"mesh.placement=[{roles=["actor","reference"],ranks="0..2"},{roles=["critic","reward"],ranks="2..4"}]"#;
    let said = [
        "checked without the other 3 ranks: settings, models",
        "the job needs 4 ranks",
        "--ranks 4",
        "ready to start on 4 ranks",
    ];
    for layout in [&[placed][..], &["mesh.tensor=4"], &["mesh.data=2", "mesh.sequence=2"]] {
        fixture.job(&[&["--dry-run"], layout].concat()).well().assert(0, &said);
    }
    let gap = placed.replace("2..4", "3..4");
    fixture.job(&["--dry-run", &gap]).refused(2, &["rank 2 is in no range"]);
    fixture.job(&["--dry-run", &placed.replace(",\"reward\"", "")]).refused(2, &["no place for the reward"]);
    // Without --dry-run the ranks are needed.
    fixture.job(&["mesh.tensor=4"]).refused(2, &["needs 4 ranks, but mpirun started 1"]);
}

#[test]
fn a_job_without_rows_is_rejected_with_the_filter_that_removed_them() {
    let fixture = Fixture::new();
    let sets = ["data.eval_split=", "data.eval_sets=[{ name = \"all\", prompts = \"questions\" }]"];
    let again = fixture.job(&[&["--dry-run"], &sets[..]].concat()).refused(65, &["no rows are left to train on"]);
    again.hinted("name a held-out file only in data.split.eval_files or data.eval_sets");
    let long = fixture.job(&["--dry-run", "data.prompt_tokens_max=1", "data.eval_split="]);
    long.refused(65, &["no rows are left to train on"]).hinted("raise data.prompt_tokens_max");
}

#[test]
fn dynamic_sampling_without_a_reward_is_rejected() {
    let fixture = Fixture::new();
    let sets = [
        "job.kind=distill",
        "model.teachers=model",
        "distill.on_policy=true",
        "reward.rule=[]",
        "rollout.samples_per_prompt=2",
        "rollout.dynamic_sampling.prompts_max_factor=4",
    ];
    fixture.job(&sets).refused(2, &["no reward is set"]).hinted("[reward]");
}

#[test]
fn texts_of_a_model_with_a_short_context_are_planned() {
    let fixture = Fixture::new();
    fixture.jsonl("texts.jsonl", &(0..9).map(|i| json!({"text": format!("text {i}")})).collect::<Vec<_>>());
    let sets = ["job.kind=sft", "data.prompts=demonstrations", "data.pretrain=texts.jsonl", "sft.pretrain_coef=0.5"];
    let plan = fixture.run(&[&["plan", "job.toml", "--ranks", "1"], &sets[..]].concat()).well();
    assert!(plan.stdout.contains("weights"), "{}", plan.stdout);
    let ended = fixture.job(&[&["--dry-run"], &sets[..]].concat()).well();
    assert!(ended.stderr.contains("planned per rank: weights"), "{}", ended.stderr);
}

#[test]
fn a_lone_test_split_causes_a_warning_and_an_empty_evaluation_split_a_hint() {
    let fixture = Fixture::new();
    let rows: Vec<Value> = (0..9).map(|i| json!({"prompt": format!("{i}+1="), "answer": i + 1})).collect();
    fixture.jsonl("rows/test.jsonl", &rows);
    let base = ["--dry-run", "data.prompts=rows", "data.prompt_split=", "eval.every_steps=0"];
    let dry = |sets: &[&str]| fixture.job(&[&base[..], sets].concat());
    let warned = dry(&["data.eval_split="]).well();
    warned.assert(0, &["rows has no split but test, which is usually held out: its rows are used for training\n"]);
    fixture.jsonl("rows/train.jsonl", &rows);
    let both = dry(&["data.prompt_split=train", "data.eval_split="]).well();
    assert!(!both.stderr.contains("usually held out"), "{}", both.stderr);
    let long = json!({"prompt": "1+1=".repeat(20), "answer": 2});
    fixture.jsonl("rows/test.jsonl", &[long]);
    let refused = dry(&["data.prompt_split=train", "data.eval_split=test"]);
    refused
        .refused(65, &["no rows to evaluate"])
        .hinted("these held-out rows are too long: raise data.prompt_tokens_max");
}

#[test]
fn a_plan_warns_of_keys_without_effect_as_a_run_does() {
    let fixture = Fixture::new();
    let warning = "warning: keys of the job that have no effect in it: dpo.beta (needs ";
    fixture.run(&["plan", "job.toml", "--ranks", "1", "--json", "dpo.beta=0.3"]).well().assert(0, &[warning]);
    fixture.job(&["--dry-run", "dpo.beta=0.3"]).well().assert(0, &[warning]);
}
