//! Whole jobs over ranks that share each sequence: with the numbers of one rank, and of the CPU as near as bf16 allows.

use crate::jobs::{CONFIG, assert_near, metrics, number, on_ranks, prepared, rlhf_hpc, skipped};
use serde_json::Value;
use std::path::Path;

/// Weights large enough that attention shows in every number.
const SPREAD: (&str, &str) = ("\"hidden_size\": 64,", "\"hidden_size\": 64, \"initializer_range\": 0.2,");
/// Log-probabilities of the rollout's kernels and of the ring: other orders of sums, rounded to bf16 on the way. The same
/// bound as between a GPU and the CPU in f32 (`model.rs`).
const SAMPLER_GAP: f64 = 0.06;

const LAYOUTS: &[(usize, &[&str])] = &[
    (4, &["mesh.sequence=2", "mesh.tensor=2", "mesh.zero=1", "rollout.tensor=2"]),
    (4, &["mesh.sequence=2", "mesh.data=2", "mesh.zero=3"]),
    (4, &["mesh.sequence=4", "mesh.zero=2"]),
];

/// The job `job` with `sets` on the first `count` layouts: (layout, its metrics).
fn laid_out(dir: &Path, job: &str, sets: &[&str], count: usize) -> Vec<(String, Vec<Value>)> {
    let run = |(ranks, layout): &(usize, &[&str])| {
        let name = format!("{job} {layout:?} {sets:?}");
        (name, run(dir, *ranks, job, &[*layout, sets].concat()))
    };
    LAYOUTS.iter().take(count).map(run).collect()
}

/// The metrics of a job in a directory of its own.
fn run(dir: &Path, ranks: usize, job: &str, sets: &[&str]) -> Vec<Value> {
    let _ = std::fs::remove_dir_all(dir.join("run"));
    let args = [&["run", job, "job.dir=run"], sets].concat();
    if ranks == 1 {
        rlhf_hpc(dir, &args);
    } else {
        on_ranks(ranks, dir, &args, &[]);
    }
    metrics(dir, "run")
}

#[test]
fn supervised_tuning_has_the_numbers_of_one_rank_on_every_layout() {
    if skipped() {
        return;
    }
    let windowed = CONFIG
        .replace("LlamaForCausalLM", "MistralForCausalLM")
        .replace("\"llama\"", "\"mistral\", \"sliding_window\": 9");
    for (config, layouts) in [(CONFIG, LAYOUTS.len()), (&windowed, 1)] {
        let dir = prepared(&config.replace(SPREAD.0, SPREAD.1));
        let at = dir.path();
        let evaluated = ["data.split.by=field", "data.eval_split=eval", "eval.every_steps=2", "eval.samples_max=20"];
        let sets = [&["optim.actor.lr=1e-3", "job.steps=2"], &evaluated[..]].concat();
        let alone = run(at, 1, "sft.toml", &sets);
        let cpu = run(at, 1, "sft.toml", &[&["job.device=cpu"], &sets[..]].concat());
        for (what, got) in laid_out(at, "sft.toml", &sets, layouts) {
            assert_near(&what, &got, &alone, &["loss", "grad_norm", "eval_loss"], (4e-3, 0.1));
            assert_near(&what, &got, &cpu, &["loss", "grad_norm", "eval_loss"], (1e-2, 0.1));
        }
    }
}

#[test]
fn ppo_scores_as_it_trains_and_has_the_numbers_of_one_rank_on_every_layout() {
    if skipped() {
        return;
    }
    let dir = prepared(&CONFIG.replace(SPREAD.0, SPREAD.1));
    let at = dir.path();
    // A response of one token is predicted on one rank alone: the others' heads have no rows.
    for (sets, layouts) in [("ppo.loss=clip", LAYOUTS.len()), ("rollout.response_tokens_max=1", 1)] {
        let sets = ["model.actor=model", "job.steps=1", sets];
        let alone = run(at, 1, "ppo.toml", &sets);
        // Matrices that are cut are summed in another order, which draws other tokens.
        let cut = run(at, 2, "ppo.toml", &[&["mesh.tensor=2", "rollout.tensor=2"], &sets[..]].concat());
        for (what, got) in laid_out(at, "ppo.toml", &sets, layouts) {
            let want = if what.contains("mesh.tensor=2") { &cut } else { &alone };
            assert_near(
                &what,
                &got,
                want,
                &["entropy", "value_mean", "advantage_mean", "grad_norm_critic"],
                (1e-2, 0.1),
            );
            for step in &got {
                assert_eq!(number(step, "logprob_gap_max"), 0.0, "{what}: training and scoring are of the same bits");
                let gap = number(step, "sampler_gap_max");
                assert!(gap <= SAMPLER_GAP, "{what}: {gap} from the rollout");
            }
        }
    }
}
