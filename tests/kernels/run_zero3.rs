//! Whole jobs on GPUs whose weights are divided, whose rollout is laid out otherwise than their training, or whose gradients
//! are summed in one order on any number of ranks.

use crate::jobs::{metrics, on_ranks, prepare, rlhf_hpc};
use crate::on_a_real_gpu;
use serde_json::{Map, Value};
use std::path::Path;
use tempfile::TempDir;

/// Several units, and what several tensor ranks share of each: four query heads to two of keys.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
 "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
 "vocab_size": 265, "max_position_embeddings": 128, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "bos_token_id": 0, "eos_token_id": 1}"#;

/// The directory of the jobs; none where this machine's launcher would be needed for a real GPU.
fn jobs() -> Option<TempDir> {
    if on_a_real_gpu() {
        eprintln!("skipped: several ranks on a real GPU need the launcher of its machine");
        return None;
    }
    let dir = tempfile::tempdir().expect("a directory");
    prepare(dir.path(), CONFIG);
    Some(dir)
}

/// Runs a job on `ranks` ranks with further settings, into a directory of its own.
fn run(at: &Path, job: &str, ranks: usize, dir: &str, sets: &str) {
    let dir = format!("job.dir={dir}");
    let args: Vec<&str> = ["run", job, &dir].into_iter().chain(sets.split_whitespace()).collect();
    if ranks == 1 { rlhf_hpc(at, &args) } else { on_ranks(ranks, at, &args, &[]) }
}

/// What of each line does not tell of times, memory, or the way that weights took.
fn numbers(at: &Path, dir: &str) -> Vec<Map<String, Value>> {
    let lines = metrics(at, dir).into_iter().map(|line| line.as_object().expect("an object").clone());
    let elsewhere = |key: &str| {
        key.contains("time_")
            || key.ends_with("per_s")
            || key.starts_with("memory_")
            || key.starts_with("gpu_")
            || key == "reshard_bytes"
    };
    lines.map(|line| line.into_iter().filter(|(key, _)| !elsewhere(key)).collect()).collect()
}

/// Two runs that must not differ in a bit: their numbers, and the model that they leave.
fn assert_same(at: &Path, one: &str, other: &str) {
    assert_eq!(numbers(at, one), numbers(at, other), "{one} and {other}");
    let export = |dir: &str| std::fs::read(at.join(dir).join("export/model.safetensors")).expect("an export");
    assert!(export(one) == export(other), "{one} and {other}: exported weights");
}

fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("no {key} in {line}"))
}

fn assert_near(got: &[Value], want: &[Value], key: &str, off: f64) {
    assert_eq!(got.len(), want.len());
    for (a, b) in got.iter().zip(want) {
        let (a, b) = (number(a, key), number(b, key));
        assert!((a - b).abs() < off * b.abs().max(0.02), "{key}: {a} against {b}");
    }
}

#[test]
fn jobs_with_divided_weights_are_those_with_divided_gradients_to_the_bit() {
    let Some(dir) = jobs() else { return };
    let at = dir.path();
    rlhf_hpc(at, &["run", "sft.toml"]);
    for (job, ranks, mesh) in [
        ("sft.toml", 4, "mesh.data=2 mesh.tensor=2"),
        ("ppo.toml", 2, "mesh.data=2 mesh.tensor=1 gradient.recompute=true"),
    ] {
        for stage in [2, 3] {
            run(at, job, ranks, &format!("{job}-{ranks}-{stage}"), &format!("{mesh} mesh.zero={stage}"));
        }
        let [divided, gradients] = [3, 2].map(|stage| format!("{job}-{ranks}-{stage}"));
        assert_same(at, &divided, &gradients);
        for line in metrics(at, &divided).iter().filter(|_| job == "ppo.toml") {
            assert_eq!(number(line, "logprob_gap_max"), 0.0, "weights brought together draw what training computes");
            assert!(number(line, "reshard_bytes") > 0.0 && number(line, "time_reshard_s") > 0.0, "{line}");
        }
    }
}

