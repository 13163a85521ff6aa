//! jobs/gsm8k: rows of openai/gsm8k, and the rows of verl's examples, are trained on without changes.

use super::command::rows;
use super::fixture::Fixture;
use crate::process::{Running, launched};
use serde_json::json;
use std::path::Path;

/// A small batch, and short responses.
const SMALL: &[&str] = &[
    "job.steps=1",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.response_tokens_max=4",
    "ppo.minibatch_samples=4",
    "eval.every_steps=1",
    "eval.samples_max=2",
    "job.threads=1",
];

#[test]
fn rows_of_gsm8k_train_in_both_forms_with_and_without_a_critic() {
    let fixture = Fixture::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in
        ["setup.sh", "arithmetic/compare.py", "gsm8k/run.sh", "gsm8k/rows.py", "gsm8k/grpo.toml", "gsm8k/ppo.toml"]
    {
        fixture.write(&format!("jobs/{name}"), std::fs::read(root.join("jobs").join(name)).expect("a file"));
    }
    fixture.edit("config.json", |config| config["max_position_embeddings"] = json!(1024));
    fixture.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "base"]).well();
    fixture.write("base/chat_template.jinja", "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}");
    let python = |arguments: &[&str]| {
        let mut command = launched(Path::new("python3"), 0);
        command.arg("jobs/gsm8k/rows.py").args(arguments).args(["--train", "12", "--test", "4"]);
        command.current_dir(fixture.root());
        Running::new(command).end().well();
    };
    python(&["--out", "verl"]);
    python(&["--out", "openai", "--form", "openai"]);
    let first = |file: &str| rows(&fixture.text(file)).swap_remove(0);
    let (verl, openai) = (first("verl/train.jsonl"), first("openai/train.jsonl"));
    assert!(
        openai["answer"]
            .as_str()
            .unwrap()
            .ends_with(&format!("\n#### {}", verl["reward_model"]["ground_truth"].as_str().unwrap()))
    );
    for (job, source, more) in
        [("grpo", "verl", "rollout.top_p=0.9"), ("ppo", "openai/train.jsonl", "rollout.samples_per_prompt=1")]
    {
        let mut command = launched(Path::new("bash"), 0);
        command.args(["jobs/gsm8k/run.sh", "base", source]).args(SMALL).arg(more).current_dir(fixture.root());
        command.env("RLHF_HPC", env!("CARGO_BIN_EXE_rlhf-hpc")).env("JOB", job).env_remove("FRESH").env_remove("RANKS");
        let ended = Running::new(command).end().well();
        assert!(ended.stdout.contains("held-out greedy"), "{}", ended.stdout);
        let line = rows(&fixture.text(&format!("jobs/gsm8k/work/{job}/metrics.jsonl"))).pop().unwrap();
        assert_eq!((&line["step"], line["grad_norm_critic"].is_number()), (&json!(1), job == "ppo"), "{line}");
        // The file of train and the one of test.
        assert!(ended.stderr.contains("12 train, 4 held out, 0 filtered"), "{}", ended.stderr);
        let has_base = ended.stderr.contains("ppo.toml, based on grpo.toml");
        assert_eq!(has_base, job == "ppo", "{}", ended.stderr);
    }
}
