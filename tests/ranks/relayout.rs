//! A checkpoint of any layout restores the same state, to the bit, on any other and on fewer ranks.

use crate::Test;
use crate::checkpoints::Shared;
use crate::layouts::{Setting, config, samples, whole};
use crate::models::arch;
use crate::tensor_models::eight_experts;
use rlhf_hpc::checkpoint::{Checkpoint, Keep, Manifest, ModelVectors, newest, save, shard};
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::method::ppo::PolicyLossKind;
use rlhf_hpc::learn::Learner;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Head, Reshard, TensorPart};
use rlhf_hpc::optim::host_state::Vector;
use rlhf_hpc::tensor::DType;
use serde_json::json;

pub const TESTS: &[Test] =
    &[Test { name: "a checkpoint of any layout is restored bitwise on any other", ranks: &[4], check: elsewhere }];

const LENGTHS: &[(usize, usize)] = &[(3, 9), (1, 2), (12, 40), (2, 1), (7, 5), (5, 21)];

/// The state after an update.
fn trained(setting: &Setting, axes: &Axes, stage: usize) -> Learner {
    let mut learner = setting.learner(5, axes, stage).expect("a learner");
    setting.gradient(&mut learner, axes, &samples(LENGTHS));
    learner.step(axes).expect("a finite gradient");
    learner
}

fn restored(setting: &Setting, axes: &Axes, stage: usize, from: &Checkpoint) -> Learner {
    let mut learner = setting.learner(99, axes, stage).expect("a learner");
    let table = learner.role.weights.table.clone();
    let vectors = ModelVectors::open(from, "model", &setting.arch, &table).expect("a legal cut");
    learner.restore(1, |what, range, out| vectors.read(what.name(), range, out)).expect("saved whole");
    learner.all_gather();
    learner
}

/// The bits of all vectors by parameter, and of the weights that layers read, on every rank.
fn state(learner: &Learner, axes: &Axes) -> Vec<(String, Vec<u32>)> {
    let vectors = learner.vectors().flat_map(|what| whole(learner, what, axes));
    let mut all: Vec<_> =
        vectors.map(|(name, values)| (name, values.into_iter().map(f32::to_bits).collect::<Vec<u32>>())).collect();
    let role = &learner.role;
    let reshard = Reshard::new(&role.transformer, &role.weights.table, axes, TensorPart::whole(), None);
    let (weights, _) = reshard.weights(&role.weights);
    for u in 0..weights.table.units().len() {
        let values = weights.to_master(weights.table.units()[u].clone());
        all.push((format!("unit {u}"), values.iter().map(|x| x.to_bits()).collect()));
    }
    all
}

fn saved(world: &World, root: &Shared, learner: &Learner, mesh: Mesh) -> Checkpoint {
    let table = &learner.role.weights.table;
    let file = |what: Vector| shard(("model", what.name()), table, world.rank, learner.stretches(what));
    let files: Vec<_> = learner.vectors().map(file).collect();
    save(root.path(), &world.group(), &files, Manifest::new(1, &mesh, "c0ffee", json!({})), Keep::default())
        .expect("saves");
    newest(root.path()).expect("readable").expect("saved")
}

/// Layouts of all ranks, of half of them, and of one. A rank outside of a half has no axes there.
fn layouts(world: &World) -> Vec<(Option<Axes>, Mesh, usize)> {
    let (n, half) = (world.size, world.size / 2);
    let mesh = |data, sequence, tensor| Mesh { data, pipeline: 1, sequence, tensor, expert: 1 };
    let experts = |expert, mesh| Mesh { expert, ..mesh };
    let all = [
        (experts(2, mesh(n, 1, 1)), 3),
        (experts(2, mesh(n / 2, 1, 2)), 1),
        (experts(2, mesh(n / 4, 2, 2)), 2),
        (mesh(n / 4, 1, 4), 3),
        (experts(4, mesh(n, 1, 1)), 1),
        (Mesh { pipeline: 2, ..mesh(n / 2, 1, 1) }, 3),
        (Mesh { pipeline: 2, ..mesh(1, n / 2, 1) }, 1),
        (experts(2, Mesh { pipeline: 2, ..mesh(n / 2, 1, 1) }), 2),
    ];
    let fewer = [
        (Mesh { pipeline: half, ..mesh(1, 1, 1) }, 0),
        (mesh(half, 1, 1), 3),
        (mesh(half / 2, 1, 2), 0),
        (mesh(1, half, 1), 2),
    ];
    let on = |ranks: usize| move |(mesh, stage)| (world.axes_of(0..ranks, &mesh), mesh, stage);
    let mut layouts: Vec<_> = all.into_iter().map(on(n)).chain(fewer.into_iter().map(on(half))).collect();
    layouts.push((Some(Axes::one()), Mesh::data_only(1), 0));
    layouts
}

fn elsewhere(world: &World) {
    let setting = |family, head, dtype| Setting {
        arch: arch(family, &if family == "qwen3_moe" { eight_experts() } else { json!({}) }),
        head,
        dtype,
        config: config(PolicyLossKind::Clip),
    };
    let settings = [
        setting("qwen3_moe", Head::LanguageModel, DType::F32),
        setting("qwen3", Head::LanguageModel, DType::Bf16),
        setting("llama", Head::Value, DType::F32),
        setting("llama", Head::LanguageModel, DType::F32),
        setting("qwen3_moe", Head::Value, DType::Bf16),
    ];
    let layouts = layouts(world);
    let of_all = layouts.iter().filter(|(_, mesh, _)| mesh.ranks() == world.size);
    for ((axes, mesh, stage), setting) in of_all.zip(settings.iter().cycle()) {
        let axes = axes.as_ref().expect("a mesh of all ranks");
        let root = Shared::new(world);
        let learner = trained(setting, axes, *stage);
        let (from, want) = (saved(world, &root, &learner, *mesh), state(&learner, axes));
        for (axes, other, stage) in &layouts {
            let Some(axes) = axes else { continue };
            let got = state(&restored(setting, axes, *stage, &from), axes);
            assert_eq!(got.len(), want.len());
            for ((name, got), (_, want)) in got.iter().zip(&want) {
                assert!(want.iter().any(|x| *x != 0), "{name} holds something");
                assert!(got == want, "{:?}, {mesh} to {other} at stage {stage}: {name}", setting.dtype);
            }
        }
        world.group().barrier();
    }
}
