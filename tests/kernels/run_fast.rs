//! Whole jobs with `job.gemm`: `fast` against `exact`, log-probabilities that are recomputed, and libraries that are
//! missing.

use crate::jobs::{CONFIG, assert_near, calls, command, emulated, flat, metrics, number, prepared, well};
use crate::{on_a_real_gpu, skip, skip_on_a_real_gpu};
use rlhf_hpc::device::cuda::cublaslt::CublasLt;
use serde_json::Value;

/// Rows long enough for GEMMs of many rows; all samples of a step are in one batch, in scoring and in training.
const PPO: &str = "ppo.toml model.actor=sft/export job.steps=1 rollout.prompts_per_step=4 rollout.response_tokens_max=24 \
                   rollout.response_tokens_min=12 ppo.minibatch_samples=8 ppo.microbatch_tokens_max=1024 optim.actor.lr=1e-4";

#[test]
fn sft_and_ppo_with_cublaslt_are_close_to_exact_runs_and_ratios_use_recomputed_logprobs() {
    let dir = prepared(CONFIG);
    let at = dir.path();
    if on_a_real_gpu() && CublasLt::open().is_err() {
        return skip("this machine has no cuBLASLt");
    }
    let counts = at.join("counts");
    let run = |ranks, own: &str, more: &str| {
        well(command(ranks, at, &format!("run {own} {more}")).env("EMULATED_CALLS", &counts))
    };
    let sft = |more: &str| run(1, "sft.toml sft.loss_on=all", more);
    sft("");
    let said = sft("job.gemm=cublaslt job.dir=sft-fast");
    assert!(said.contains("cublaslt: GEMMs of more than 64 rows by cuBLASLt "), "{said}");
    assert!(!said.contains("old logprobs"), "sft has none: {said}");
    assert_near("fast", &metrics(at, "sft-fast"), &metrics(at, "sft"), &["loss", "grad_norm"], (0.02, 0.02));

    run(1, PPO, "");
    let exact = metrics(at, "ppo");
    for step in &exact {
        assert!(number(step, "logprob_gap_max") == 0.0 && step["sampler_gap_max"].is_null(), "{step}");
    }
    let said = run(1, PPO, "job.gemm=cublaslt job.dir=fast");
    assert!(said.contains("recomputed by a training forward pass"), "{said}");
    recomputed(&metrics(at, "fast"), &exact);
    // With the log-probabilities of the rollout, ratios do not start at one.
    let said = run(1, PPO, "job.gemm=cublaslt ppo.old_logprobs=rollout job.dir=rollout");
    assert!(said.contains("from sampling, not bit-identical with training"), "{said}");
    // On a real GPU, the library may give such small GEMMs the same bits.
    let has_gap = |step: &Value| number(step, "logprob_gap_max") > 0.0;
    assert!(on_a_real_gpu() || metrics(at, "rollout").iter().all(has_gap));
    if skip_on_a_real_gpu() {
        return;
    }
    for form in ["forward", "input", "weight", "in_f32", "added"] {
        assert!(calls(&counts, "0").contains_key(form), "no {form} by the library");
    }
    run(2, PPO, "job.gemm=cublaslt mesh.tensor=2 job.dir=two");
    recomputed(&metrics(at, "two"), &exact);
}

/// Compares a run with cuBLASLt with an exact one. Decoding has few rows at a time and training many, so the bits
/// differ. Scoring and training see the same batch, so a gap of zero shows that ratios use the recomputed values.
fn recomputed(fast: &[Value], exact: &[Value]) {
    assert_near("fast", fast, exact, &["entropy", "grad_norm_actor", "grad_norm_critic"], (0.05, 0.02));
    for step in fast {
        let (sampler, gap) = (number(step, "sampler_gap_max"), number(step, "logprob_gap_max"));
        assert!(sampler > 0.0 && sampler < 0.1, "the sampler's gap is {sampler}: {step}");
        // With a real library, the bits of a row may depend on its position in the batch.
        assert!(if on_a_real_gpu() { gap < 0.1 } else { gap == 0.0 }, "ratios begin {gap} away: {step}");
        assert!(number(step, "time_old_logprobs_s") > 0.0, "{step}");
    }
}

#[test]
fn a_missing_old_or_broken_library_is_an_error_for_cublaslt_and_a_message_for_auto() {
    let Some(dir) = emulated(CONFIG) else { return };
    let run = |sets: &str, (name, value): (&str, &str)| {
        let mut command = command(1, dir.path(), &format!("run --dry-run sft.toml {sets}"));
        let done = command.env(name, value).output().expect("the binary starts");
        (done.status.code(), flat(&done))
    };
    let nowhere = ("RLHF_CUBLASLT_LIB", "/nowhere/libcublasLt.so");
    let cases = [
        (nowhere, "/nowhere/libcublasLt.so: cannot open shared object file"),
        (("EMULATED_CUBLASLT_VERSION", "11501"), "cuBLASLt must be 11.6.1 or newer (found 11.5.1)"),
        (("EMULATED_FAILS", "cublasLtCreate:1:1"), "cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED"),
    ];
    for (i, (env, why)) in cases.into_iter().enumerate() {
        let (code, said) = run("job.gemm=cublaslt", env);
        let hint = said.contains("job.gemm = \"exact\"");
        assert!(code == Some(2) && said.contains("job.gemm = \"cublaslt\": ") && said.contains(why) && hint, "{said}");
        let (code, said) = run("job.gemm=auto", env);
        let falls_back = said.contains("exact, because there is no cuBLASLt for this GPU: ") && said.contains(why);
        assert!(i == 2 || code == Some(0) && falls_back, "{said}");
    }
    let (code, said) = run("job.gemm=cublaslt job.device=cpu", nowhere);
    assert!(code == Some(2) && said.contains("job.gemm = \"cublaslt\" needs GPUs"), "{said}");
}
