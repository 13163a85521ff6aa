//! Weights brought from training's layout into the rollout's inside the GPU, against the same weights made in that layout.

use crate::ranks::plays;
use rlhf_hpc::comm::backends::{self, Axis};
use rlhf_hpc::comm::{Axes, Group, World};
use rlhf_hpc::config::job::Collectives;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::{Stream, gpu};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head, ParamTable, Reshard, Shards, TensorPart, Transformer, UnitValues, Weights, init};
use rlhf_hpc::tensor::DType;
use std::collections::BTreeSet;

/// With such query and key/value heads, shares of the MLP and of the vocabulary that are no multiples of anything, biases
/// where embeddings are tied.
fn arch(tied: bool, layers: usize, (heads, kv_heads): (usize, usize)) -> Arch {
    let config = serde_json::json!({
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 48, "intermediate_size": 100,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 6,
        "vocab_size": 301, "max_position_embeddings": 96, "tie_word_embeddings": tied, "attention_bias": tied,
        "initializer_range": 0.15,
    });
    Arch::from_config(config.as_object().expect("an object")).expect("a known family")
}

/// Random weights in which no two elements of a norm or a bias are alike either.
fn weights(arch: &Arch, part: TensorPart) -> Weights {
    let mut weights = init::init_on(Device::Cuda, arch, Head::LanguageModel, DType::Bf16, 7, part);
    let table = weights.table.clone();
    let mut master = weights.to_master(0..table.len());
    for spec in table.specs().iter().filter(|spec| spec.shape.len() == 1) {
        let rows = spec.rows.iter().cloned().flatten();
        master[spec.offset..].iter_mut().zip(rows).for_each(|(x, row)| *x += 0.3 * (row as f32 * 1.3).sin());
    }
    weights.store_master(0..table.len(), &master);
    weights
}

/// This rank's ranges of weights that are all here; as many as they are below stage 3.
fn sharded(all: &Weights, shards: &Shards) -> Weights {
    let (table, len) = (all.table.clone(), all.table.len());
    let mut own = Weights::scratch(table, all.dtype(), shards);
    own.store_master(0..len, &all.to_master(0..len));
    own
}

fn assert_same(what: &str, got: &Weights, want: &Weights) {
    assert_eq!(got.table.specs(), want.table.specs(), "{what}");
    for u in 0..want.table.units().len() {
        let bits =
            |values: &UnitValues| values.slice().cuda().to_f32().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(got.local(u)) == bits(want.local(u)), "{what}: unit {u}");
    }
}

/// The layouts of training of the tests: meshes and stages.
fn layouts(world: &World) -> Vec<(Mesh, usize)> {
    let n = world.size;
    let mesh = |sequence: usize, tensor: usize| Mesh { data: n / sequence / tensor, pipeline: 1, sequence, tensor };
    let all = [(mesh(1, 1), 1), (mesh(1, 1), 3), (mesh(1, n), 0), (mesh(1, 2), 1), (mesh(1, 2), 3), (mesh(2, 2), 3)];
    all.to_vec()
}

fn rollouts(world: &World) -> Vec<Axes> {
    let mesh = |tensor| Mesh { tensor, ..Mesh::data_only(world.size / tensor) };
    [1, 2, 4].into_iter().map(|tensor| world.axes(&mesh(tensor)).expect("all ranks")).collect()
}

/// The weights of a rank of `axes` at a stage, and the model over them.
fn held(arch: &Arch, axes: &Axes, stage: usize) -> (Transformer, Weights) {
    let weights = weights(arch, TensorPart::of(&axes.tensor));
    let shards = Shards::new(&weights.table, axes, stage);
    let weights = sharded(&weights, &shards);
    (Transformer::over(arch, &weights.table, axes), weights)
}

