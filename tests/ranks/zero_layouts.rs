//! ZeRO beside the tensor axis: every layout trains what one rank trains, and a checkpoint of any resumes on any other.

use crate::Fact;
use crate::checkpoints::Shared;
use crate::zero::{Setting, arch, distance, update, vector};
use rlhf_hpc::checkpoint::{Checkpoint, Meta, ModelVectors, Payload, newest, part_name, save};
use rlhf_hpc::cli;
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::job::GradientConfig;
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::learn::Role;
use rlhf_hpc::learn::learner::{Learner, VECTORS};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head, ParamSpec, ParamTable, TensorPart, cut, export, init, load};
use rlhf_hpc::tensor::DType;
use serde_json::json;

pub const FACTS: &[Fact] = &[
    Fact { name: "stages beside the tensor axis train what one rank trains", ranks: &[2, 4], check: trains },
    Fact { name: "a checkpoint of any layout resumes bitwise on any other", ranks: &[2, 4], check: resumes },
    Fact { name: "export writes a model from the parts of several ranks", ranks: &[2, 4], check: exports },
    Fact { name: "masters of bf16 weights begin at the values of the files", ranks: &[2, 4], check: masters },
];

/// One layout of these ranks.
#[derive(Clone, Copy, Debug)]
struct Layout {
    tensor: usize,
    stage: usize,
}

impl Layout {
    fn mesh(self, ranks: usize) -> Mesh {
        Mesh { tensor: self.tensor, ..Mesh::data_only(ranks / self.tensor) }
    }

    fn axes(self, world: &World) -> Axes {
        world.axes(&self.mesh(world.size)).expect("a mesh of these ranks")
    }

    fn all(ranks: usize) -> Vec<Self> {
        let tensors = [1, 2, 4].into_iter().filter(|tensor| *tensor <= ranks);
        tensors.flat_map(|tensor| (0..4).map(move |stage| Self { tensor, stage })).collect()
    }
}

