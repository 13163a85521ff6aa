//! The check of a run's axes before training. Healthy backends pass. For each fault of a library, the error
//! names the call, the axis, its ranks and the first value.

use crate::jobs::{CONFIG, command, emulated, flat};
use crate::ranks::{LATE, run_scene};
use rlhf_hpc::comm::backends::{self, Axis};
use rlhf_hpc::comm::self_test::check;
use rlhf_hpc::comm::{Axes, World, abort};
use rlhf_hpc::config::job::Collectives;
use rlhf_hpc::config::optim::GradientOrder;
use rlhf_hpc::device::cuda::{self, Stream};
use rlhf_hpc::mesh::Mesh;
use std::io::Write;
use std::time::Duration;

/// The backend of a scene, and the time limit of a collective.
const WAY: &str = "EMULATED_WAY";
const LIMIT_MS: &str = "EMULATED_LIMIT_MS";

/// `2 1 2 1`: ranks of data, sequence, tensor and experts.
pub fn scene(scene: &str, world: &World) {
    let sizes: Vec<usize> = scene.split(' ').map(|size| size.parse().expect("a size")).collect();
    let [data, sequence, tensor, expert] = sizes[..] else { panic!("no scene {scene}") };
    let axes = Axes::split_mesh(&world.group(), &Mesh { data, pipeline: 1, sequence, tensor, expert });
    let all = [
        Axis { name: "tensor", group: &axes.tensor, stream: Stream::Tensor },
        Axis { name: "sequence", group: &axes.sequence, stream: Stream::Ring },
        Axis { name: "data", group: &axes.zero, stream: Stream::Zero },
        Axis { name: "expert", group: &axes.expert, stream: Stream::Tensor },
        Axis { name: "expert replicas", group: &axes.replicas, stream: Stream::Zero },
    ];
    let wanted = if std::env::var(WAY).is_ok() { Collectives::Mpi } else { Collectives::Nccl };
    backends::choose(&world.group(), &all, &format!("GPU {}", world.rank), wanted).expect("a way");
    let order = if data.is_power_of_two() { GradientOrder::Fixed } else { GradientOrder::Fast };
    if let Ok(limit) = std::env::var(LIMIT_MS) {
        abort::install(world, None, Some(Duration::from_millis(limit.parse().expect("a time"))));
    }
    let held = cuda::gpu().usage();
    let found = check(&world.group(), &all, &axes, order, true);
    assert_eq!(cuda::gpu().usage().in_use, held.in_use, "memory that stays");
    match found {
        Ok(names) => print_line(&format!("CHECKED {names:?}")),
        Err(error) => print_line(&format!("FOUND {}", error.message)),
    }
}

/// In one piece, as several ranks write at a time.
fn print_line(words: &str) {
    let line = format!("\n{words}\n");
    std::io::stderr().write_all(line.as_bytes()).expect("a place for words");
}

/// The output of each rank in a scene, on late GPUs and on others.
fn outputs(scene: &str, env: &[(&str, &str)]) -> Vec<String> {
    let ranks = scene.split(' ').take(3).map(|size| size.parse::<usize>().expect("a size")).product();
    let Some((well, all)) = run_scene(ranks, &format!("axes: {scene}"), env) else { return Vec::new() };
    let is_told = |line: &&str| line.starts_with("CHECKED ") || line.starts_with("FOUND ");
    let lines: Vec<String> = all.lines().filter(is_told).map(str::to_string).collect();
    assert!(well && lines.len() == ranks, "{all}");
    lines
}

#[test]
fn axes_that_deliver_values_pass_and_a_wrong_value_is_named_with_its_call_and_axis() {
    // A faulty library that misplaces values, or loses them.
    let fault = |name: &'static str| ("EMULATED_NCCL_FAULT", name);
    let cases = [
        ("3 1 1 1", &[][..], r#"CHECKED ["data"]"#),
        ("3 1 1 1", &[(WAY, "mpi")], r#"CHECKED ["data"]"#),
        ("1 1 2 1", &[LATE, ("EMULATED_PASSIVE", "1")], r#"CHECKED ["tensor"]"#),
        ("4 1 1 2", &[], r#"CHECKED ["data", "expert", "expert replicas"]"#),
        ("4 1 1 2", &[(WAY, "mpi")], r#"CHECKED ["data", "expert", "expert replicas"]"#),
        ("3 1 1 1", &[fault("places")], "all-gather of bf16 values over NCCL on the data axis of ranks 0 to 2 ("),
        ("1 1 2 1", &[fault("chunk")], "all-reduce of bf16 values over NCCL on the tensor axis of ranks 0 to 1 ("),
        (
            "1 2 1 1",
            &[fault("receive")],
            "send and receive around the ring of bf16 values over NCCL on the sequence axis",
        ),
    ];
    for (scene, env, words) in cases {
        let lines = outputs(scene, env);
        for line in &lines {
            assert_eq!(*line, lines[0], "{scene}, {env:?}: ranks end with other words");
            let found = line.contains("FOUND ") && line.contains(words) && line.contains(", expected ");
            assert!(line == words || found, "{scene}, {env:?}: {line}");
        }
    }
}

#[test]
fn a_job_logs_the_checks_of_its_axes_and_ends_if_values_do_not_arrive() {
    let Some(dir) = emulated(CONFIG) else { return };
    let job = |ranks, sets: &str, fault: &str| {
        let line = format!("run sft.toml job.steps=1 job.check=true mesh.tensor=2 {sets}");
        let mut command = command(ranks, dir.path(), &line);
        let done = command.env("EMULATED_NCCL_FAULT", fault).output().expect("mpirun starts");
        (done.status.success(), flat(&done))
    };
    let (ran, words) = job(2, "job.collectives=nccl job.dir=well", "");
    assert!(ran && words.contains("collectives checked over tensor in "), "{words}");
    let (ran, words) = job(2, "job.dir=lost", "chunk");
    assert!(!ran && words.matches(" at element ").count() == 1, "{words}");
    let named = words.contains("over NCCL on the tensor axis of ranks ") && words.contains("job.collectives = \"mpi\"");
    assert!(named, "{words}");
}

#[test]
fn a_rank_missing_from_a_call_is_reported_with_the_call_and_the_axis() {
    let Some((well, said)) =
        run_scene(3, "axes: 3 1 1 1", &[("EMULATED_FAILS", "ncclReduceScatter:1+:hang@1"), (LIMIT_MS, "1500")])
    else {
        return;
    };
    assert!(!well && said.contains("waiting in sum_scattered over zero ("), "{said}");
}
