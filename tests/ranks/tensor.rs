//! Models split over the tensor axis, and rows split over the sequence axis, compared with the same model on one rank.

use crate::Test;
use crate::collectives::values;
use crate::models::arch;
use crate::tensor_models::{Side, all_cut_shapes, assert_near, bits, capped, experts, latent, row, shard, sinks};
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::Arch;
use rlhf_hpc::ops::zigzag;
use rlhf_hpc::tensor::DType;
use serde_json::json;

pub const TESTS: &[Test] = &[
    Test { name: "an ordered sum adds every element in rank order", ranks: &[1, 3], check: ordered },
    Test {
        name: "a language model on tensor ranks equals the whole one, including gradients",
        ranks: &[2, 8],
        check: language_models,
    },
    Test {
        name: "in bf16 a model on tensor ranks equals the whole one up to bf16's precision",
        ranks: &[4],
        check: half_precision,
    },
    Test {
        name: "log-probabilities and gradients of ring attention equal those of one rank",
        ranks: &[3],
        check: rings,
    },
];

fn ordered(world: &World) {
    for len in [0, 1, 7, 1000, 5000, (1 << 18) + 77] {
        let mut x = values(world.rank, len);
        world.group().all_reduce_sum_ordered(&mut x);
        let mut want = values(0, len);
        for rank in 1..world.size {
            want.iter_mut().zip(values(rank, len)).for_each(|(a, b)| *a += b);
        }
        assert!(bits(&x) == bits(&want), "len {len}");
    }
}

/// The passes over a row, as on one rank; and the same bits again, whether activations are kept, recomputed or not
/// needed.
fn compare(what: &str, arch: &Arch, dtype: DType, axes: &Axes, lengths: &[usize], tolerance: f64) {
    let (side, alone, row) = (Side::new(arch, dtype, axes), Side::new(arch, dtype, &Axes::one()), row(arch, lengths));
    let (mut got, want) = (side.pass(&row, false), alone.pass(&row, false));
    let again = side.pass(&row, true);
    assert!(bits(&again.hidden) == bits(&got.hidden) && bits(&again.grads) == bits(&got.grads), "{what}: recomputed");
    let part = side.part(&row);
    assert!(bits(&side.forward(&part, None)) == bits(&got.hidden), "{what}: scoring");
    for other in axes.tensor.all_gather_bytes(bytemuck::cast_slice(&got.logprobs)) {
        assert!(other == bytemuck::cast_slice::<f32, u8>(&got.logprobs), "{what}: all ranks record the same");
    }

    let near = |name: &str, got: &[f32], want: &[f32]| assert_near(&format!("{what}: {name}"), got, want, tolerance);
    let rows = zigzag::rows(&row.cu_seqlens, axes.sequence.rank(), axes.sequence.size());
    let own: Vec<f32> = rows.iter().flat_map(|&i| want.hidden[i * arch.width..][..arch.width].to_vec()).collect();
    near("hidden states", &got.hidden, &own);
    let at_places = |x: &[f32]| part.row_indices.iter().map(|&place| x[place]).collect::<Vec<f32>>();
    near("log-probabilities", &got.logprobs, &at_places(&want.logprobs));
    near("entropies", &got.entropies, &at_places(&want.entropies));
    axes.sequence.all_reduce_sum_ordered(&mut got.grads);
    for (spec, of) in side.weights.table.specs().iter().zip(alone.weights.table.specs()) {
        let want = &want.grads[of.range()];
        assert!(lengths.len() < 2 || want.iter().any(|g| *g != 0.0), "{what}: {} has a gradient", spec.name);
        near(&spec.name, &got.grads[spec.range()], &shard(of, want, spec));
    }
}

fn on_tensor_ranks(world: &World, dtype: DType, tolerance: f64) {
    let axes = Axes::split_mesh(&world.group(), &Mesh { tensor: world.size, ..Mesh::data_only(1) });
    for (name, arch) in all_cut_shapes(world.size) {
        compare(name, &arch, dtype, &axes, &[20, 1, 40], tolerance);
    }
}

fn language_models(world: &World) {
    on_tensor_ranks(world, DType::F32, 1e-5);
}

/// Sums of other lengths are rounded to 8 bits before the next product.
fn half_precision(world: &World) {
    on_tensor_ranks(world, DType::Bf16, 3e-2);
}

/// From no token over fewer than 2S to many. A row of labels has queries of many keys, or none: where a query sees one
/// or two, its gradients cancel to rounding.
const LENGTHS: &[&[usize]] = &[&[1, 3, 90, 0, 2, 33, 5], &[1], &[2, 1, 5, 13], &[160], &[]];

/// With a window shorter than any piece, one that spans a few, and one longer than most sequences.
fn rings(world: &World) {
    let axes = Axes::split_mesh(&world.group(), &Mesh { sequence: world.size, ..Mesh::data_only(1) });
    let windows = [4, 25, 100].map(|window| ("mistral", json!({"sliding_window": window})));
    let whole = ["llama", "qwen3", "olmo2"].map(|family| (family, json!({})));
    // Queries at later positions are larger.
    let scaled = json!({"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.3}});
    // So few experts that each has some of any tokens.
    let mut few = sinks();
    few["num_local_experts"] = 4.into();
    for (family, keys) in windows
        .into_iter()
        .chain(whole)
        .chain([("gemma2", capped()), ("ministral3", scaled)])
        .chain([("qwen3_moe", experts()), ("deepseek_v3", latent()), ("gpt_oss", few)])
    {
        for lengths in LENGTHS {
            let what = format!("{family} {keys}, lengths {lengths:?}");
            compare(&what, &arch(family, &keys), DType::F32, &axes, lengths, 1e-5);
        }
    }
}
