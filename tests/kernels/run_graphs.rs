//! Whole PPO jobs on ranks that share matrices, whose steps of decoding are graphs that hold NCCL's collectives.

use crate::jobs::{CONFIG, SAMPLING, TELLING, command, metrics, number, prepared, well};
use crate::{emulation, on_a_real_gpu};
use std::path::Path;

/// A job of one step on `ranks` emulated GPUs, joined by the emulated NCCL, with penalties, too. What it says.
fn job(dir: &Path, ranks: usize, name: &str, sets: &[&str], env: &[(&str, &str)]) -> String {
    let to = format!("job.dir={name}");
    let own = ["run", "ppo.toml", "job.steps=1", "rollout.repetition_penalty=1.05", "job.collectives=nccl", &to];
    let mut command = command(ranks, dir, &[&own, &SAMPLING[..], sets].concat());
    well(command.env("RLHF_NCCL_LIB", emulation::gpu()).envs(env.iter().copied()))
}

/// The number of graphs of a job's step, and of waits of the host.
fn counts(dir: &Path, job: &str) -> [f64; 2] {
    let steps = metrics(dir, job);
    ["gpu_graph_launches", "gpu_host_waits"].map(|key| number(&steps[0], key))
}

#[test]
fn jobs_of_tensor_ranks_by_graphs_are_those_by_ordinary_steps_which_say_why_they_are_ordinary() {
    if on_a_real_gpu() {
        return;
    }
    // Four ranks hold a query head each, and pairs of them a copy of a key/value head.
    let config = CONFIG.replace("\"num_attention_heads\": 2", "\"num_attention_heads\": 4");
    let dir = prepared(&config.replace("\"num_key_value_heads\": 1", "\"num_key_value_heads\": 2"));
    let at = dir.path();
    let one = job(at, 1, "one", &["job.collectives=auto"], &[]);
    assert!(one.contains("CUDA graphs"), "{one}");
    let [_, waits] = counts(at, "one");
    let two = &["mesh.tensor=2", "rollout.tensor=2"][..];
    let four = &["mesh.tensor=2", "mesh.data=2", "mesh.zero=3", "rollout.tensor=4"];
    let (none, by_mpi) = (&[][..], &["job.collectives=mpi"][..]);
    for (ranks, mesh, ordinary) in [
        (
            2,
            two,
            &[
                ("mpi", by_mpi, none, "because values on GPUs go over the tensor axis by MPI, through the host"),
                (
                    "refused",
                    &[],
                    &[("EMULATED_NCCL_CAPTURES_NOT", "1")],
                    "decoding goes on kernel by kernel, as a CUDA graph cannot be captured: NCCL over the tensor axis",
                ),
            ][..],
        ),
        (4, four, &[("plain", &["rollout.graphs=false"][..], none, "kernel by kernel, as rollout.graphs = false")]),
    ] {
        let by_graphs = format!("graphs-{ranks}");
        let said = job(at, ranks, &by_graphs, mesh, &[]);
        assert!(said.contains("CUDA graphs, which hold the collectives of the tensor axis"), "{said}");
        let got = counts(at, &by_graphs);
        assert!(got[0] > 10.0 && got[1] <= waits, "{got:?} graphs and waits, {waits} waits on one rank");
        for (name, sets, env, words) in ordinary {
            let said = job(at, ranks, name, &[mesh, *sets].concat(), env);
            assert!(said.contains(words), "{name}: {said}");
            let without = counts(at, name);
            assert!(without[0] == 0.0 && without[1] > got[1], "{name}: {without:?}, {got:?} by graphs");
            let [a, b] = [&by_graphs, *name].map(|job| metrics(at, job).remove(0));
            assert_eq!(a["logprob_gap_max"].as_f64(), Some(0.0), "{a}");
            for key in TELLING {
                assert!(a[key].is_number() && a[key] == b[key], "{name}: {key}: {a} against {b}");
            }
        }
    }
}
