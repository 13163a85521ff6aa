//! Decoding steps as graphs with collectives: on tensor ranks, over an emulated NCCL and an emulated driver.

use crate::model::{llama, qwen3};
use crate::ranks::{LATE, assert_scene, run_scene};
use crate::rollout::{Part, bits, request};
use crate::{nccl, numbers};
use rlhf_hpc::comm::{Axes, Calls, Group, World, abort};
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::graph::Graphs;
use rlhf_hpc::device::cuda::{Stream, gpu};
use rlhf_hpc::error::Error;
use rlhf_hpc::experience::Response;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Mixer};
use rlhf_hpc::rollout::{Hooks, Outcome, Request};
use rlhf_hpc::tensor::{DType, Tensor};
use std::cell::Cell;
use std::time::Duration;

/// The work of a process that a test starts on several ranks.
pub fn scene(name: &str, world: &World) {
    match name {
        "same bits" => same_bits(world),
        "end together" => ends_together(world),
        "weights moved on one rank" => moved(world),
        "one rank does not launch" => {
            let (calls, mut graph, x) = summed(world);
            // Set only now: on a busy machine, the start alone takes longer.
            abort::install(world, None, Some(Duration::from_millis(500)));
            if world.rank == 1 {
                std::thread::sleep(Duration::from_secs(60));
            }
            graph.replay(&());
            calls.launched();
            unreachable!("{:?} is the sum without a rank", x.to_host());
        }
        other => panic!("no scene {other}"),
    }
}

/// All ranks share each matrix.
fn axes(world: &World) -> Axes {
    let axes = Axes::split_mesh(&world.group(), &Mesh { tensor: world.size, ..Mesh::data_only(1) });
    nccl::link(world, "tensor", &axes.tensor, Stream::Tensor);
    axes
}

/// Heads for up to four ranks; with four, pairs have the same key/value head.
fn archs() -> [Arch; 2] {
    let mut archs = [llama(), qwen3()];
    for block in archs.iter_mut().flat_map(|arch| &mut arch.blocks) {
        let Mixer::Attention(attention) = &mut block.mixer else { panic!("attention") };
        (attention.heads, attention.kv_heads) = (4, 2);
    }
    archs
}

/// With penalties, banned stop tokens, greedy rows and filters.
fn requests(count: usize, longest: usize) -> Vec<Request> {
    let mut all: Vec<Request> = (0..count).map(|i| request(i, 3 + i * 7 % longest)).collect();
    for request in all.iter_mut().step_by(4) {
        request.params.repetition_penalty = 1.3;
    }
    all
}

/// Asserts that all ranks have the same values.
fn agreed(world: &World, outcome: &Outcome) {
    let mine = format!("{:?}", bits(outcome));
    assert!(world.group().all_gather_bytes(mine.as_bytes()).iter().all(|other| *other == mine.as_bytes()));
}

fn same_bits(world: &World) {
    let axes = axes(world);
    for arch in archs() {
        let part = Part::new(&arch, &axes);
        for (batch_max, requests) in [(7, requests(7, 14)), (3, requests(5, 9))] {
            let run = |graphs| part.run(&mut part.engine(batch_max, graphs), &requests);
            let (before, [by_graphs, ordinary]) = (gpu().counts.replayed.get(), [run(true), run(false)]);
            assert_eq!(bits(&by_graphs), bits(&ordinary), "{batch_max} lanes");
            assert_eq!(gpu().counts.replayed.get() - before, by_graphs.graph_steps as u64);
            assert!(by_graphs.graph_steps * 2 > by_graphs.forwards && ordinary.graph_steps == 0);
            agreed(world, &by_graphs);
        }
    }
    // Each launch is counted with its collectives.
    let booked = rlhf_hpc::comm::accounting();
    let replays = gpu().counts.replayed.get();
    for op in ["sum_ordered", "all_to_all", "gather"] {
        assert!(booked.get(&("tensor", op)).is_some_and(|totals| totals.calls >= replays), "{op}: {booked:?}");
    }
}

#[test]
fn tensor_ranks_decode_with_graphs_bitwise_like_ordinary_steps() {
    // A capture makes no first connection and no first allocation.
    assert_scene(4, "graphs: same bits", &[LATE, ("EMULATED_STRICT", "1")]);
}

/// One rank is stopped, then the caller of one rank rejects a response: both end all ranks.
fn ends_together(world: &World) {
    let axes = axes(world);
    let part = Part::new(&archs()[0], &axes);
    let long = |i: usize| Request { new_tokens_min: 99, new_tokens_max: 5 + 45 * (i % 2), ..request(i, 50) };
    let requests: Vec<Request> = (0..4).map(long).collect();
    let whole = part.run(&mut part.engine(4, true), &requests);
    let asked = Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        // The fourth time within a decode batch by graphs: before the first forward, and before each of two batches.
        world.rank == 1 && asked.get() > 3
    };
    let mut hooks = Hooks { stop: Some(&stop), ..Hooks::default() };
    let outcome = part.answers(None, &mut part.engine(4, true), &requests, &mut hooks).expect("stopped");
    assert_eq!([0, 1, 2, 3].map(|i| outcome.responses[i].is_some()), [true, false, true, false]);
    assert_eq!(outcome.responses[0], whole.responses[0]);
    assert!(outcome.graph_steps > 5 && outcome.forwards < whole.forwards, "{} steps", outcome.forwards);
    let steps = world.group().all_gather_bytes(&outcome.forwards.to_le_bytes());
    assert!(steps.iter().all(|other| *other == steps[0]), "ranks ended after different steps");
    let refuses = |i: usize, _: &Response| if world.rank == 0 && i == 2 { Err(Error::usage("no")) } else { Ok(()) };
    let mut hooks = Hooks { finished: Some(&mut { refuses }), ..Hooks::default() };
    let error = part.answers(None, &mut part.engine(4, true), &requests, &mut hooks).expect_err("refused");
    assert!(error.message.contains("no"), "{error}");
}

#[test]
fn a_stop_or_an_error_of_one_rank_ends_graphs_on_all_ranks_at_the_same_step() {
    assert_scene(2, "graphs: end together", &[LATE]);
}

/// Addresses differ between ranks: if they changed on one rank alone, all capture again.
fn moved(world: &World) {
    let axes = axes(world);
    let arch = &archs()[0];
    let (mut part, requests) = (Part::new(arch, &axes), requests(4, 12));
    let mut engine = part.engine(4, true);
    let first = bits(&part.run(&mut engine, &requests));
    let other = Part::new(arch, &axes);
    if world.rank == 0 {
        part = other;
    }
    let again = part.run(&mut engine, &requests);
    assert!(bits(&again) == first && again.graph_steps > 0);
}

#[test]
fn weights_that_moved_on_one_rank_are_captured_again_on_all_ranks() {
    assert_scene(2, "graphs: weights moved on one rank", &[LATE]);
}

/// A graph of a sum.
fn summed(world: &World) -> (Calls, Graphs<()>, Tensor) {
    let group: Group = axes(world).tensor;
    let mut x = Tensor::from_slice(1, 8, &numbers(1, 8)).on(Device::Cuda, DType::F32);
    let mut graphs = Graphs::default();
    let ((), calls) = Calls::capture(|| graphs.capture((), || group.sum_slice(x.slice_mut())).expect("a graph"));
    (calls, graphs, x)
}

#[test]
fn a_rank_that_does_not_launch_a_graph_is_reported() {
    let Some((well, said)) = run_scene(2, "graphs: one rank does not launch", &[LATE]) else { return };
    assert!(!well && said.contains("waiting in a graph of collectives over tensor"), "{said}");
}
