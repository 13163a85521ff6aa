//! Whole PPO jobs on ranks that share matrices, whose steps of decoding are graphs that hold NCCL's collectives.

use crate::jobs::{CONFIG, SAMPLING, TELLING, binary, metrics, prepare};
use crate::{emulation, on_a_real_gpu};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Penalties too, and collectives that a graph may hold.
const MORE: [&str; 2] = ["rollout.repetition_penalty=1.05", "job.collectives=nccl"];

/// A job on emulated GPUs of an emulated driver, one for each rank, joined by the emulated NCCL. What it says.
fn job(dir: &Path, ranks: usize, dir_of_job: &str, sets: &[&str], env: &[(&str, &str)]) -> String {
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
        .current_dir(dir)
        .arg(binary())
        .args(["run", "ppo.toml", &format!("job.dir={dir_of_job}")])
        .args(SAMPLING)
        .args(MORE)
        .args(sets)
        .envs(emulation::environment())
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .env("RLHF_NCCL_LIB", emulation::gpu())
        .envs(env.iter().copied());
    let done = command.output().expect("mpirun starts");
    let said = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(done.status.success(), "{dir_of_job} on {ranks} ranks: {}\n{said}", done.status);
    said
}

fn number(step: &Value, key: &str) -> u64 {
    step[key].as_u64().unwrap_or_else(|| panic!("no {key} in {step}"))
}

/// The same samples and updates.
fn alike(a: &[Value], b: &[Value]) {
    assert_eq!((a.len(), b.len()), (2, 2));
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a["logprob_gap_max"].as_f64(), Some(0.0), "{a}");
        for key in TELLING {
            assert!(a[key].is_number() && a[key] == b[key], "{key}: {a} against {b}");
        }
    }
}

fn directory() -> Option<tempfile::TempDir> {
    if on_a_real_gpu() {
        return None;
    }
    let dir = tempfile::tempdir().expect("a directory");
    // Four ranks hold a query head each, and pairs of them a copy of a key/value head.
    let config = CONFIG.replace("\"num_attention_heads\": 2", "\"num_attention_heads\": 4");
    prepare(dir.path(), &config.replace("\"num_key_value_heads\": 1", "\"num_key_value_heads\": 2"));
    Some(dir)
}

/// The last step's number of graphs, and of waits of the host.
fn counts(steps: &[Value]) -> [u64; 2] {
    ["gpu_graph_launches", "gpu_host_waits"].map(|key| number(&steps[steps.len() - 1], key))
}

#[test]
fn jobs_of_tensor_ranks_by_graphs_are_those_by_ordinary_steps_with_the_waits_of_one_rank() {
    let Some(dir) = directory() else { return };
    let at = dir.path();
    let one = job(at, 1, "one", &["job.collectives=auto"], &[]);
    assert!(one.contains("CUDA graphs"), "{one}");
    let [launches, waits] = counts(&metrics(at, "one"));
    for (ranks, name, sets) in [
        (2, "tensor", &["mesh.tensor=2", "rollout.tensor=2"][..]),
        (4, "both", &["mesh.tensor=2", "mesh.data=2", "mesh.zero=3", "rollout.tensor=4"]),
    ] {
        let [by_graphs, ordinary] = ["graphs", "ordinary"].map(|way| format!("{name}-{way}"));
        let said = job(at, ranks, &by_graphs, sets, &[]);
        assert!(said.contains("CUDA graphs, which hold the collectives of the tensor axis"), "{said}");
        let said = job(at, ranks, &ordinary, &[sets, &["rollout.graphs=false"]].concat(), &[]);
        assert!(said.contains("kernel by kernel, as rollout.graphs = false"), "{said}");
        let (by_graphs, ordinary) = (metrics(at, &by_graphs), metrics(at, &ordinary));
        alike(&by_graphs, &ordinary);
        let (got, without) = (counts(&by_graphs), counts(&ordinary));
        eprintln!("{name}: {got:?} graphs and waits, {without:?} without graphs; {launches} and {waits} on one rank");
        assert!(got[0] > 10 && without[0] == 0, "{got:?} graphs, {without:?} without");
        assert!(
            got[1] <= waits && got[1] < without[1],
            "{got:?} waits, {waits} on one rank, {without:?} without graphs"
        );
    }
}

#[test]
fn a_job_that_cannot_have_graphs_says_why_and_is_the_same() {
    let Some(dir) = directory() else { return };
    let at = dir.path();
    let two = |more: &[&'static str]| [&["mesh.tensor=2", "rollout.tensor=2", "job.steps=1"], more].concat();
    job(at, 2, "graphs", &two(&[]), &[]);
    let by_graphs = metrics(at, "graphs");
    assert!(counts(&by_graphs)[0] > 10);
    for (name, sets, env, words) in [
        (
            "old",
            &["job.collectives=auto"][..],
            &[("EMULATED_NCCL_VERSION", "20909")][..],
            ": NCCL 2.9.9 knows no bf16: ",
        ),
        (
            "mpi",
            &["job.collectives=mpi"],
            &[],
            "because values on GPUs go over the tensor axis by MPI, through the host",
        ),
        (
            "refused",
            &[],
            &[("EMULATED_NCCL_CAPTURES_NOT", "1")],
            "decoding goes on kernel by kernel, as a CUDA graph cannot be captured: NCCL over the tensor axis",
        ),
    ] {
        let said = job(at, 2, name, &two(sets), env);
        assert!(said.contains(words), "{name}: {said}");
        let steps = metrics(at, name);
        assert_eq!(counts(&steps)[0], 0, "{name}");
        for key in TELLING {
            assert_eq!(steps[0][key], by_graphs[0][key], "{name}: {key}");
        }
    }
}
