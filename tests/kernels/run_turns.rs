//! Jobs on GPUs without training on fixed responses: turns of an environment, and evaluation jobs.

use crate::jobs::{CONFIG, assert_near, assert_same, command, emulated, metrics, number, well};
use rlhf_hpc::metrics::eval_rows;
use serde_json::Value;
use std::path::Path;

/// An environment that returns the length of a turn, and ends after the third.
const ENVIRONMENT: &str = r#"
class Lengths:
    def reset(self, prompt, sample):
        self.turns = 0
    def step(self, text, tokens):
        self.turns += 1
        return f"({len(tokens)})", float(len(tokens) % 2), self.turns == 3
"#;

/// The metrics of a job on `ranks` ranks in a directory of its own.
fn run(at: &Path, ranks: usize, dir: &str, sets: &str) -> Vec<Value> {
    well(&mut command(ranks, at, &format!("run ppo.toml job.dir={dir} {sets}")));
    metrics(at, dir)
}

#[test]
fn turns_of_an_environment_have_the_bits_of_training_on_one_gpu_and_on_two() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    std::fs::write(at.join("lengths.py"), ENVIRONMENT).expect("a file");
    let turns = "reward.rule=[] reward.environment={python=\"lengths.py\",turns_max=3} rollout.response_tokens_max=30 \
                 rollout.stop_token_ids=[40,41,42,43,44,45,46,47,48,49] gradient.order=fixed job.steps=2";
    let alone = run(at, 1, "alone", turns);
    for step in &alone {
        assert_eq!(number(step, "logprob_gap_max"), 0.0, "{step}");
        assert!(number(step, "reward/turns") > 1.0, "{step}");
    }
    run(at, 2, "two", &format!("{turns} job.collectives=nccl mesh.tensor=1 mesh.zero=1"));
    assert_same(at, "two", "alone");
}

#[test]
fn an_evaluation_job_answers_equally_on_several_gpus_on_one_and_on_the_cpu() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let sets = "job.kind=eval data.split.by=field data.eval_split=eval eval.samples_max=6 eval.samples_per_prompt=2 \
                eval.temperature=0.7 rollout.response_tokens_max=12 job.seed=3";
    let alone = run(at, 1, "alone", sets);
    let rows = |dir: &str| eval_rows::read(&at.join(dir), 0).expect("rows");
    assert_eq!(rows("alone").len(), 6);
    for (name, ranks, mesh) in [("two", 2, "mesh.tensor=1"), ("sharded", 2, "mesh.zero=3 mesh.tensor=1")] {
        run(at, ranks, name, &format!("{sets} job.collectives=nccl {mesh}"));
        assert_eq!(rows(name), rows("alone"), "{name}");
    }
    let cpu = run(at, 1, "cpu", &format!("{sets} job.device=cpu"));
    assert_near("cpu", &cpu, &alone, &["eval_reward_mean", "eval_response_tokens_mean"], (0.1, 0.1));
}
