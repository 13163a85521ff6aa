//! Calls of the driver and of NCCL that fail within whole jobs (`EMULATED_FAILS`, emulation/failing.h). Each job ends by
//! itself with the right exit code and one message. The message names the failure, the GPU, the driver's message and
//! the next action. Committed checkpoints can be resumed.

use crate::jobs::{self, CONFIG, command, emulated, metrics, output_text};
use std::fs;
use std::path::Path;

/// A job of two steps with a checkpoint after each.
const JOB: &str = "run ppo.toml rollout.response_tokens_max=4 checkpoint.every_steps=1 mesh.collective_timeout_s=60";

/// ZeRO over two ranks.
const ZERO: &str = "mesh.data=2 mesh.zero=3 mesh.offload=[\"optimizer\",\"roles\"] job.collectives=nccl";

/// The outcome of a job.
struct Ended {
    /// `None` if a signal ended it.
    code: Option<i32>,
    said: String,
    /// The same in one line, as a launcher may add some of its own.
    flat: String,
    /// Whether the call that had to fail was made.
    failed: bool,
}

/// Runs the job on `ranks` ranks with a GPU each, with further settings and variables.
fn job(at: &Path, ranks: usize, name: &str, sets: &str, env: &[(&str, &str)]) -> Ended {
    let failed = at.join("failed");
    let _ = fs::remove_file(&failed);
    let mut command = command(ranks, at, &format!("{JOB} job.dir={name} {sets}"));
    let done = command.env("EMULATED_FAILED", &failed).envs(env.iter().copied()).output().expect("it starts");
    Ended { code: done.status.code(), said: output_text(&done), flat: jobs::flat(&done), failed: failed.exists() }
}

/// A job in which calls fail, on two ranks if rank 1 is named.
fn failing(at: &Path, name: &str, sets: &str, fails: &str) -> Ended {
    job(at, if fails.ends_with("@1") { 2 } else { 1 }, name, sets, &[("EMULATED_FAILS", fails)])
}

/// Asserts that a job that had to fail ended with this exit code and one error with these words, separated by bars.
fn assert_ends(what: &str, at: &Path, name: &str, ended: &Ended, code: i32, words: &str) {
    let Ended { code: got, said, flat, failed } = ended;
    assert!(*failed, "{what}: the call was not made:\n{said}");
    assert_eq!(*got, Some(code), "{what}: {said}");
    let is_one = said.matches("error: ").count() == 1 && said.matches("hint: ").count() <= 1;
    assert!(is_one && !said.contains("panicked"), "{what}: not one message:\n{said}");
    for word in words.split('|') {
        assert!(flat.contains(word.trim()), "{what} does not say `{word}`:\n{said}");
    }
    let names = fs::read_dir(at.join(name).join("checkpoints")).into_iter().flatten().flatten();
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    assert!(!names.any(|name| name.contains("partial")), "{what}: a half-written checkpoint");
}

/// Settings of the job, the call that fails, the exit code, and words of the error.
const CASES: [(&str, &str, i32, &str); 6] = [
    (
        "",
        "cuLaunchKernel:400:700:late",
        1,
        "CUDA_ERROR_ILLEGAL_ADDRESS | on GPU 0 at 0000:3b:00.0 | hint: set CUDA_LAUNCH_BLOCKING=1",
    ),
    (ZERO, "cuLaunchKernel:300:700:late@1", 1, "rank 1 ( | CUDA_ERROR_ILLEGAL_ADDRESS | GPU 1 at 0000:af:00.0"),
    (
        "",
        "cuGraphLaunch:2:214:late",
        1,
        "CUDA_ERROR_ECC_UNCORRECTABLE | on GPU 0 at 0000:3b:00.0 | a graph | nvidia-smi -q -d ECC",
    ),
    (
        "",
        "cuMemAlloc_v2:1+:2",
        2,
        " for weights of the actor; this process uses 0.00 MiB (nothing allocated); | \
         cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory): 1.0 GiB of 1.0 GiB is free on GPU 0 at 0000:3b:00.0 | \
         nvidia-smi names them | mesh.offload",
    ),
    (
        "",
        "cuMemHostRegister_v2:5+:2",
        1,
        "64.0 KiB of pinned host memory: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY | on GPU 0 | ulimit -l | --mem",
    ),
    (ZERO, "ncclAllGather:50:6:late@1", 1, "rank 1 ( | a collective between GPUs failed: | to run without NCCL"),
];

#[test]
fn a_failed_call_ends_all_ranks_and_the_error_names_the_call_the_gpu_and_the_remedy() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    for (i, (sets, fails, code, words)) in CASES.into_iter().enumerate() {
        let name = format!("one-{i}");
        assert_ends(fails, at, &name, &failing(at, &name, sets, fails), code, words);
    }
    // Memory that another process has.
    let ended = job(at, 1, "full", "", &[("EMULATED_TAKEN", "1073000000")]);
    let words = "on each rank's GPU, but | the limit of this rank is | other processes on it (nvidia-smi names them)";
    assert_ends("a full GPU", at, "full", &Ended { failed: true, ..ended }, 2, words);
}

#[test]
fn a_job_resumes_from_the_checkpoint_committed_before_the_gpu_failed() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    // After the checkpoint of the first step.
    let fails = "cuLaunchKernel:520:700:late";
    let ended = failing(at, "late", "", fails);
    assert_ends(fails, at, "late", &ended, 1, "error: step 2, | on GPU 0 at 0000:3b:00.0");
    assert!(at.join("late/checkpoints/step-1").exists(), "nothing was committed");
    let again = job(at, 1, "late", "", &[]);
    assert!(again.code == Some(0) && metrics(at, "late").len() == 2, "{}", again.said);
}

#[test]
fn a_graph_without_memory_is_logged_its_kernels_are_launched_one_by_one_and_the_next_rollout_tries_again() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let Ended { code, flat, .. } = job(at, 1, "ordinary", "rollout.graphs=false", &[]);
    assert!(code == Some(0) && flat.contains("no CUDA graphs (rollout.graphs = false)"), "{flat}");
    let Ended { code, flat, failed, .. } = failing(at, "refused", "", "cuGraphInstantiateWithFlags:1:2");
    assert!(failed && code == Some(0) && !flat.contains("error: "), "{flat}");
    let why = "CUDA graph capture failed, decoding without graphs until the next rollout: ";
    assert!(flat.contains(why) && flat.contains("cuGraphInstantiate: CUDA_ERROR_OUT_OF_MEMORY"), "{flat}");
    let [ordinary, refused] = ["ordinary", "refused"].map(|name| {
        let entropies = metrics(at, name).into_iter().map(|step| step["entropy"].clone());
        entropies.collect::<Vec<_>>()
    });
    assert_eq!(ordinary, refused);
    let launches = metrics(at, "refused").into_iter().map(|step| step["gpu_graph_launches"].as_f64());
    let launches: Vec<f64> = launches.map(|count| count.expect("a number")).collect();
    assert!(launches[0] == 0.0 && launches[1] > 0.0, "{launches:?}");
}
