//! Whole jobs over ranks that share each sequence: with the numbers of one rank, and of the CPU as near as bf16 allows.

use crate::jobs::{CONFIG, metrics, on_ranks, prepare, rlhf_hpc};
use crate::on_a_real_gpu;
use serde_json::Value;
use std::path::Path;

/// Weights large enough that attention shows in every number.
const SPREAD: (&str, &str) = ("\"hidden_size\": 64,", "\"hidden_size\": 64, \"initializer_range\": 0.2,");
/// Log-probabilities of the rollout's kernels and of the ring: other orders of sums, rounded to bf16 on the way. The same
/// bound as between a GPU and the CPU in f32 (`model.rs`).
const SAMPLER_GAP: f64 = 0.06;

fn of(step: &Value, key: &str) -> f64 {
    step[key].as_f64().unwrap_or_else(|| panic!("{key} in {step}"))
}

/// Numbers of each step as near as `share` of their size (at least 0.1) says, in all lines that have them.
fn near(what: &str, got: &[Value], want: &[Value], keys: &[&str], share: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for key in keys {
        let lines: Vec<_> = got.iter().zip(want).filter(|(_, want)| want.get(key).is_some()).collect();
        assert!(!lines.is_empty(), "{what}: no {key}");
        for (a, b) in lines {
            let (a, b) = (of(a, key), of(b, key));
            println!("{what}: {key} {a} against {b}");
            assert!((a - b).abs() <= share * b.abs().max(0.1), "{what}: {key} {a} against {b}");
        }
    }
}

fn directory(config: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    prepare(dir.path(), config);
    dir
}

const LAYOUTS: &[(usize, &[&str])] = &[
    (2, &["mesh.sequence=2"]),
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

fn skipped() -> bool {
    if on_a_real_gpu() {
        eprintln!("skipped: several ranks on a real GPU need the launcher of its machine");
    }
    on_a_real_gpu()
}

#[test]
fn supervised_tuning_has_the_numbers_of_one_rank_on_every_layout() {
    if skipped() {
        return;
    }
    let windowed = CONFIG
        .replace("LlamaForCausalLM", "MistralForCausalLM")
        .replace("\"llama\"", "\"mistral\", \"sliding_window\": 9");
    for config in [CONFIG.to_string(), windowed] {
        let dir = directory(&config.replace(SPREAD.0, SPREAD.1));
        let at = dir.path();
        let evaluated = ["data.split.by=field", "data.eval_split=eval", "eval.every_steps=3", "eval.samples_max=20"];
        let sets = [&["optim.actor.lr=1e-3"], &evaluated[..]].concat();
        let alone = run(at, 1, "sft.toml", &sets);
        let cpu = run(at, 1, "sft.toml", &[&["job.device=cpu"], &sets[..]].concat());
        for (what, got) in laid_out(at, "sft.toml", &sets, LAYOUTS.len()) {
            near(&what, &got, &alone, &["loss", "grad_norm", "eval_loss"], 4e-3);
            near(&what, &got, &cpu, &["loss", "grad_norm", "eval_loss"], 1e-2);
        }
    }
}

#[test]
fn ppo_scores_as_it_trains_and_has_the_numbers_of_one_rank_on_every_layout() {
    if skipped() {
        return;
    }
    let dir = directory(&CONFIG.replace(SPREAD.0, SPREAD.1));
    let at = dir.path();
    // A response of one token is predicted on one rank alone: the others' heads have no rows.
    for (sets, layouts) in
        [(&["ppo.loss=clip"][..], 4), (&["ppo.loss=gspo"], 2), (&["rollout.response_tokens_max=1"], 1)]
    {
        let sets = [&["model.actor=model", "job.steps=1"], sets].concat();
        let alone = run(at, 1, "ppo.toml", &sets);
        // Matrices that are cut are summed in another order, which draws other tokens.
        let cut = run(at, 2, "ppo.toml", &[&["mesh.tensor=2", "rollout.tensor=2"], &sets[..]].concat());
        for (what, got) in laid_out(at, "ppo.toml", &sets, layouts) {
            let want = if what.contains("mesh.tensor=2") { &cut } else { &alone };
            near(&what, &got, want, &["entropy", "value_mean", "advantage_mean", "grad_norm_critic"], 1e-2);
            for step in &got {
                assert_eq!(of(step, "logprob_gap_max"), 0.0, "{what}: training and scoring are of the same bits");
                let gap = of(step, "sampler_gap_max");
                assert!(gap <= SAMPLER_GAP, "{what}: {gap} from the rollout");
            }
        }
    }
}
