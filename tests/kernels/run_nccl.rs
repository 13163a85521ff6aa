//! Whole jobs on GPUs that NCCL joins: bit by bit those whose values travel through the host.

use crate::jobs::{CONFIG, binary, metrics, on_ranks, prepare, rlhf_hpc};
use crate::{emulation, on_a_real_gpu};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// What a job measured, but for times and memory.
fn measured(dir: &Path, job: &str) -> Vec<Vec<(String, Value)>> {
    let steps = metrics(dir, job);
    let aside = |key: &str| ["time", "memory", "gpu"].iter().any(|of| key.starts_with(of)) || key.contains("per_s");
    let counts = |key: &str| !aside(key);
    let kept = |step: Value| {
        let fields = step.as_object().expect("an object").clone().into_iter();
        fields.filter(|(key, _)| counts(key)).collect()
    };
    steps.into_iter().map(kept).collect()
}

#[test]
fn jobs_over_nccl_are_bit_by_bit_those_through_the_host() {
    if on_a_real_gpu() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    // Both tensor ranks hold a copy of the one key/value head, and normed queries and keys.
    let config = CONFIG.replace("LlamaForCausalLM", "Qwen3ForCausalLM").replace("\"llama\"", "\"qwen3\"");
    let config = config.replace("\"num_attention_heads\": 2", "\"num_attention_heads\": 4");
    prepare(at, &config);
    rlhf_hpc(at, &["run", "sft.toml"]);
    let library = emulation::gpu();
    let library = [("RLHF_NCCL_LIB", library.to_str().expect("a path is text"))];
    for (i, mesh) in [
        "mesh.tensor=2 mesh.data=2 mesh.zero=1 rollout.tensor=2",
        "mesh.tensor=2 mesh.data=2 mesh.zero=2",
        "mesh.sequence=2 mesh.data=2 mesh.zero=3",
        "mesh.tensor=2 mesh.data=2 mesh.zero=3 rollout.tensor=4",
        "mesh.data=4 mesh.tensor=1 mesh.zero=3 rollout.tensor=2",
        "mesh.data=4 mesh.zero=1 gradient.order=fixed gradient.chunks=4",
    ]
    .into_iter()
    .enumerate()
    {
        let [joined, apart] = ["nccl", "mpi"].map(|way| format!("{way}-{i}"));
        for (way, job) in [("nccl", &joined), ("mpi", &apart)] {
            let sets = [format!("job.collectives={way}"), format!("job.dir={job}")];
            let mut args = vec!["run", "ppo.toml"];
            args.extend(sets.iter().map(String::as_str).chain(mesh.split(' ')));
            on_ranks(4, at, &args, &library);
        }
        let (a, b) = (measured(at, &joined), measured(at, &apart));
        assert!(a.len() == 2 && a == b, "{mesh}: {a:?} over NCCL, {b:?} through the host");
    }
}

#[test]
fn a_rank_that_cannot_join_ends_all_within_seconds_and_is_named_with_its_reason() {
    if on_a_real_gpu() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    prepare(at, CONFIG);
    for (fault, words) in [("EMULATED_NCCL_REFUSES", "cannot join"), ("EMULATED_NCCL_BREAKS", "broke while it joined")]
    {
        let begun = Instant::now();
        let done = launcher(3)
            .current_dir(at)
            .arg(binary())
            .args(["run", "sft.toml", "job.collectives=nccl", "mesh.data=3", "mesh.collective_timeout_s=600"])
            .envs(emulation::environment())
            .env("RLHF_NCCL_LIB", emulation::gpu())
            .env(fault, "1")
            .output()
            .expect("mpirun starts");
        let text = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && text.contains("rank 1: ncclCommInitRank") && text.contains(words), "{text}");
        assert!(begun.elapsed() < Duration::from_secs(20), "after {:?}: {text}", begun.elapsed());
    }
}

fn launcher(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()]);
    command.env("OMPI_MCA_mpi_yield_when_idle", "1");
    command
}

/// What a job on two ranks that share a GPU, or have one each, says before it begins.
fn said(dir: &Path, sets: &[&str], library: Option<&Path>) -> (bool, String) {
    let mut command = launcher(2);
    command
        .current_dir(dir)
        .arg(binary())
        .args(["run", "--dry-run", "sft.toml"])
        .args(sets)
        .envs(emulation::environment());
    match library {
        Some(library) => command.env("RLHF_NCCL_LIB", library),
        None => command.env("EMULATED_GPUS", "1"),
    };
    let done = command.output().expect("mpirun starts");
    let text = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (done.status.success(), text)
}

#[test]
fn the_banner_says_how_collectives_go_and_why_not_otherwise() {
    if on_a_real_gpu() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    prepare(dir.path(), CONFIG);
    let library = emulation::gpu();
    for (sets, library, runs, words) in [
        (&["mesh.data=2"][..], None, true, "data: MPI through the host, because ranks 0 and 1 share a GPU"),
        (&["mesh.tensor=2"][..], Some(&*library), true, "tensor: NCCL 2.21.5"),
        (
            &["mesh.tensor=2", "job.collectives=mpi"][..],
            Some(&*library),
            true,
            "tensor: MPI through the host, because job.collectives = \"mpi\"",
        ),
        (&["job.collectives=nccl"][..], None, false, "the data axis has no NCCL, because ranks 0 and 1 share a GPU"),
        (
            &["job.collectives=nccl"][..],
            Some(Path::new("/nowhere/libnccl.so.2")),
            false,
            "because rank 0: /nowhere/libnccl",
        ),
        (&["job.collectives=nccl", "job.device=cpu"][..], None, false, "NCCL is between GPUs"),
    ] {
        let (ran, text) = said(dir.path(), sets, library);
        assert!(ran == runs && text.contains(words), "{sets:?}: {text}");
    }
}
