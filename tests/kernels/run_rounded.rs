//! Whole jobs on GPUs with keys and values in 8 bits (`rollout.kv_dtype`).

use crate::jobs::{CONFIG, assert_near, assert_same, calls, command, emulated, metrics, number, well};
use serde_json::Value;
use std::path::Path;

const SETS: &str = "rollout.kv_dtype=fp8 job.steps=2 job.check=true gradient.order=fixed rollout.response_tokens_max=40 \
                    ppo.kl_in=loss ppo.kl_estimator=k3";
/// A job of evaluations alone.
const EVAL: &str = "job.kind=eval data.split.by=field data.eval_split=eval eval.samples_max=6 eval.temperature=1.0";

/// The metrics of a job on `ranks` ranks in a directory of its own.
fn run(at: &Path, ranks: usize, dir: &str, sets: &str) -> Vec<Value> {
    let counts = at.join(format!("counts-{dir}"));
    well(command(ranks, at, &format!("run ppo.toml job.dir={dir} {SETS} {sets}")).env("EMULATED_CALLS", &counts));
    let steps = metrics(at, dir);
    for step in steps.iter().filter(|step| step.get("logprob_gap_max").is_some()) {
        assert_eq!(number(step, "logprob_gap_max"), 0.0, "{dir}: {step}");
    }
    steps
}

#[test]
fn a_job_with_keys_in_8_bits_samples_as_it_trains_on_one_gpu_and_on_several() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let alone = run(at, 1, "alone", "");
    let ran = calls(&at.join("counts-alone"), "0");
    for kernel in ["kv_append_codes", "kv_round", "paged_decode_codes_64", "paged_prefill_codes_64"] {
        assert!(ran.contains_key(kernel), "{kernel} is not among {:?}", ran.keys());
    }
    let in_bf16 = ["kv_append", "paged_decode_64", "paged_prefill_64"].map(|kernel| ran.get(kernel).copied());
    assert_eq!(in_bf16, [None; 3], "no cache is in bf16");
    run(at, 2, "two", "job.collectives=nccl mesh.tensor=1 mesh.zero=1");
    assert_same(at, "two", "alone");
    for (name, mesh) in
        [("tensor", "mesh.tensor=2"), ("joined", "mesh.tensor=2 rollout.tensor=1"), ("ring", "mesh.sequence=2")]
    {
        let sets = format!("job.collectives=nccl gradient.order=fast job.steps=1 {mesh}");
        assert_near(name, &run(at, 2, name, &sets), &alone[..1], &["entropy", "grad_norm_actor"], (0.05, 0.1));
    }
    let cpu = run(at, 1, "cpu", "job.device=cpu model.dtype=bf16");
    assert_near("cpu", &cpu[..1], &alone[..1], &["entropy"], (0.05, 0.02));
    let of_cpu = run(at, 1, "eval-cpu", &format!("job.device=cpu {EVAL}"));
    let of_gpu = run(at, 1, "eval", EVAL);
    assert!(number(&of_gpu[0], "eval_kv_logprob_gap_mean") > 1e-6, "{of_gpu:?}");
    assert_near("eval", &of_gpu, &of_cpu, &["eval_kv_logprob_gap_mean", "eval_kv_kl_mean"], (0.5, 1e-5));
}