/// A vector of the whole model, joined from what all ranks would save.
fn joined(learner: &Learner, axes: &Axes, what: &str) -> Vec<f32> {
    let mine = vector(learner, axes, what);
    let all = axes.tensor.all_gather_bytes(bytemuck::cast_slice(&mine));
    let floats =
        |bytes: &Vec<u8>| bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect();
    let all: Vec<Vec<f32>> = all.iter().map(floats).collect();
    let whole = learner.role.whole();
    let size = axes.tensor.size();
    let table = |rank| ParamTable::part(learner.role.arch(), whole.head(), TensorPart { rank, size });
    let tables: Vec<ParamTable> = (0..size).map(table).collect();
    let mut out = vec![0.0; whole.len()];
    for (i, spec) in whole.specs().iter().enumerate() {
        let part = |(table, values): (&'_ ParamTable, &Vec<f32>)| values[table.specs()[i].range()].to_vec();
        let parts: Vec<Vec<f32>> = tables.iter().zip(&all).map(|(table, values)| part((table, values))).collect();
        let parts: Vec<(&ParamSpec, &[f32])> =
            tables.iter().zip(&parts).map(|(table, values)| (&table.specs()[i], &values[..])).collect();
        cut::join(&parts, spec, &mut out[spec.range()]);
    }
    out
}

fn state(learner: &Learner, axes: &Axes) -> Vec<u32> {
    VECTORS.iter().flat_map(|what| joined(learner, axes, what)).map(f32::to_bits).collect()
}

fn masters(world: &World) {
    let (place, arch) = (Shared::new(world), arch("llama", false));
    let dir = place.path().join("model");
    if world.rank == 0 {
        let made = init::init(&arch, Head::LanguageModel, DType::F32, 3);
        export::export(&dir, &arch, &made, DType::F32, None).expect("exports");
    }
    world.group().barrier();
    // The value head is in no file: it is drawn by the seed.
    for head in [Head::LanguageModel, Head::Value] {
        let setting = Setting { head, dtype: DType::Bf16, ..Setting::new(arch.clone()) };
        let load =
            |dtype, axes: &Axes, stage| Role::load("actor", &dir, head, dtype, 5, axes, stage).expect("a whole model");
        let want = load(DType::F32, &Axes::one(), 0).weights.all_f32();
        assert!(want.iter().any(|x| x.to_bits() & 0xffff != 0), "of more digits than bf16 has");
        for layout in Layout::all(world.size) {
            let axes = layout.axes(world);
            let role = load(DType::Bf16, &axes, layout.stage);
            let begun: Vec<_> = (0..role.weights.table.units().len()).map(|u| bits(&role, u)).collect();
            let (optim, gradient) = (OptimConfig::with_lr(0.0), GradientConfig::default());
            let mut learner = Learner::new(role, &optim, &gradient, 10, &axes, layout.stage).expect("a learner");
            assert!(joined(&learner, &axes, "weights")[..] == want[..], "{head:?} on {layout:?}");
            // An update that moves nothing leaves the weights the masters, rounded.
            assert!(update(&mut learner, &axes, &setting) > 0.0);
            assert!(joined(&learner, &axes, "weights")[..] == want[..], "{head:?} on {layout:?}");
            let after = (0..begun.len()).map(|u| bits(&learner.role, u));
            assert!(after.eq(begun), "weights, {head:?} on {layout:?}");
        }
    }
}

/// The bf16 values of a unit that are here.
fn bits(role: &Role, unit: usize) -> Vec<u16> {
    role.weights.local(unit).bf16().to_vec()
}

fn trains(world: &World) {
    for (family, tied) in [("llama", false), ("qwen3", true)] {
        let setting = Setting::new(arch(family, tied));
        let one = Axes::one();
        let mut alone = setting.learner(&one, 0);
        let before = joined(&alone, &one, "weights");
        let norms = [0, 1].map(|_| update(&mut alone, &one, &setting));
        let want = VECTORS.map(|what| joined(&alone, &one, what));
        for layout in Layout::all(world.size) {
            let axes = layout.axes(world);
            let mut learner = setting.learner(&axes, layout.stage);
            for want in norms {
                let got = update(&mut learner, &axes, &setting);
                assert!((got - want).abs() <= 1e-5 * want, "{family} {layout:?}: norms {got} and {want}");
            }
            for (i, what) in VECTORS.into_iter().enumerate() {
                let zeros = vec![0.0; before.len()];
                let scale = distance(&want[i], if what == "weights" { &before } else { &zeros });
                let off = distance(&joined(&learner, &axes, what), &want[i]) / scale;
                assert!(off <= 1e-4, "{family} {layout:?}: {what} off by {off:e}");
            }
        }
    }
}

fn write(learner: &Learner, world: &World, layout: Layout, root: &Shared, arch: &Arch) {
    let table = &learner.role.weights.table;
    let mut files: Vec<(String, Payload)> = Vec::new();
    for what in VECTORS {
        let name = part_name(&format!("actor.{what}"), table);
        let shard = Payload::shards(&name, learner.stretches(what), table.len());
        files.push((format!("{name}.rank-{}.bin", world.rank), shard));
    }
    let config = serde_json::to_vec(&arch.source).expect("a configuration");
    if world.rank == 0 {
        files.push(("config.json".to_string(), Payload::bytes(&config)));
    }
    let meta = Meta { mesh: layout.mesh(world.size), config_hash: "c0ffee".to_string() };
    save(root.path(), 2, &world.group(), &files, &json!({ "roles": ["actor"] }), meta, 1).expect("saves");
}

fn read(setting: &Setting, axes: &Axes, stage: usize, from: &Checkpoint) -> Learner {
    let mut learner = setting.learner(axes, stage);
    let table = learner.role.weights.table.clone();
    let vectors = ModelVectors::open(from, "actor", &setting.arch, &table).expect("parts of this model");
    learner.restore(2, |what, range, out| vectors.read(what, range, out)).expect("saved whole");
    learner.publish();
    learner
}

fn resumes(world: &World) {
    for dtype in [DType::F32, DType::Bf16] {
        let setting = Setting { dtype, ..Setting::new(arch("qwen3", dtype == DType::Bf16)) };
        let layouts = Layout::all(world.size);
        for (i, &layout) in layouts.iter().enumerate() {
            let (axes, root) = (layout.axes(world), Shared::new(world));
            let mut learner = setting.learner(&axes, layout.stage);
            (0..2).for_each(|_| assert!(update(&mut learner, &axes, &setting) > 0.0));
            write(&learner, world, layout, &root, &setting.arch);
            let saved = state(&learner, &axes);
            let checkpoint = newest(root.path()).expect("readable").expect("saved");
            let here = read(&setting, &Axes::one(), 0, &checkpoint);
            assert!(state(&here, &Axes::one()) == saved, "{layout:?} on one rank");
            // Every layout meets every other tensor size, and each stage some of the others.
            for other in layouts.iter().copied().filter(|other| (other.stage + i).is_multiple_of(2)) {
                let axes = other.axes(world);
                let mut again = read(&setting, &axes, other.stage, &checkpoint);
                assert!(state(&again, &axes) == saved, "{layout:?} on {other:?}");
                assert!(update(&mut again, &axes, &setting).is_finite());
            }
        }
    }
}

fn exports(world: &World) {
    let setting = Setting::new(arch("llama", false));
    for layout in Layout::all(world.size).into_iter().filter(|layout| layout.stage != 2) {
        let (axes, root) = (layout.axes(world), Shared::new(world));
        let mut learner = setting.learner(&axes, layout.stage);
        update(&mut learner, &axes, &setting);
        write(&learner, world, layout, &root, &setting.arch);
        let want = joined(&learner, &axes, "weights");
        if world.rank == 0 {
            let (from, out) = (root.path().display().to_string(), root.path().join("out"));
            let to = out.display().to_string();
            let line = ["export", &from, "--out", &to].map(str::to_string);
            assert_eq!(cli::main(line.to_vec()), 0, "{layout:?}");
            let (_, weights) = load::load(&out, Head::LanguageModel, DType::F32, 0).expect("an export");
            assert!(weights.all_f32()[..] == want[..], "{layout:?}");
        }
    }
}
