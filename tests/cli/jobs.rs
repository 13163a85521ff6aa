//! `jobs` and `schema`: starting points for your own job.

use super::command;
use super::fixture::Fixture;
use rlhf_hpc::config;
use serde_json::{Value, json};
use std::path::Path;

#[test]
fn every_recipe_is_copied_with_its_files_and_is_a_valid_job() {
    let fixture = Fixture::new();
    let listed = fixture.run(&["jobs"]).well();
    let names: Vec<&str> = listed.stdout.lines().map(|line| line.split("  ").next().expect("a name")).collect();
    assert_eq!(
        names,
        [
            "sft",
            "reward-model",
            "dpo",
            "kto",
            "step-reward",
            "distill",
            "distill-on-policy",
            "grpo",
            "dapo",
            "rloo",
            "remax",
            "reinforce++",
            "ppo-python-reward",
            "eval",
            "long-context",
            "ppo-7b",
            "slurm",
            "slurm-gpu",
            "gsm8k",
            "quickstart"
        ]
    );
    for name in names {
        let to = format!("copied/{name}/");
        let copied = fixture.run(&["jobs", "copy", name, "--to", &to]).well();
        assert!(copied.stderr.contains("change: ") && copied.stderr.contains("next:   "), "{}", copied.stderr);
        let file = copied.stderr.split(": the recipe").next().expect("a path").to_string();
        if name.starts_with("slurm") {
            assert!(file.ends_with(".sbatch") && fixture.text(&file).starts_with("#!/bin/bash"));
            assert!(copied.stderr.contains(&format!("sbatch {}", file.trim_start_matches(&to))), "{}", copied.stderr);
            assert!(fixture.path(&to).join("slurm.sh").is_file());
            continue;
        }
        let job = config::load(&fixture.path(&file), &[]).and_then(|job| job.check().map(|()| job));
        let job = job.unwrap_or_else(|e| panic!("{e}"));
        for python in job.reward.python {
            assert!(fixture.path(&to).join(python.file).is_file(), "{name}");
        }
        let again = fixture.run(&["jobs", "copy", name, "--to", &file]);
        again.refused(2, &["exists already"]);
    }
}

#[test]
fn an_existing_file_next_to_a_recipe_is_not_overwritten() {
    let fixture = Fixture::new();
    fixture.write("reward.py", "mine");
    let copied = fixture.run(&["jobs", "copy", "ppo-python-reward"]).well();
    assert!(copied.stderr.contains("reward.py: exists already"), "{}", copied.stderr);
    assert!(copied.stderr.contains("next:   rlhf-hpc run ppo-python-reward.toml --dry-run"), "{}", copied.stderr);
    assert_eq!(fixture.text("reward.py"), "mine");
}

#[test]
fn the_command_in_the_7b_recipe_plans_it_without_weights() {
    let fixture = Fixture::new();
    let copied = fixture.run(&["jobs", "copy", "ppo-7b", "--to", "big.toml"]).well();
    let next = copied.stderr.lines().find_map(|line| line.strip_prefix("next:   rlhf-hpc ")).expect("a command");
    // Fewer prompts make planning faster.
    let plan = fixture.run(&next.split(' ').chain(["rollout.prompts_per_step=128"]).collect::<Vec<_>>()).well();
    assert!(plan.stdout.contains("a800") && plan.stdout.contains("16 ranks"), "{}", plan.stdout);
}

/// Uses fewer prompts than the jobs have, and one layout instead of all open ones, which makes planning faster.
#[test]
fn the_jobs_of_the_batch_scripts_fit_the_gpus_that_the_scripts_request() {
    let fixture = Fixture::new();
    let jobs = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs");
    for (name, ranks, sets) in [
        ("grpo-7b", "8", &["rollout.prompts_per_step=16", "mesh.tensor=1", "rollout.tensor=1"][..]),
        ("long-context", "16", &[]),
        ("llama3-70b", "64", &["rollout.prompts_per_step=64", "mesh.tensor=8", "rollout.tensor=8"]),
    ] {
        let job = jobs.join(format!("{name}.toml")).display().to_string();
        let plan = ["plan", &job, "--ranks", ranks, "--gpu", "a800-80g"];
        let plan = fixture.run(&[&plan[..], sets].concat()).well();
        assert!(plan.stdout.contains(&format!(" on {ranks} ranks of a800-80g")), "{name}: {}", plan.stdout);
    }
}

