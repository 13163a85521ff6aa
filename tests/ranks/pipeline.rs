//! Stages of a pipeline: a step on them is that of one rank, bit for bit where no sum is in another order.

use crate::Test;
use crate::combination::{LENGTHS, compare};
use crate::layouts::{Setting, attention, config, samples, whole};
use crate::models::arch;
use crate::tensor_models::{capped, eight_experts, hybrid_experts, latent, sinks};
use rlhf_hpc::comm::{Axes, Way, World};
use rlhf_hpc::config::job::GradientConfig;
use rlhf_hpc::config::method::ppo::PolicyLossKind;
use rlhf_hpc::config::optim::GradientOrder;
use rlhf_hpc::device::Device;
use rlhf_hpc::experience::Experience;
use rlhf_hpc::learn::packed::Tokens;
use rlhf_hpc::learn::schedule::{self, Action};
use rlhf_hpc::learn::score;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head};
use rlhf_hpc::optim::host_state::Vector;
use rlhf_hpc::tensor::{DType, Tensor};
use serde_json::{Value, json};
use std::sync::Arc;

pub const TESTS: &[Test] = &[
    Test { name: "stages with every other axis have the step of one rank", ranks: &[8], check: everywhere },
    Test { name: "stages of all kinds of layers have the step of one rank", ranks: &[4], check: kinds },
    Test { name: "a pipeline of untied models has the bits of one rank", ranks: &[2, 4], check: bits },
    Test { name: "the routers of all stages balance together", ranks: &[2], check: balance },
    Test { name: "stages of several chunks have the step of one rank", ranks: &[2, 4], check: interleaved },
    Test { name: "equal stages wait for p - 1 of m + p - 1 turns", ranks: &[4], check: bubble },
    Test {
        name: "scores come from the last stage to all ranks, with the bits of one rank",
        ranks: &[4],
        check: scores,
    },
];

fn mesh(data: usize, pipeline: usize, sequence: usize, tensor: usize) -> Mesh {
    Mesh { data, pipeline, sequence, tensor, expert: 1 }
}

/// A model of four layers.
fn four(family: &str, mut keys: Value) -> Arch {
    keys["num_hidden_layers"] = 4.into();
    arch(family, &keys)
}

fn everywhere(world: &World) {
    let tied = |tied: bool| json!({"tie_word_embeddings": tied, "vocab_size": 301});
    let untied: [(Mesh, &[usize]); 5] = [
        (mesh(4, 2, 1, 1), &[0, 2]),
        (mesh(2, 2, 2, 1), &[1]),
        (mesh(1, 2, 2, 2), &[3]),
        (mesh(2, 4, 1, 1), &[3]),
        (mesh(1, 4, 1, 2), &[1]),
    ];
    compare(world, &four("llama", tied(false)), config(PolicyLossKind::Clip), &untied);
    let few: [(Mesh, &[usize]); 4] =
        [(mesh(2, 2, 1, 2), &[0]), (mesh(2, 4, 1, 1), &[1, 2]), (mesh(1, 4, 2, 1), &[3]), (mesh(1, 2, 4, 1), &[2])];
    compare(world, &four("qwen3", tied(true)), config(PolicyLossKind::Gspo), &few);
    let experts: [(Mesh, &[usize]); 3] = [
        (Mesh { expert: 2, ..mesh(4, 2, 1, 1) }, &[1]),
        (Mesh { expert: 2, ..mesh(2, 2, 1, 2) }, &[3]),
        (Mesh { expert: 2, ..mesh(1, 4, 2, 1) }, &[2]),
    ];
    compare(world, &four("qwen3_moe", eight_experts()), config(PolicyLossKind::Clip), &experts);
    let adapted = Arch { tuning: Some(Arc::new(attention())), ..four("llama", tied(true)) };
    let few: [(Mesh, &[usize]); 2] = [(mesh(2, 2, 1, 2), &[1]), (mesh(1, 4, 2, 1), &[3])];
    compare(world, &adapted, config(PolicyLossKind::Clip), &few);
    let mut clipped = config(PolicyLossKind::Clip);
    (clipped.optim.actor.clip_norm, clipped.optim.actor.weight_decay) = (0.01, 0.1);
    compare(world, &four("llama", tied(true)), clipped, &[(mesh(2, 2, 1, 2), &[0]), (mesh(2, 4, 1, 1), &[3])]);
}

