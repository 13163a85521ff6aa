//! Whole jobs on GPUs whose weights are divided, whose rollout is laid out otherwise than their training, or whose gradients
//! are summed in one order on any number of ranks.

use crate::jobs::{assert_near, assert_same, metrics, number, on_ranks, prepared, rlhf_hpc, skipped};
use std::path::Path;

/// Several units, and what several tensor ranks share of each: four query heads to two of keys.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
 "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
 "vocab_size": 265, "max_position_embeddings": 128, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "bos_token_id": 0, "eos_token_id": 1}"#;

/// Runs a job on `ranks` ranks with further settings, into a directory of its own.
fn run(at: &Path, job: &str, ranks: usize, dir: &str, sets: &str) {
    let dir = format!("job.dir={dir}");
    let args: Vec<&str> = ["run", job, &dir].into_iter().chain(sets.split_whitespace()).collect();
    if ranks == 1 { rlhf_hpc(at, &args) } else { on_ranks(ranks, at, &args, &[]) }
}

#[test]
fn jobs_with_divided_weights_are_those_with_divided_gradients_to_the_bit() {
    if skipped() {
        return;
    }
    let dir = prepared(CONFIG);
    let at = dir.path();
    for (job, ranks, mesh) in [
        ("sft.toml", 4, "mesh.data=2 mesh.tensor=2 job.steps=2"),
        ("ppo.toml", 2, "mesh.data=2 mesh.tensor=1 gradient.recompute=true model.actor=model job.steps=1"),
    ] {
        let [divided, gradients] = [3, 2].map(|stage| format!("{job}-{stage}"));
        run(at, job, ranks, &divided, &format!("{mesh} mesh.zero=3"));
        run(at, job, ranks, &gradients, &format!("{mesh} mesh.zero=2"));
        assert_same(at, &divided, &gradients);
        for line in metrics(at, &divided).iter().filter(|_| job == "ppo.toml") {
            assert_eq!(number(line, "logprob_gap_max"), 0.0, "weights brought together draw what training computes");
            assert!(number(line, "reshard_bytes") > 0.0 && number(line, "time_reshard_s") > 0.0, "{line}");
        }
    }
}

#[test]
fn a_checkpoint_of_divided_weights_goes_on_on_the_cpu_and_in_another_layout() {
    if skipped() {
        return;
    }
    let dir = prepared(CONFIG);
    let at = dir.path();
    run(at, "sft.toml", 4, "four", "mesh.data=4 mesh.tensor=1 mesh.zero=3 job.steps=2");
    let begun = metrics(at, "four");
    for (ranks, dir, sets) in [
        (4, "four-on", "mesh.data=4 mesh.tensor=1 mesh.zero=3"),
        (1, "cpu-on", "job.device=cpu"),
        (2, "cut-on", "mesh.data=1 mesh.tensor=2"),
    ] {
        copied(&at.join("four"), &at.join(dir));
        run(at, "sft.toml", ranks, dir, &format!("{sets} job.steps=3"));
        let all = metrics(at, dir);
        assert_eq!((all.len(), &all[..2]), (3, &begun[..]), "{dir} goes on where four ranks stopped");
    }
    let want = metrics(at, "four-on");
    for dir in ["cut-on", "cpu-on"] {
        assert_near(dir, &metrics(at, dir), &want, &["loss", "grad_norm"], (0.02, 0.02));
    }
    // Export does not ask how its run was laid out: after no further step it is that of the run.
    copied(&at.join("four"), &at.join("more"));
    std::fs::remove_dir_all(at.join("more/export")).expect("an export");
    run(at, "sft.toml", 1, "more", "job.steps=2");
    assert_same(at, "more", "four");
}

/// A copy of a run's directory.
fn copied(from: &Path, to: &Path) {
    let done = std::process::Command::new("cp").arg("-r").args([from, to]).status().expect("cp starts");
    assert!(done.success(), "{} to {}", from.display(), to.display());
}

#[test]
fn a_rollout_in_a_layout_of_its_own_is_trained_as_exactly_as_one_in_training_s() {
    if skipped() {
        return;
    }
    let dir = prepared(CONFIG);
    let at = dir.path();
    let one = "model.actor=model job.steps=1";
    run(at, "ppo.toml", 1, "alone", one);
    for (dir, ranks, sets, travels) in [
        ("kept", 2, "mesh.data=2 mesh.tensor=1 mesh.zero=2 rollout.tensor=2", false),
        ("joined", 2, "mesh.tensor=2 mesh.data=1 rollout.tensor=1", true),
        ("other", 4, "mesh.tensor=2 mesh.data=2 mesh.zero=3 rollout.tensor=4", true),
    ] {
        run(at, "ppo.toml", ranks, dir, &format!("{one} {sets}"));
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
        let keys = ["entropy", "grad_norm_actor", "grad_norm_critic"];
        assert_near(dir, &lines, &metrics(at, "alone"), &keys, (0.05, 0.02));
    }
}

#[test]
fn in_fixed_order_whole_runs_on_one_two_and_four_ranks_are_one_run() {
    if skipped() {
        return;
    }
    let dir = prepared(CONFIG);
    let at = dir.path();
    // A schedule that does not follow job.steps.
    let fixed = "model.actor=model gradient.order=fixed gradient.chunks=4 mesh.tensor=1 optim.actor.schedule=constant \
                 optim.actor.warmup_ratio=0.0";
    for (job, ranks, steps) in [("sft.toml", 4, 2), ("ppo.toml", 2, 1)] {
        let [alone, together] = ["alone", "together"].map(|name| format!("{job}-{name}"));
        run(at, job, 1, &alone, &format!("{fixed} job.steps={steps}"));
        run(at, job, ranks, &together, &format!("{fixed} mesh.data={ranks} mesh.zero=1 job.steps={steps}"));
        assert_same(at, &together, &alone);
    }
    run(at, "sft.toml", 4, "moved", &format!("{fixed} mesh.data=4 mesh.zero=1 job.steps=1"));
    run(at, "sft.toml", 2, "moved", &format!("{fixed} mesh.data=2 mesh.zero=0 job.steps=2"));
    assert_same(at, "moved", "sft.toml-alone");
}