#[test]
fn a_checkpoint_of_divided_weights_goes_on_on_one_rank_on_the_cpu_and_in_another_layout() {
    let Some(dir) = jobs() else { return };
    let at = dir.path();
    run(at, "sft.toml", 4, "four", "mesh.data=4 mesh.tensor=1 mesh.zero=3");
    let begun = metrics(at, "four");
    for (ranks, dir, sets) in [
        (4, "four-on", "mesh.data=4 mesh.tensor=1 mesh.zero=3"),
        (1, "one-on", ""),
        (1, "cpu-on", "job.device=cpu"),
        (4, "cut-on", "mesh.data=2 mesh.tensor=2 mesh.zero=3"),
    ] {
        copied(&at.join("four"), &at.join(dir));
        run(at, "sft.toml", ranks, dir, &format!("{sets} job.steps=5"));
        let all = metrics(at, dir);
        assert_eq!((all.len(), &all[..3]), (5, &begun[..]), "{dir} goes on where four ranks stopped");
    }
    let want = metrics(at, "four-on");
    for dir in ["one-on", "cut-on", "cpu-on"] {
        for key in ["loss", "grad_norm"] {
            assert_near(&metrics(at, dir), &want, key, 0.02);
        }
    }
    // Export does not ask how its run was laid out: after no further step it is that of the run.
    for (ranks, dir, sets) in [(1, "one-more", ""), (2, "two-more", "mesh.data=1 mesh.tensor=2")] {
        copied(&at.join("four"), &at.join(dir));
        std::fs::remove_dir_all(at.join(dir).join("export")).expect("an export");
        run(at, "sft.toml", ranks, dir, sets);
        assert_same(at, dir, "four");
    }
}

/// A copy of a run's directory.
fn copied(from: &Path, to: &Path) {
    let done = std::process::Command::new("cp").arg("-r").args([from, to]).status().expect("cp starts");
    assert!(done.success(), "{} to {}", from.display(), to.display());
}

#[test]
fn a_rollout_in_a_layout_of_its_own_is_trained_as_exactly_as_one_in_training_s() {
    let Some(dir) = jobs() else { return };
    let at = dir.path();
    rlhf_hpc(at, &["run", "sft.toml"]);
    run(at, "ppo.toml", 1, "alone", "job.steps=1");
    for (dir, ranks, sets, travels) in [
        ("cut", 4, "mesh.data=4 mesh.tensor=1 mesh.zero=3 rollout.tensor=2 rollout.data=2", true),
        ("kept", 2, "mesh.data=2 mesh.tensor=1 mesh.zero=2 rollout.tensor=2 job.steps=1", false),
        ("joined", 2, "mesh.tensor=2 mesh.data=1 rollout.tensor=1 job.steps=1", true),
        ("other", 4, "mesh.tensor=2 mesh.data=2 mesh.zero=3 rollout.tensor=4 job.steps=1", true),
    ] {
        run(at, "ppo.toml", ranks, dir, sets);
        let lines = metrics(at, dir);
        for line in &lines {
            assert_eq!(number(line, "logprob_gap_max"), 0.0, "{dir}: {line}");
            assert_eq!(number(line, "reshard_bytes") > 0.0, travels, "{dir}: {line}");
            // Sums over a cut matrix are others: what sampling recorded is computed again where it is trained.
            assert!(
                number(line, "time_old_logprobs_s") > 0.0 && number(line, "sampler_gap_max") < 0.1,
                "{dir}: {line}"
            );
        }
        let alone = metrics(at, "alone");
        for key in ["entropy", "grad_norm_actor", "grad_norm_critic"] {
            assert_near(&lines[..1], &alone[..1], key, 0.05);
        }
    }
}

#[test]
fn in_fixed_order_whole_runs_on_one_two_and_four_ranks_are_one_run() {
    let Some(dir) = jobs() else { return };
    let at = dir.path();
    rlhf_hpc(at, &["run", "sft.toml"]);
    // A schedule that does not follow job.steps.
    let fixed = "gradient.order=fixed gradient.chunks=4 mesh.tensor=1 optim.actor.schedule=constant \
                 optim.actor.warmup_ratio=0.0";
    for (job, steps, layouts) in [("sft.toml", 3, [(2, 0), (4, 1)]), ("ppo.toml", 1, [(2, 1), (4, 0)])] {
        let run_on = |ranks: usize, stage: usize| {
            let dir = format!("{job}-{ranks}");
            run(at, job, ranks, &dir, &format!("{fixed} mesh.data={ranks} mesh.zero={stage} job.steps={steps}"));
            dir
        };
        let alone = run_on(1, 0);
        for (ranks, stage) in layouts {
            assert_same(at, &run_on(ranks, stage), &alone);
        }
    }
    run(at, "sft.toml", 4, "moved", &format!("{fixed} mesh.data=4 mesh.zero=1 job.steps=2"));
    run(at, "sft.toml", 2, "moved", &format!("{fixed} mesh.data=2 mesh.zero=0"));
    assert_same(at, "moved", "sft.toml-1");
}