fn kinds(world: &World) {
    for (family, keys) in [
        ("gemma2", capped()),
        ("olmo3", json!({"sliding_window": 7})),
        ("qwen3_next", hybrid_experts()),
        ("deepseek_v3", latent()),
        ("gpt_oss", sinks()),
    ] {
        let few: [(Mesh, &[usize]); 2] = [(mesh(2, 2, 1, 1), &[1]), (mesh(1, 2, 1, 2), &[0])];
        compare(world, &arch(family, &keys), config(PolicyLossKind::Clip), &few);
    }
}

fn setting(arch: &Arch, head: Head, order: GradientOrder) -> Setting {
    let mut config = config(PolicyLossKind::Clip);
    config.gradient = GradientConfig { order, chunks: 3, ..config.gradient };
    config.optim.actor.clip_norm = 0.01;
    Setting { arch: arch.clone(), head, dtype: DType::F32, config }
}

/// The bits of gradient and weights after an update, and of the gradient's norm.
fn updated(setting: &Setting, axes: &Axes, samples: &[Experience], coef: f64) -> (u64, Vec<(String, Vec<u32>)>) {
    let mut learner = setting.learner(5, axes, 0).expect("a learner").with_router_loss(coef);
    setting.gradient(&mut learner, axes, samples);
    learner.step(axes).expect("a finite gradient");
    let all = [Vector::First, Vector::Master].into_iter().flat_map(|what| whole(&learner, what, axes));
    let bits = all.map(|(name, values)| (name, values.iter().map(|x| x.to_bits()).collect()));
    (learner.report.grad_norm.to_bits(), bits.collect())
}

fn bits(world: &World) {
    let (samples, axes) = (samples(LENGTHS), Axes::split_mesh(&world.group(), &mesh(1, world.size, 1, 1)));
    let untied = four("llama", json!({"tie_word_embeddings": false}));
    for (head, order) in [
        (Head::LanguageModel, GradientOrder::Fast),
        (Head::Value, GradientOrder::Fast),
        (Head::LanguageModel, GradientOrder::Fixed),
    ] {
        let setting = setting(&untied, head, order);
        let [got, want] = [&axes, &Axes::one()].map(|axes| updated(&setting, axes, &samples, 0.0));
        assert!(got == want, "{head:?} in order {order:?} on {} stages", world.size);
    }
}

/// The loss of routers is one of all layers, so a stage needs the choices of all others.
fn balance(world: &World) {
    let (samples, axes) = (samples(LENGTHS), Axes::split_mesh(&world.group(), &mesh(1, world.size, 1, 1)));
    let setting = setting(&arch("qwen3_moe", &eight_experts()), Head::LanguageModel, GradientOrder::Fast);
    let alone = |coef| updated(&setting, &Axes::one(), &samples, coef);
    let (with, without) = (alone(0.5), alone(0.0));
    assert!(with.0 != without.0, "the loss has a gradient");
    assert!(updated(&setting, &axes, &samples, 0.5) == with);
    // A single micro-batch needs no other forward on one rank.
    assert!(updated(&setting, &axes, &samples[..2], 0.5) == updated(&setting, &Axes::one(), &samples[..2], 0.5));
}

/// The axes of a mesh whose stages have `chunks` chunks.
fn chunked(world: &World, mesh: &Mesh, chunks: usize) -> Axes {
    Axes { chunks, ..Axes::split_mesh(&world.group(), mesh) }
}

