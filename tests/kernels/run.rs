//! Whole jobs of the binary on the GPU: SFT, then PPO from its export, with the same lines as on the CPU.

use crate::jobs::{CONFIG, SFT, binary, metrics, on_ranks, prepare, rlhf_hpc};
use crate::{emulation, on_a_real_gpu};
use serde_json::Value;
use std::process::Command;

#[test]
fn the_bench_measures_every_kernel_that_it_names() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(binary());
    let args = ["bench", "cuda", "--small", "--repeats", "1", "--json", "--record", "record"];
    command.current_dir(dir.path()).args(args);
    if !on_a_real_gpu() {
        command.envs(emulation::environment());
    }
    let done = command.output().expect("the binary starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let lines: Vec<Value> = String::from_utf8_lossy(&done.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("an object a line"))
        .collect();
    assert!(lines.len() >= 40, "{} works", lines.len());
    assert!(lines.iter().all(|line| line["seconds"].as_f64().is_some_and(|s| s > 0.0)));
    let recorded = std::fs::read_to_string(dir.path().join("record")).expect("the record");
    assert_eq!(recorded, String::from_utf8_lossy(&done.stdout));
    // Every kernel that has to reach something, in each mode of products that is there.
    for (work, target) in [
        ("attention forward, 64 tokens, 4 heads of 128", "target 60 % of product"),
        ("attention backward, 64 tokens, 4 heads of 128", "target 50 % of product"),
        ("decode attention, 1 x 64 keys", "target 85 % of copy"),
        ("decode attention, 2 x 64 keys", "target 85 % of copy"),
        ("rmsnorm, 64 x 64", "target 85 % of copy"),
        ("adamw, 4096 parameters", "target 85 % of copy"),
        ("log-softmax, 64 x 64 f32", "target 85 % of copy"),
        ("log-softmax fused with the head", "target 70 % of product"),
        ("decode 7B, 1 x 3 tokens, graphs", "target 75 % of copy"),
        ("training step 1B, 4 x 24 tokens, exact", "target 45 % of product"),
    ] {
        let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
        let is_it = |line: &&Value| text(line, "work").starts_with(work);
        let line = lines.iter().find(is_it).unwrap_or_else(|| panic!("no {work}"));
        let verdict = text(line, "verdict");
        // Newer GPUs than those of sm_80 are held against PyTorch.
        let is_said = verdict.starts_with(target) && verdict.ends_with("too small to tell");
        assert!(is_said || verdict.starts_with("target PyTorch's"), "{work}: {verdict}");
    }
}

#[test]
fn what_is_not_done_on_gpus_is_refused_with_what_to_set() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("sft.toml"), SFT).expect("a file");
    let (set, said) = ("model.dtype=f32", "set model.dtype = \"bf16\"");
    let done = Command::new(binary()).current_dir(dir.path()).args(["run", "sft.toml", set]).output();
    let done = done.expect("the binary starts");
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(2) && stderr.contains(said), "{set}: {stderr}");
}

#[test]
fn sft_and_ppo_run_to_their_exports_and_drawn_log_probabilities_are_those_of_training() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    prepare(at, CONFIG);
    rlhf_hpc(at, &["run", "sft.toml"]);
    rlhf_hpc(at, &["run", "sft.toml", "job.device=cpu", "job.dir=cpu"]);
    let (on_gpu, on_cpu) = (metrics(at, "sft"), metrics(at, "cpu"));
    assert_eq!(on_gpu.len(), on_cpu.len());
    for (a, b) in on_gpu.iter().zip(&on_cpu) {
        let loss = |step: &Value| step["loss"].as_f64().expect("a loss");
        assert!((loss(a) - loss(b)).abs() < 0.02 * loss(b), "loss {} on the GPU, {} on the CPU", loss(a), loss(b));
    }
    // What the GPU saved, the CPU goes on with.
    rlhf_hpc(at, &["run", "sft.toml", "job.device=cpu", "job.steps=4"]);
    rlhf_hpc(at, &["run", "sft.toml", "job.device=cpu", "job.dir=cpu", "job.steps=4"]);
    let (begun_on_gpu, on_cpu) = (metrics(at, "sft"), metrics(at, "cpu"));
    let last = |steps: &[Value]| steps[3]["loss"].as_f64().expect("a loss");
    assert!((last(&begun_on_gpu) / last(&on_cpu) - 1.0).abs() < 0.02, "{begun_on_gpu:?} against {on_cpu:?}");
    rlhf_hpc(at, &["run", "ppo.toml"]);
    let steps = metrics(at, "ppo");
    assert_eq!(steps.len(), 2);
    let exact = |steps: &[Value]| {
        for step in steps {
            assert_eq!(step["logprob_gap_max"].as_f64(), Some(0.0), "{step}");
        }
    };
    exact(&steps);
    assert!(at.join("ppo/export/model.safetensors").exists());
    if on_a_real_gpu() {
        eprintln!("skipped: several ranks on a real GPU need the launcher of its machine");
        return;
    }
    on_ranks(4, at, &["run", "ppo.toml", "mesh.tensor=2", "mesh.data=2", "mesh.zero=2", "job.dir=four"], &[]);
    let four = metrics(at, "four");
    exact(&four);
    for (a, b) in four.iter().zip(&steps) {
        let of = |step: &Value, key: &str| step[key].as_f64().expect("a number");
        for key in ["entropy", "grad_norm_actor", "grad_norm_critic"] {
            assert!((of(a, key) - of(b, key)).abs() < 0.05 * of(b, key).abs().max(0.02), "{key}: {a} against {b}");
        }
    }
}

#[test]
fn auto_takes_the_gpu_where_there_is_one_that_suits_and_says_why_else() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    prepare(at, CONFIG);
    let run = |job: &str, more: &[&str], emulated: bool| {
        let mut command = Command::new(binary());
        command.current_dir(at).args(["run", "sft.toml", "job.device=auto", "job.steps=1", &format!("job.dir={job}")]);
        command.args(more);
        if emulated && !on_a_real_gpu() {
            command.envs(emulation::environment());
        } else if !on_a_real_gpu() {
            command.env_remove("RLHF_CUDA_LIB");
        }
        let done = command.output().expect("the binary starts");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{job}: {said}");
        // Requests for memory of the GPU are counted where there is one.
        (metrics(at, job)[0]["memory_requests"].is_number(), said)
    };
    let (on_gpu, said) = run("found", &[], true);
    assert!(on_gpu && !said.contains("no GPU"), "{said}");
    let (on_gpu, said) = run("unsuited", &["model.dtype=f32"], true);
    assert!(!on_gpu && said.contains("no GPU: model.dtype = \"f32\", and GPUs hold"), "{said}");
    if !on_a_real_gpu() && !std::path::Path::new("/usr/lib/x86_64-linux-gnu/libcuda.so.1").exists() {
        let (on_gpu, said) = run("none", &[], false);
        assert!(!on_gpu && said.contains("no GPU: "), "{said}");
    }
}