/// Elements of the new part that no rank has to be asked for: those of this rank's range of its old part.
fn missing(arch: &Arch, weights: &Weights, to: TensorPart) -> usize {
    let own = weights.table.clone();
    let new = ParamTable::on(Device::Cuda, arch, own.head(), to);
    let mut missing = 0;
    for (unit, range) in new.units().iter().enumerate() {
        let here = weights.local(unit).range();
        for (old, new) in own.specs().iter().zip(new.specs()).filter(|(_, new)| range.contains(&new.offset)) {
            let columns = old.columns.len();
            let rows: Vec<usize> = old.rows.iter().cloned().flatten().collect();
            let wanted: BTreeSet<usize> = new.rows.iter().cloned().flatten().collect();
            let is_here = |row: usize, column: usize| {
                let at = |i: usize| old.offset + i * columns + column - old.columns.start;
                let held = (0..rows.len()).filter(|i| rows[*i] == row).any(|i| here.contains(&at(i)));
                old.columns.contains(&column) && held
            };
            for row in wanted {
                missing += new.columns.clone().filter(|column| !is_here(row, *column)).count();
            }
        }
    }
    missing
}

/// Joins the GPUs of those axes that are named.
fn join(world: &World, axes: &Axes, joined: [bool; 2]) {
    let one = Group::one();
    let group = |i: usize, group| if joined[i] { group } else { &one };
    let all = [
        Axis { name: "zero", group: group(0, &axes.zero), stream: Stream::Zero },
        Axis { name: "tensor", group: group(1, &axes.tensor), stream: Stream::Tensor },
    ];
    backends::choose(&world.group(), &all, &format!("GPU {}", world.rank), Collectives::Nccl)
        .expect("the GPUs are joined");
}

/// Whichever axes are joined, the weights are the same; what is missing travels, where both are joined none of it through the
/// host.
#[test]
fn only_what_the_new_part_lacks_travels_and_between_joined_gpus_none_of_it_through_the_host() {
    plays(4, "reshard: ", &[]);
}

pub fn scene(world: &World) {
    for (arch, joined) in [
        (arch(true, 1, (8, 2)), [true, true]),
        (arch(false, 1, (12, 3)), [true, true]),
        (arch(true, 1, (8, 2)), [false, true]),
    ] {
        for (mesh, stage) in layouts(world) {
            let axes = world.axes(&mesh).expect("all ranks");
            join(world, &axes, joined);
            let (transformer, weights) = held(&arch, &axes, stage);
            for rollout in &rollouts(world) {
                let to = TensorPart::of(&rollout.tensor);
                let what = format!("{mesh} stage {stage} to tensor {}, joined {joined:?}", to.size);
                let reshard = Reshard::new(&transformer, &weights.table, &axes, to);
                let copied = || [gpu().counts.up.get(), gpu().counts.down.get()];
                let before = copied();
                let (got, received) = reshard.weights(&weights);
                let through_host = copied() != before;
                assert_same(&what, &got, &self::weights(&arch, to));
                let missing = 2 * missing(&arch, &weights, to);
                let is_whole = to.size <= mesh.tensor && weights.is_sharded();
                if mesh.tensor == 1 && !is_whole || !weights.is_sharded() && to.size != mesh.tensor {
                    // Units of which everyone needs all are gathered as they lie, with what fills them up.
                    let padding: usize = weights.table.specs().iter().map(|spec| spec.len - spec.elements()).sum();
                    let exact = missing..=missing + 2 * padding;
                    assert!(exact.contains(&received), "{what}: {received} bytes, {missing} are missing");
                }
                let all: usize = 2 * (0..mesh.tensor).map(|rank| part_len(&arch, rank, mesh.tensor)).sum::<usize>();
                assert!(received <= all, "{what}: {received} of {all} bytes");
                let over = [weights.is_sharded(), mesh.tensor > 1 && to.size != mesh.tensor];
                let stays = (!over[0] || joined[0]) && (!over[1] || joined[1]);
                assert!(!through_host || !stays, "{what}: values went through the host");
                assert!(through_host || !over[0] || joined[0], "{what}: nothing went through the host");
            }
        }
    }
}

fn part_len(arch: &Arch, rank: usize, size: usize) -> usize {
    ParamTable::on(Device::Cuda, arch, Head::LanguageModel, TensorPart { rank, size }).len()
}
