//! Whole jobs on GPUs that NCCL joins: bit by bit those whose values travel through the host.

use crate::jobs::{CONFIG, assert_same, command, flat, on_ranks, prepared, rlhf_hpc};
use crate::{emulation, on_a_real_gpu};
use std::path::Path;

#[test]
fn jobs_over_nccl_are_bit_by_bit_those_through_the_host() {
    if on_a_real_gpu() {
        return;
    }
    // Both tensor ranks hold a copy of the one key/value head, and normed queries and keys.
    let config = CONFIG.replace("LlamaForCausalLM", "Qwen3ForCausalLM").replace("\"llama\"", "\"qwen3\"");
    let dir = prepared(&config.replace("\"num_attention_heads\": 2", "\"num_attention_heads\": 4"));
    let at = dir.path();
    rlhf_hpc(at, &["run", "sft.toml", "job.steps=1"]);
    let library = emulation::gpu();
    let library = [("RLHF_NCCL_LIB", library.to_str().expect("a path is text"))];
    for (i, mesh) in [
        "mesh.tensor=2 mesh.data=2 mesh.zero=3 rollout.tensor=4",
        "mesh.sequence=2 mesh.data=2 mesh.zero=2",
        "mesh.data=4 mesh.zero=1 gradient.order=fixed gradient.chunks=4",
    ]
    .into_iter()
    .enumerate()
    {
        let [joined, apart] = ["nccl", "mpi"].map(|way| format!("{way}-{i}"));
        for (way, job) in [("nccl", &joined), ("mpi", &apart)] {
            let sets = format!("run ppo.toml job.steps=1 job.collectives={way} job.dir={job} {mesh}");
            on_ranks(4, at, &sets.split(' ').collect::<Vec<_>>(), &library);
        }
        assert_same(at, &joined, &apart);
    }
}

#[test]
fn a_rank_that_cannot_join_ends_all_and_is_named_with_its_reason() {
    if on_a_real_gpu() {
        return;
    }
    let dir = prepared(CONFIG);
    let sets = ["run", "sft.toml", "job.collectives=nccl", "mesh.data=3", "mesh.collective_timeout_s=600"];
    let mut command = command(3, dir.path(), &sets);
    command.env("RLHF_NCCL_LIB", emulation::gpu()).env("EMULATED_FAILS", "ncclCommInitRank:1:2@1");
    let done = command.output().expect("mpirun starts");
    let text = flat(&done);
    assert!(
        !done.status.success() && text.contains("rank 1: ncclCommInitRank") && text.contains("as it was told"),
        "{text}"
    );
}

#[test]
fn the_banner_says_how_collectives_go_and_why_not_otherwise() {
    if on_a_real_gpu() {
        return;
    }
    let dir = prepared(CONFIG);
    let library = emulation::gpu();
    // On two ranks that share a GPU, or have one each and a library.
    for (sets, library, runs, words) in [
        (&["mesh.data=2"][..], None, true, "data: MPI through the host, because ranks 0 and 1 share a GPU"),
        (&["mesh.tensor=2"], Some(&*library), true, "tensor: NCCL 2.21.5"),
        (
            &["mesh.tensor=2", "job.collectives=mpi"],
            Some(&*library),
            true,
            "tensor: MPI through the host, because job.collectives = \"mpi\"",
        ),
        (&["job.collectives=nccl"], None, false, "the data axis has no NCCL, because ranks 0 and 1 share a GPU"),
        (
            &["job.collectives=nccl"],
            Some(Path::new("/nowhere/libnccl.so.2")),
            false,
            "because rank 0: /nowhere/libnccl",
        ),
        (&["job.collectives=nccl", "job.device=cpu"], None, false, "NCCL is between GPUs"),
    ] {
        let mut command = command(2, dir.path(), &[&["run", "--dry-run", "sft.toml"], sets].concat());
        match library {
            Some(library) => command.env("RLHF_NCCL_LIB", library),
            None => command.env("EMULATED_GPUS", "1"),
        };
        let done = command.output().expect("mpirun starts");
        assert!(done.status.success() == runs && flat(&done).contains(words), "{sets:?}: {}", flat(&done));
    }
}
