//! Calls of the driver, of cuBLASLt and of NCCL that fail within whole jobs (`EMULATED_FAILS`, emulation/failing.h),
//! and kernels that leave NaN (`EMULATED_SPOILS`). Each job ends by itself with the right exit code and one message.
//! The message names the failure, the GPU, the driver's message and the next action. Committed checkpoints can be
//! resumed.

use crate::jobs::{self, CONFIG, command, emulated, metrics, output_text};
use rlhf_hpc::device::cuda::embedded::CUBINS;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A job of two steps with a checkpoint after each.
const JOB: &str = "run ppo.toml rollout.response_tokens_max=4 checkpoint.every_steps=1 mesh.collective_timeout_s=60";

/// How two ranks share the job between them.
const TENSOR: &str = "mesh.tensor=2 rollout.tensor=2 job.collectives=nccl";
const ZERO: &str = "mesh.data=2 mesh.zero=3 mesh.offload=[\"optimizer\",\"roles\"] job.collectives=nccl";

/// The outcome of a job.
struct Ended {
    /// None where a signal ended it.
    code: Option<i32>,
    said: String,
    /// The same in one line, as a launcher may add some of its own.
    flat: String,
    /// Whether what was to fail was called.
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

/// Two where something is of rank 1 alone.
fn ranks_of(fails: &str) -> usize {
    if fails.ends_with("@1") { 2 } else { 1 }
}

/// A job in which calls fail (`EMULATED_FAILS`).
fn failing(at: &Path, name: &str, sets: &str, fails: &str) -> Ended {
    job(at, ranks_of(fails), name, sets, &[("EMULATED_FAILS", fails)])
}

/// Whether a job that had to fail ended with this exit code, and words of its error, parted by bars; else why not.
fn judged(at: &Path, name: &str, ended: &Ended, code: i32, words: &str) -> Result<(), String> {
    let Ended { code: got, said, flat, failed } = ended;
    let names = fs::read_dir(at.join(name).join("checkpoints")).into_iter().flatten().flatten();
    let names: Vec<String> = names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let why = if !failed {
        "the call was not made".into()
    } else if *got != Some(code) {
        format!("exit {got:?}, not {code}")
    } else if said.matches("error: ").count() != 1 || said.matches("hint: ").count() > 1 {
        "not one message".into()
    } else if ["panicked", "bug in the program"].iter().any(|word| said.contains(word)) {
        "called a bug in the program".into()
    } else if let Some(word) = words.split('|').find(|word| !flat.contains(word.trim())) {
        format!("does not say `{word}`")
    } else if names.iter().any(|name| name.contains("partial")) {
        format!("half-written checkpoints: {names:?}")
    } else {
        return Ok(());
    };
    Err(format!("{why}:\n{said}"))
}

/// Runs the same command again without the failure, which must succeed.
fn goes_on(at: &Path, ranks: usize, name: &str, sets: &str) -> Result<(), String> {
    let again = job(at, ranks, name, sets, &[]);
    let steps = metrics(at, name).len();
    if again.code == Some(0) && steps == 2 { Ok(()) } else { Err(format!("{steps} steps, then {}", again.said)) }
}

const GEMM: &str = "job.gemm=cublaslt rollout.prompts_per_step=4 ppo.minibatch_samples=4";
const LIMIT: &str = "mesh.collective_timeout_s=2";

/// On two ranks where one of them is named: settings of the job, what fails, how it ends, and words of the error.
const CASES: [(&str, &str, i32, &str); 15] = [
    (
        "",
        "cuLaunchKernel:400:719",
        1,
        "train: kernel | threads per block: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure), | on GPU 0 at 0000:3b:00.0",
    ),
    (
        "",
        "cuLaunchKernel:400:700:late",
        1,
        "CUDA_ERROR_ILLEGAL_ADDRESS | on GPU 0 at 0000:3b:00.0 | \
         hint: set CUDA_LAUNCH_BLOCKING=1",
    ),
    (
        "",
        "cuGraphLaunch:2:214:late",
        1,
        "CUDA_ERROR_ECC_UNCORRECTABLE | on GPU 0 at 0000:3b:00.0 | a graph | nvidia-smi -q -d ECC",
    ),
    ("", "cuGraphLaunch:2:2", 1, "cuGraphLaunch: CUDA_ERROR_OUT_OF_MEMORY | hint: set rollout.graphs = false"),
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
    ("", "cuEventCreate:14:999", 1, "cuEventCreate: CUDA_ERROR_UNKNOWN (unknown error) | on GPU 0 at | dmesg"),
    (
        "",
        "cuInit:1:803",
        2,
        "job.device = \"gpu\": the driver does not start: cuInit: | SYSTEM_DRIVER_MISMATCH | (restart the node: | \
         hint: set job.device",
    ),
    (
        GEMM,
        "cublasLtMatmul:20:14",
        1,
        "matmul, | , row strides | cublasLtMatmul: CUBLAS_STATUS_INTERNAL_ERROR | hint: set job.gemm = \"exact\"",
    ),
    (
        LIMIT,
        "cuLaunchKernel:375:hang",
        1,
        "error: step | the GPU took longer than 2 s: this process has been blocked on a copy | \
         (GPU 0 at 0000:3b:00.0; kernels started last: | hint: find the kernel that does not end",
    ),
    (
        "mesh.collective_timeout_s=2 mesh.data=2",
        "cuLaunchKernel:375:hang@1",
        1,
        "took longer than 2 s | rank 1 ( | has been blocked on a copy | 0000:af:00.0; kernels started last: ",
    ),
    (TENSOR, "ncclCommInitRank:1:2@1", 2, "rank 1: ncclCommInitRank | as requested"),
    (
        TENSOR,
        "ncclAllGather:40:1@1",
        1,
        "rank 1 ( | NCCL failed on the tensor axis (2 ranks): ncclAllGather of | to run without NCCL",
    ),
    (ZERO, "ncclAllGather:50:6:late@1", 1, "rank 1 ( | a collective between GPUs failed: | to run without NCCL"),
    (ZERO, "cuLaunchKernel:300:700:late@1", 1, "rank 1 ( | CUDA_ERROR_ILLEGAL_ADDRESS | GPU 1 at 0000:af:00.0"),
];

#[test]
fn a_call_that_fails_or_never_ends_ends_all_ranks_with_what_failed_where_and_what_to_do() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let mut wrong = Vec::new();
    for (i, (sets, fails, code, words)) in CASES.into_iter().enumerate() {
        let name = format!("one-{i}");
        let ended = failing(at, &name, sets, fails);
        wrong.extend(judged(at, &name, &ended, code, words).err().map(|why| format!("{fails}: {why}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    // Memory that another process has.
    let ended = job(at, 1, "full", "", &[("EMULATED_FAILS", "cuInit:99:1"), ("EMULATED_TAKEN", "1073000000")]);
    let words = "on each rank's GPU, but | the limit of this rank is | other processes on it (nvidia-smi names them)";
    judged(at, "full", &Ended { failed: true, ..ended }, 2, words).unwrap_or_else(|why| panic!("{why}"));
    // What one rank cannot join goes another way where the job leaves it open.
    let auto = "mesh.tensor=2 rollout.tensor=2 job.steps=1";
    let Ended { code, said, .. } = failing(at, "apart", auto, "ncclCommInitRank:1:2@1");
    assert!(code == Some(0) && said.contains("tensor: MPI through the host, because "), "{said}");
    assert!(said.contains("rank 1: ncclCommInitRank"), "{said}");
    // One that never comes back leaves a thread in the library: whatever the job leaves open, it ends.
    let (late, env) = ("ncclCommInitRank:1:hang@1", ("RLHF_NCCL_JOIN_S", "1.5"));
    let ended = job(at, 2, "late", auto, &[("EMULATED_FAILS", late), env]);
    let words = "error: the tensor axis cannot use NCCL because NCCL initialization failed on the tensor axis: \
                 ranks 0 to 1 of 2: ncclCommInitRank did not return within 1.5 s | NCCL_DEBUG=INFO | \
                 NCCL_SOCKET_IFNAME | NCCL_IB_HCA";
    judged(at, "late", &ended, 2, words).unwrap_or_else(|why| panic!("{why}"));
}

/// Cases like `CASES`: settings, the source of NaN, fragments of the error.
const NAN: [(&str, &str, &str); 8] = [
    (
        // A graph's: once.
        "",
        "kv_append:7:0",
        "error: step 2, rollout: the logits of prompt | are not finite after | but they are finite in a second forward \
         over its tokens | Xid",
    ),
    (
        "",
        "matmul_swiglu_16:6+:5",
        "error: step 2, rollout: the logits of prompt | are not finite after | new tokens: the first non-finite result \
         of a forward over its tokens is | all weights are finite | hint: lower the learning rate: the weights are \
         finite",
    ),
    (
        "",
        "rope_rotate:15+:1",
        "error: step 2, train: critic: the loss of update 3 is not finite: | \
         its first non-finite forward result is keys of layer 0, row 0; all weights are finite",
    ),
    (
        "",
        "rope_rotate:15:1",
        "error: step 2, train: critic: the loss of update 3 is not finite, but a second forward pass is finite | Xid",
    ),
    (
        "",
        "swiglu_backward:6+:3",
        "error: step 2, train: critic: the gradient of update 3 is not finite: | \
         first in model.layers.0.mlp.gate_proj.weight, while model.layers.0.mlp.up_proj.weight before it",
    ),
    (
        "",
        "adamw_step:16:0",
        "error: step 2, checkpoint: a weight of the critic's model.embed_tokens.weight is NaN, so no checkpoint",
    ),
    (TENSOR, "adamw_step:1+:0@1", "rank 1 ( | checkpoint: | is NaN, so no checkpoint was saved"),
    (ZERO, "swiglu_backward:1+:3@1", "train: | the gradient of update 1 is not finite: "),
];

#[test]
fn what_a_kernel_leaves_that_is_no_number_ends_the_run_where_it_arises_and_the_last_checkpoint_goes_on() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    for (i, (sets, spoils, words)) in NAN.into_iter().enumerate() {
        let (ranks, name) = (ranks_of(spoils), format!("nan-{i}"));
        let ended = job(at, ranks, &name, sets, &[("EMULATED_SPOILS", spoils)]);
        judged(at, &name, &ended, 1, words).unwrap_or_else(|why| panic!("{spoils}: {why}"));
        let [first, second] = ["step-1", "step-2"].map(|step| at.join(&name).join("checkpoints").join(step).exists());
        assert_eq!((first, second), (ranks == 1, false), "{spoils}: of two steps the first is committed");
    }
    goes_on(at, 1, "nan-5", "").expect("after NaN in a weight");
}

#[test]
fn what_was_committed_before_the_gpu_failed_goes_on() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    // Behind the checkpoint of the first step, of a kernel, of a copy that the checkpoint of the second one waits for.
    for (i, fails) in ["cuGraphLaunch:5:719", "cuLaunchKernel:520:700:late"].into_iter().enumerate() {
        let name = format!("late-{i}");
        let ended = failing(at, &name, "", fails);
        judged(at, &name, &ended, 1, "error: step 2, | on GPU 0 at 0000:3b:00.0")
            .unwrap_or_else(|why| panic!("{fails}: {why}"));
        assert!(at.join(&name).join("checkpoints/step-1").exists(), "{fails}: nothing was committed");
        goes_on(at, 1, &name, "").unwrap_or_else(|why| panic!("{fails}: {why}"));
    }
}

#[test]
fn a_graph_that_is_refused_is_logged_and_its_kernels_are_started_one_by_one() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let drawn = |name: &str| {
        let of = |step: &serde_json::Value| step["entropy"].as_f64().expect("a number").to_bits();
        metrics(at, name).iter().map(of).collect::<Vec<_>>()
    };
    for (i, (sets, fails, words)) in [
        ("", "cuStreamEndCapture:1:901", "cuStreamEndCapture: CUDA_ERROR_"),
        ("", "cuGraphInstantiateWithFlags:1:2", "cuGraphInstantiate: CUDA_ERROR_"),
        (TENSOR, "capture:1+:1@1", "NCCL failed on the tensor axis"),
    ]
    .into_iter()
    .enumerate()
    {
        let (ranks, name) = (ranks_of(fails), format!("refused-{i}"));
        let ordinary = format!("ordinary-{ranks}");
        if !at.join(&ordinary).exists() {
            let Ended { code, flat, .. } = job(at, ranks, &ordinary, &format!("{sets} rollout.graphs=false"), &[]);
            assert!(code == Some(0) && flat.contains("no CUDA graphs (rollout.graphs = false)"), "{flat}");
        }
        let Ended { code, flat, failed, .. } = failing(at, &name, sets, fails);
        assert!(failed && code == Some(0) && !flat.contains("error: "), "{fails}: {flat}");
        let said = flat.contains("CUDA graph capture failed, decoding without graphs: ");
        assert!(said && flat.contains(words), "{fails}: {flat}");
        assert_eq!(drawn(&ordinary), drawn(&name), "{fails}");
    }
}

#[test]
fn what_fails_at_the_start_ends_a_job_that_leaves_the_device_open_too() {
    if CUBINS.is_empty() {
        return;
    }
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let sets = "job.device=auto model.dtype=auto job.gemm=auto job.check=true job.steps=1";
    for (i, (fails, words)) in [
        ("cuInit:1:999", "error: the driver does not start: cuInit: CUDA_ERROR_UNKNOWN"),
        ("cuModuleLoadData:3:200", "CUDA_ERROR_INVALID_IMAGE"),
        ("cuLaunchKernel:1:719", "cuLaunchKernel: CUDA_ERROR_LAUN"),
        ("cuGraphLaunch:2:719", "cuGraphLaunch: CUDA_ERROR_LAUN"),
    ]
    .into_iter()
    .enumerate()
    {
        // Without NVRTC, which would compile what a driver refuses.
        let env = [("EMULATED_FAILS", fails), ("RLHF_NVRTC", "/nowhere/libnvrtc.so")];
        let Ended { code, said, flat, failed } = job(at, 1, &format!("auto-{i}"), sets, &env);
        assert!(failed && code != Some(0) && flat.contains(words), "{fails}: {said}");
        assert!(flat.contains("job.device = \"cpu\""), "{fails}: {said}");
    }
}

/// The number of calls of each function by rank `rank` in a job that succeeds.
fn calls(at: &Path, ranks: usize, sets: &str) -> BTreeMap<String, u64> {
    let path = at.join("calls");
    let _ = fs::remove_file(&path);
    let _ = fs::remove_dir_all(at.join("clean"));
    let clean = job(at, ranks, "clean", sets, &[("EMULATED_CALLS", path.to_str().expect("a path is text"))]);
    assert_eq!(clean.code, Some(0), "{}", clean.said);
    jobs::calls(&path, &(ranks - 1).to_string())
}

/// A function that a whole job calls fails at its first, its middle and its last call: all whose names hold
/// FAILING_ONLY, if set.
#[test]
#[ignore = "long: every failing call of a library"]
fn a_job_ends_in_order_whichever_call_of_a_function_fails() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let only = std::env::var("FAILING_ONLY").unwrap_or_default();
    let mut wrong = Vec::new();
    for (ranks, sets) in [(1, ""), (1, GEMM), (2, TENSOR), (2, ZERO)] {
        for (call, count) in calls(at, ranks, sets) {
            // What is counted may differ by some from run to run.
            let mut places = vec![1, count.div_ceil(2), count - count / 8];
            places.dedup();
            let is_of = |start: &str| call.starts_with(start);
            // The forms of products are counted, too.
            if !["cu", "nccl"].iter().any(|start| is_of(start)) {
                continue;
            }
            let again = (ranks > 1 && is_of("cu") && !is_of("cuLaunch")) || (sets == GEMM && !is_of("cublas"));
            if again || !call.contains(&only) {
                continue;
            }
            let status = if is_of("nccl") {
                1
            } else if is_of("cublas") {
                14
            } else {
                719
            };
            for at_call in places {
                let name = "swept";
                let _ = fs::remove_dir_all(at.join(name));
                let fails = format!("{call}:{at_call}:{status}{}", if ranks > 1 { "@1" } else { "" });
                let ended = failing(at, name, sets, &fails);
                // What goes another way, as a choice of cuBLASLt that is asked for again, comes to its end.
                let code = ended.code.unwrap_or(-1);
                let outcome =
                    if code == 0 { Ok(()) } else { judged(at, name, &ended, if code == 2 { 2 } else { 1 }, "") };
                let error = ended.said.split("error: ").nth(1).unwrap_or("none").trim_end();
                println!("{ranks} x {sets} {fails}: exit {code}: {error}");
                wrong.extend(outcome.err().map(|why| format!("{fails}: {why}")));
                if code != 0 {
                    wrong.extend(goes_on(at, ranks, name, sets).err().map(|why| format!("{fails}, again: {why}")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of them:\n{}", wrong.len(), wrong.join("\n\n"));
}
