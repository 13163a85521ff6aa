//! Whole jobs of the binary on the GPU: SFT, then PPO from its export, with the same lines as on the CPU.

use crate::jobs::{CONFIG, assert_near, command, metrics, number, on_ranks, prepared, rlhf_hpc, skipped, words};
use serde_json::Value;

#[test]
fn the_bench_measures_every_kernel_that_it_names() {
    let dir = tempfile::tempdir().expect("a directory");
    let args = ["bench", "cuda", "--small", "--repeats", "1", "--json", "--record", "record"];
    let done = command(1, dir.path(), &args).output().expect("the binary starts");
    assert!(done.status.success(), "{}", words(&done));
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
fn sft_and_ppo_run_to_their_exports_and_drawn_log_probabilities_are_those_of_training() {
    let dir = prepared(CONFIG);
    let at = dir.path();
    rlhf_hpc(at, &["run", "sft.toml"]);
    rlhf_hpc(at, &["run", "sft.toml", "job.device=cpu", "job.dir=cpu"]);
    assert_near("sft", &metrics(at, "sft"), &metrics(at, "cpu"), &["loss"], (0.02, 0.0));
    // What the GPU saved, the CPU goes on with.
    rlhf_hpc(at, &["run", "sft.toml", "job.device=cpu", "job.steps=4"]);
    rlhf_hpc(at, &["run", "sft.toml", "job.device=cpu", "job.dir=cpu", "job.steps=4"]);
    assert_near("on the CPU", &metrics(at, "sft")[3..], &metrics(at, "cpu")[3..], &["loss"], (0.02, 0.0));
    rlhf_hpc(at, &["run", "ppo.toml"]);
    let steps = metrics(at, "ppo");
    let exact = |steps: &[Value]| steps.iter().all(|step| number(step, "logprob_gap_max") == 0.0);
    assert!(steps.len() == 2 && exact(&steps), "{steps:?}");
    assert!(at.join("ppo/export/model.safetensors").exists());
    if skipped() {
        return;
    }
    on_ranks(4, at, &["run", "ppo.toml", "mesh.tensor=2", "mesh.data=2", "mesh.zero=2", "job.dir=four"], &[]);
    let four = metrics(at, "four");
    assert!(exact(&four), "{four:?}");
    assert_near("four ranks", &four, &steps, &["entropy", "grad_norm_actor", "grad_norm_critic"], (0.05, 0.02));
}

#[test]
fn auto_takes_the_gpu_where_there_is_one_that_suits_and_says_why_else() {
    let dir = prepared(CONFIG);
    let at = dir.path();
    let run = |job: &str, more: &[&str]| {
        let own = ["run", "sft.toml", "job.device=auto", "job.steps=1"];
        let done =
            command(1, at, &[&own[..], &[&format!("job.dir={job}")], more].concat()).output().expect("it starts");
        assert!(done.status.success(), "{job}: {}", words(&done));
        // Requests for memory of the GPU are counted where there is one.
        (metrics(at, job)[0]["memory_requests"].is_number(), words(&done))
    };
    let (on_gpu, said) = run("found", &[]);
    assert!(on_gpu && !said.contains("no GPU"), "{said}");
    let (on_gpu, said) = run("unsuited", &["model.dtype=f32"]);
    assert!(!on_gpu && said.contains("no GPU: model.dtype = \"f32\", and GPUs hold"), "{said}");
    let done = command(1, at, &["run", "sft.toml", "model.dtype=f32"]).output().expect("it starts");
    assert!(done.status.code() == Some(2) && words(&done).contains("set model.dtype = \"bf16\""), "{}", words(&done));
}
