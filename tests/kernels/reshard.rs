//! Weights brought from training's layout into the rollout's inside the GPU, against the same weights made in that layout.

use crate::ranks::together;
use crate::zero3::peak;
use crate::{device, on_a_real_gpu};
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::device::Device;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head, Reshard, Shards, TensorPart, Transformer, UnitValues, Weights, init};
use rlhf_hpc::tensor::DType;
use std::ops::Range;

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

fn assert_same(what: &str, got: &Weights, want: &Weights) {
    assert_eq!(got.table.specs(), want.table.specs(), "{what}");
    for u in 0..want.table.units().len() {
        let bits = |values: &UnitValues| values.cuda().to_f32().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(got.local(u)) == bits(want.local(u)), "{what}: unit {u}");
    }
}

/// The layouts of training of the facts: meshes and stages.
fn layouts(world: &World) -> Vec<(Mesh, usize)> {
    let n = world.size;
    let mesh = |sequence: usize, tensor: usize| Mesh { data: n / sequence / tensor, pipeline: 1, sequence, tensor };
    let mut all = vec![(mesh(1, 1), 1), (mesh(1, 1), 3), (mesh(1, n), 0)];
    if n >= 4 {
        all.extend([(mesh(1, 2), 1), (mesh(1, 2), 3), (mesh(2, 2), 3)]);
    }
    all
}

fn rollouts(world: &World) -> Vec<Axes> {
    let fitting = [1, 2, 4].into_iter().filter(|tensor| world.size.is_multiple_of(*tensor));
    let mesh = |tensor| Mesh { tensor, ..Mesh::data_only(world.size / tensor) };
    fitting.map(|tensor| world.axes(&mesh(tensor)).expect("all ranks")).collect()
}

/// The weights of a rank of `axes` at a stage, and the model over them.
fn held(arch: &Arch, axes: &Axes, stage: usize) -> (Transformer, Weights) {
    let weights = weights(arch, TensorPart::of(&axes.tensor));
    let shards = Shards::new(&weights.table, axes, stage);
    let weights = weights.shard(&shards);
    (Transformer::over(arch, &weights.table, axes), weights)
}

#[test]
fn a_whole_model_is_cut_into_the_parts_that_are_made_elsewhere() {
    let (_gpu, _one) = device();
    for (arch, sizes) in [(arch(true, 1, (8, 2)), [2, 4, 8]), (arch(false, 1, (12, 3)), [2, 4, 12])] {
        let (transformer, whole) = held(&arch, &Axes::one(), 0);
        for (size, rank) in sizes.into_iter().flat_map(|size| (0..size).map(move |rank| (size, rank))) {
            let to = TensorPart { rank, size };
            let reshard = Reshard::new(&transformer, &whole.table, &Axes::one(), to);
            let (part, received) = reshard.weights(&whole);
            assert_same(&format!("{rank} of {size}"), &part, &weights(&arch, to));
            assert_eq!(received, 0, "all of it was here");
        }
    }
}

#[test]
fn weights_brought_into_the_rollouts_layout_are_those_of_that_layout() {
    together("reshard::weights_brought_into_the_rollouts_layout_are_those_of_that_layout", &[2, 4], |world| {
        let rollouts = rollouts(world);
        // The second one: over four ranks each holds three key/value heads, some of them twice.
        for arch in [arch(true, 2, (8, 2)), arch(false, 1, (12, 3))] {
            for (mesh, stage) in layouts(world) {
                let axes = world.axes(&mesh).expect("all ranks");
                let (transformer, weights) = held(&arch, &axes, stage);
                for rollout in &rollouts {
                    let to = TensorPart::of(&rollout.tensor);
                    let reshard = Reshard::new(&transformer, &weights.table, &axes, to);
                    let (got, received) = reshard.weights(&weights);
                    let what = format!("{mesh} stage {stage} to tensor {}", to.size);
                    assert_same(&what, &got, &self::weights(&arch, to));
                    let travels = weights.is_sharded() || (mesh.tensor > 1 && mesh.tensor != to.size);
                    assert_eq!(received > 0, travels, "{what}: {received} bytes");
                }
            }
        }
    });
}

#[test]
fn resharding_holds_the_new_part_and_two_old_units_beside_it() {
    if on_a_real_gpu() {
        eprintln!("skipped: a real GPU's memory is counted in classes of sizes");
        return;
    }
    together("reshard::resharding_holds_the_new_part_and_two_old_units_beside_it", &[2, 4], |world| {
        let arch = arch(false, 24, (8, 2));
        let table = weights(&arch, TensorPart::whole()).table;
        let unit = table.units().iter().map(Range::len).max().expect("a unit");
        assert!(table.len() > 12 * unit, "the model is many units");
        for (mesh, stage) in layouts(world) {
            let axes = world.axes(&mesh).expect("all ranks");
            let (transformer, weights) = held(&arch, &axes, stage);
            for rollout in &rollouts(world) {
                let to = TensorPart::of(&rollout.tensor);
                let reshard = Reshard::new(&transformer, &weights.table, &axes, to);
                let ((part, received), bytes) = peak(|| reshard.weights(&weights));
                // Parts of a unit lie end to end, each rounded up, copies of heads included.
                let old = if received > 0 { 2 * 2 * (unit + unit / 2) } else { 0 };
                let what = format!("{mesh} stage {stage} to tensor {}", to.size);
                assert!(bytes >= part.bytes() && bytes <= part.bytes() + old, "{what}: {bytes}, {} kept", part.bytes());
            }
        }
    });
}
