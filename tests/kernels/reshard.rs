//! Weights resharded from training's layout to the rollout's on the GPU, compared with the same weights created in that
//! layout.

use crate::models;
use crate::ranks::assert_scene;
use crate::weights::{self, assert_same, layouts, rollouts, sharded};
use rlhf_hpc::comm::backends::{self, Axis};
use rlhf_hpc::comm::{Axes, Group, World};
use rlhf_hpc::config::job::Collectives;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::{Stream, gpu};
use rlhf_hpc::model::{Arch, Head, ParamTable, Reshard, Shards, TensorPart, Transformer, Weights};
use rlhf_hpc::tensor::DType;

/// With such query and key/value heads, shares of the MLP and of the vocabulary that are no multiples of anything,
/// biases where embeddings are tied.
fn arch(tied: bool, (heads, kv_heads): (usize, usize)) -> Arch {
    let more = serde_json::json!({
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 301,
        "tie_word_embeddings": tied, "attention_bias": tied,
    });
    models::arch("qwen3", &more)
}

fn weights(arch: &Arch, part: TensorPart) -> Weights {
    weights::weights(Device::Cuda, arch, Head::LanguageModel, DType::Bf16, 7, part)
}

/// The weights of a rank of `axes` at a stage, and the model over them.
fn held(arch: &Arch, axes: &Axes, stage: usize) -> (Transformer, Weights) {
    let weights = weights(arch, TensorPart::from_group(&axes.tensor));
    let shards = Shards::new(&weights.table, axes, stage);
    let weights = sharded(&weights, &shards);
    (Transformer::for_axes(arch, &weights.table, axes), weights)
}

/// Sets up NCCL for the named axes.
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

/// Whichever axes are joined, the weights are the same; where both are, none of them go through the host.
#[test]
fn resharding_over_nccl_moves_no_weights_through_the_host() {
    assert_scene(4, "reshard: ", &[]);
}

pub fn scene(world: &World) {
    for (arch, joined) in [(arch(true, (8, 2)), [true, true]), (arch(false, (12, 3)), [false, true])] {
        // A sequence axis shards weights like a data axis.
        for (mesh, stage) in
            layouts(world).into_iter().filter(|(mesh, _)| mesh.pipeline == 1 && (mesh.sequence == 1 || mesh.tensor > 1))
        {
            let axes = Axes::split_mesh(&world.group(), &mesh);
            join(world, &axes, joined);
            let (transformer, weights) = held(&arch, &axes, stage);
            for rollout in &rollouts(world) {
                let to = TensorPart::from_group(&rollout.tensor);
                let what = format!("{mesh} stage {stage} to tensor {}, joined {joined:?}", to.size);
                let reshard = Reshard::new(&transformer, &weights.table, &axes, to, None);
                let copied = || [gpu().counts.up.get(), gpu().counts.down.get()];
                let before = copied();
                let (got, received) = reshard.weights(&weights);
                let through_host = copied() != before;
                assert_same(&what, &got, &self::weights(&arch, to));
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