/// The job itself with models of Llama-2-7B's shape at 1/1000 of its 6.74 billion parameters, and shorter steps.
#[test]
fn the_7b_recipe_runs_at_a_thousandth_of_its_size_on_4_ranks() {
    let fixture = Fixture::new();
    let jobs = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs");
    for model in ["llama2-7b-sft", "llama2-7b-rm"] {
        let config = std::fs::read(jobs.join("models").join(model).join("config.json")).expect("it is checked in");
        let mut config: Value = serde_json::from_slice(&config).expect("JSON");
        for (key, value) in [
            ("hidden_size", 256),
            ("intermediate_size", 688),
            ("num_hidden_layers", 8),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 8),
            ("vocab_size", 800),
        ] {
            config[key] = json!(value);
        }
        fixture.write("small.json", config.to_string());
        let made = fixture.run(&["init", "--config", "small.json", "--tokenizer", "tokenizer", "--out", model]).well();
        assert!(model.ends_with("rm") || made.stderr.contains("6738176 parameters"), "{}", made.stderr);
    }
    let job = jobs.join("llama2-7b.toml").display().to_string();
    let ended = command::mpirun(
        fixture.root(),
        4,
        &[
            &job,
            "job.device=cpu",
            "job.dir=run",
            "job.steps=2",
            "job.threads=1",
            "model.actor=llama2-7b-sft",
            "model.reference=llama2-7b-sft",
            "model.critic=llama2-7b-rm",
            "reward.models=llama2-7b-rm",
            "mesh.placement=[{roles=[\"actor\",\"reference\"],ranks=\"0..2\"},{roles=[\"critic\",\"reward\"],ranks=\"2..4\"}]",
            "data.prompts=[\"questions\"]",
            "data.eval_split=eval",
            "rollout.prompts_per_step=8",
            "rollout.response_tokens_max=8",
            "ppo.minibatch_samples=4",
        ],
    );
    ended.well();
    let lines = command::rows(&fixture.text("run/metrics.jsonl"));
    let numbers = |key: &str| lines.iter().filter_map(|line| line[key].as_f64()).collect::<Vec<f64>>();
    assert_eq!(numbers("logprob_gap_max"), [0.0, 0.0]);
    // A metric of each step is the score of the reward model.
    let (scores, spread) = (numbers("score_mean"), numbers("reward_std"));
    assert!(scores.len() == 2 && scores[0] != 0.0 && spread.iter().all(|std| *std > 0.0), "{scores:?}, {spread:?}");
    // Before the first step and after the last.
    assert_eq!(numbers("eval_reward_mean").len(), 2);
    assert!(fixture.path("run/export/model.safetensors").exists());
}

#[test]
fn a_step_that_would_take_hours_on_cpus_is_rejected_if_the_device_is_automatic() {
    let fixture = Fixture::new();
    fixture.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "big"]).well();
    // As many parameters as a 7B model, in few layers, which makes planning faster.
    fixture.edit("big/config.json", |config| {
        for (key, value) in [
            ("hidden_size", 16384),
            ("intermediate_size", 65536),
            ("num_attention_heads", 128),
            ("num_key_value_heads", 128),
            ("max_position_embeddings", 4096),
        ] {
            config[key] = json!(value);
        }
    });
    std::fs::remove_file(fixture.path("big/model.safetensors")).expect("it has weights");
    let sets = ["model.actor=big", "rollout.response_tokens_max=500", "rollout.prompts_per_step=64"];
    let run = |device| fixture.run(&[&["run", "job.toml", "--dry-run", device][..], &sets].concat());
    let open = run("job.device=auto");
    assert!(open.stderr.contains("hours, according to the plan"), "{}", open.stderr);
    open.refused(2, &["no GPU: ", "on these CPUs a step would take about "]).hinted("job.device = \"cpu\"");
    // A job with device = "cpu" gets CPUs, and then fails as this model has no weights.
    let asked = run("job.device=cpu");
    assert!(asked.stderr.contains("safetensors") && !asked.stderr.contains("hours"), "{}", asked.stderr);
}

#[test]
fn schema_prints_the_schema_of_a_job_as_json() {
    let printed = Fixture::new().run(&["schema"]).well().stdout;
    assert_eq!(serde_json::from_str::<serde_json::Value>(&printed).expect("JSON"), config::schema());
}