/// A chunk walks micro-batches in order, so the bits are those of one rank: also with adapters, experts, scores before, a
/// padded minibatch, and shards.
fn interleaved(world: &World) {
    let samples = samples(LENGTHS);
    let adapted = |arch: Arch| Arch { tuning: Some(Arc::new(attention())), ..arch };
    for arch in [
        four("llama", json!({"tie_word_embeddings": false})),
        adapted(four("llama", json!({"tie_word_embeddings": false}))),
        four("qwen3_moe", eight_experts()),
    ] {
        let setting = setting(&arch, Head::LanguageModel, GradientOrder::Fast);
        let coef = if arch.family.name == "qwen3_moe" { 0.5 } else { 0.0 };
        let axes = chunked(world, &mesh(world.size / 2, 2, 1, 1), 2);
        for few in [&samples[..], &samples[..3]] {
            // With several data ranks sums are in another order.
            let alone = if world.size == 2 { Axes::one() } else { Axes::split_mesh(&world.group(), &mesh(2, 2, 1, 1)) };
            let [got, want] = [&axes, &alone].map(|axes| updated(&setting, axes, few, coef));
            assert!(got == want, "{}, {} samples", arch.family.name, few.len());
        }
    }
    let setting = setting(&four("qwen3", json!({})), Head::Value, GradientOrder::Fast);
    let tokens: Vec<Tokens> = samples.iter().map(Tokens::from_sample).collect();
    let axes = chunked(world, &mesh(world.size / 2, 2, 1, 1), 2);
    let [got, want] = [&axes, &Axes::one()].map(|axes| {
        let role = setting.learner(5, axes, 1).expect("a learner").role;
        score::values(&role, axes, &tokens, 64)
    });
    assert_eq!(got, want);
}

/// Links between stages whose work is a sleep, because ranks of this test share cores: the measured wait is the table's.
fn bubble(world: &World) {
    let (stages, microbatches) = (world.size, 12);
    let axes = Axes::split_mesh(&world.group(), &mesh(1, stages, 1, 1));
    let (rank, last) = (axes.pipeline.rank(), stages - 1);
    let work = |turns: u64| std::thread::sleep(std::time::Duration::from_millis(15 * turns));
    world.group().barrier();
    let ((), sums) = schedule::timed(&axes, || {
        for action in schedule::actions(rank, stages, 1, microbatches) {
            let (way, turns, is_first, is_last) = match action {
                Action::Forward(..) => (Way::Forward, 1, rank == 0, rank == last),
                Action::Backward(..) => (Way::Backward, 2, rank == last, rank == 0),
            };
            let x = if is_first { Tensor::zeros(3, 5) } else { axes.links.receive(way, Device::Cpu, 3, 5) };
            work(turns);
            if !is_last {
                axes.links.send(way, x, usize::MAX);
            }
        }
    });
    let ratio = schedule::metrics(&sums)[0].1;
    let want = last as f64 / (microbatches + last) as f64;
    assert!((ratio / want - 1.0).abs() < 0.1, "the measured wait is {ratio:.4}, that of the table {want:.4}");
    if world.rank == 0 {
        println!("{stages} stages, {microbatches} micro-batches: bubble {ratio:.4}, (p - 1)/(m + p - 1) = {want:.4}");
    }
}

fn scores(world: &World) {
    let samples = samples(LENGTHS);
    let tokens: Vec<Tokens> = samples.iter().map(Tokens::from_sample).collect();
    for mesh in [mesh(1, 4, 1, 1), mesh(2, 2, 1, 1)] {
        let axes = Axes::split_mesh(&world.group(), &mesh);
        for head in [Head::LanguageModel, Head::Value] {
            let setting = setting(&four("llama", json!({})), head, GradientOrder::Fast);
            let [got, want] = [&axes, &Axes::one()].map(|axes| {
                let role = setting.learner(5, axes, 1).expect("a learner").role;
                match head {
                    Head::LanguageModel => score::logprobs(&role, axes, &tokens, 0.7, 64),
                    Head::Value => score::values(&role, axes, &tokens, 64),
                }
            });
            assert_eq!(got, want, "{mesh}, {head:?}");
        }
    }
}
