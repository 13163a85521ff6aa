//! Whole jobs with `job.gemm`: `fast` against `exact`, log-probabilities that are recomputed, and libraries that are missing.

use crate::jobs::{CONFIG, assert_near, command, flat, metrics, number, on_ranks, prepared};
use crate::on_a_real_gpu;
use rlhf_hpc::device::cuda::cublaslt::CublasLt;
use serde_json::Value;
use std::path::Path;
use std::process::Output;

/// Enough tokens of each row for products of many rows; all samples of a step in one batch, in scoring and in training.
const PPO: [&str; 5] = [
    "rollout.response_tokens_max=24",
    "rollout.response_tokens_min=12",
    "ppo.minibatch_samples=8",
    "ppo.microbatch_tokens_max=1024",
    "optim.actor.lr=1e-4",
];

/// Runs a job with variables set, and gives what it says.
fn run(dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Output {
    command(1, dir, &[&["run"], args].concat()).envs(env.iter().copied()).output().expect("the binary starts")
}

/// What the emulated library counted in all processes that wrote to `file`.
fn counted(file: &Path, name: &str) -> u64 {
    let text = std::fs::read_to_string(file).expect("counts");
    let of = |line: &str| serde_json::from_str::<Value>(line).expect("an object")[name].as_u64().expect("a count");
    text.lines().map(of).sum()
}

fn near(a: &[Value], b: &[Value], keys: &[&str], within: f64) {
    assert_near("fast", a, b, keys, (within, 0.02));
}

/// `run` of a job that must come to its end.
fn ends(dir: &Path, args: &[&str], env: &[(&str, &str)]) -> String {
    let done = run(dir, args, env);
    assert!(done.status.success(), "{args:?}: {}\n{}", done.status, flat(&done));
    flat(&done)
}

#[test]
fn fast_sft_and_ppo_follow_exact_ones_and_ratios_begin_at_recomputed_log_probabilities() {
    let dir = prepared(CONFIG);
    let at = dir.path();
    if on_a_real_gpu() && CublasLt::open().is_err() {
        eprintln!("skipped: this machine has no cuBLASLt");
        return;
    }
    let counts = at.join("counts");
    let counted_in = [("EMULATED_CUBLASLT_COUNTS", counts.to_str().expect("a path is text"))];
    let sft = |more: &[&'static str]| [&["sft.toml", "sft.loss_on=all"], more].concat();
    ends(at, &sft(&[]), &[]);
    let said = ends(at, &sft(&["job.gemm=cublaslt", "job.dir=sft-fast"]), &counted_in);
    assert!(said.contains("cublaslt: those of more than 64 rows by cuBLASLt "), "{said}");
    assert!(!said.contains("old logprobs"), "sft has none: {said}");
    near(&metrics(at, "sft-fast"), &metrics(at, "sft"), &["loss", "grad_norm"], 0.02);

    let ppo = |more: &[&'static str]| [&["ppo.toml"], &PPO[..], more].concat();
    ends(at, &ppo(&[]), &[]);
    let exact = metrics(at, "ppo");
    for step in &exact {
        assert!(number(step, "logprob_gap_max") == 0.0 && step["sampler_gap_max"].is_null(), "{step}");
    }
    let said = ends(at, &ppo(&["job.gemm=cublaslt", "job.dir=fast"]), &[]);
    assert!(said.contains("recomputed by a forward of training"), "{said}");
    recomputed(&metrics(at, "fast"), &exact);
    // Who takes the rollout's all the same has ratios that do not begin at one.
    let said = ends(at, &ppo(&["job.gemm=cublaslt", "ppo.old_logprobs=rollout", "job.dir=rollout"]), &[]);
    assert!(said.contains("as drawn, with other bits than training's"), "{said}");
    assert!(metrics(at, "rollout").iter().all(|step| number(step, "logprob_gap_max") > 0.0));
    if on_a_real_gpu() {
        eprintln!("skipped: several ranks on a real GPU need the launcher of its machine");
        return;
    }
    for form in ["forward", "input", "weight", "in_f32", "added"] {
        assert!(counted(&counts, form) > 0, "no {form} by the library");
    }
    assert_eq!(counted(&counts, "handles"), 1);
    let ranks = |args: &[&'static str]| on_ranks(2, at, &[&["run"], args].concat(), &counted_in);
    ranks(&ppo(&["job.gemm=cublaslt", "mesh.tensor=2", "job.dir=two"]));
    recomputed(&metrics(at, "two"), &exact);
    assert_eq!(counted(&counts, "handles"), 3, "one of each rank of each job");
}

/// Holds a fast run to an exact one. Its decoding multiplies few rows at a time and its training many, which gives other bits;
/// scoring and training see the same batch, so a gap of zero shows that what was recomputed is what ratios begin at.
fn recomputed(fast: &[Value], exact: &[Value]) {
    near(fast, exact, &["entropy", "grad_norm_actor", "grad_norm_critic"], 0.05);
    for step in fast {
        let (sampler, gap) = (number(step, "sampler_gap_max"), number(step, "logprob_gap_max"));
        assert!(sampler > 0.0 && sampler < 0.1, "the sampler's gap is {sampler}: {step}");
        // A real library may give rows of one batch other bits by their places.
        assert!(if on_a_real_gpu() { gap < 0.1 } else { gap == 0.0 }, "ratios begin {gap} away: {step}");
        assert!(number(step, "time_old_logprobs_s") > 0.0, "{step}");
    }
}

#[test]
fn a_library_that_is_missing_old_or_broken_is_an_error_of_fast_and_a_word_of_auto() {
    if on_a_real_gpu() {
        return;
    }
    let dir = prepared(CONFIG);
    let at = dir.path();
    let nowhere = ("RLHF_CUBLASLT_LIB", "/nowhere/libcublasLt.so");
    let cases: [(&[(&str, &str)], &str); 3] = [
        (&[nowhere], "/nowhere/libcublasLt.so: cannot open shared object file"),
        (&[("EMULATED_CUBLASLT_VERSION", "11501")], "it is 11.5.1, needed 11.6.1 or newer"),
        (&[("EMULATED_FAILS", "cublasLtCreate:1:1")], "cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED"),
    ];
    for (env, why) in cases {
        let done = run(at, &["sft.toml", "job.gemm=cublaslt", "job.steps=1"], env);
        let said = flat(&done);
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(said.contains("job.gemm = \"cublaslt\": ") && said.contains(why), "{said}");
        assert!(said.contains("job.gemm = \"exact\""), "no hint: {said}");
    }
    for (i, (env, why)) in cases.into_iter().take(2).enumerate() {
        let to = format!("job.dir=auto-{i}");
        let done = run(at, &["sft.toml", "job.gemm=auto", "job.steps=1", &to], env);
        let said = flat(&done);
        assert!(done.status.success(), "{said}");
        assert!(said.contains("exact, as there is no cuBLASLt for this GPU: ") && said.contains(why), "{said}");
    }
    let done = run(at, &["sft.toml", "job.gemm=cublaslt", "job.device=cpu"], &[]);
    let said = flat(&done);
    assert!(done.status.code() == Some(2) && said.contains("cuBLASLt works on GPUs"), "{said}");
}
