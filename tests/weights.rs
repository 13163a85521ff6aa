//! Weights of models that ranks share, for tests of several targets.

use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::device::Device;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head, Shards, TensorPart, Weights, init};
use rlhf_hpc::tensor::DType;

/// A shard of random weights. All elements of a norm or a bias differ, too.
pub fn weights(device: Device, arch: &Arch, head: Head, dtype: DType, seed: u64, part: TensorPart) -> Weights {
    let mut weights = init::init_on(device, arch, head, dtype, seed, part);
    let table = weights.table.clone();
    let mut master = weights.to_master(0..table.len());
    for spec in table.specs().iter().filter(|spec| spec.shape.len() == 1) {
        let rows = spec.rows.iter().cloned().flatten();
        let values = master[spec.offset..].iter_mut().zip(rows);
        values.for_each(|(x, row)| *x += 0.3 * (row as f32 * 1.3 + seed as f32).sin());
    }
    weights.store_master(0..table.len(), &master);
    weights
}

/// This rank's ranges of weights that are complete here. Below stage 3, all of them.
pub fn sharded(all: &Weights, shards: &Shards) -> Weights {
    let (table, len) = (all.table.clone(), all.table.len());
    let mut own = Weights::scratch(table, all.dtype(), shards);
    own.store_master(0..len, &all.to_master(0..len));
    own
}

/// Asserts that complete weights equal others bit by bit, and that their f32 copies do, too.
pub fn assert_same(what: &str, got: &Weights, want: &Weights) {
    assert_eq!((got.dtype(), got.is_sharded()), (want.dtype(), false), "{what}");
    assert_eq!(got.table.specs(), want.table.specs(), "{what}");
    let bits = |w: &Weights| w.to_master(0..w.table.len()).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(got) == bits(want), "{what}");
    let vectors = want.table.specs().iter().filter(|spec| spec.shape.len() == 1);
    for id in vectors.filter_map(|spec| want.table.find(&spec.name)) {
        let [got, want] = [got, want].map(|w| w.local(w.table.unit_of(id)).vector(id).to_host());
        assert_eq!(got, want, "{what}: parameter {id:?}");
    }
}

/// Training layouts (mesh and stage): some of each kind, for any world size.
pub fn layouts(world: &World) -> Vec<(Mesh, usize)> {
    let n = world.size;
    let mesh =
        |sequence: usize, tensor: usize| Mesh { data: n / sequence / tensor, pipeline: 1, sequence, tensor, expert: 1 };
    let mut all = vec![(mesh(1, 1), 1), (mesh(1, 1), 3), (mesh(1, n), 0)];
    if n >= 2 {
        all.extend([(mesh(2, 1), 2), (mesh(1, 2), 1), (mesh(1, 2), 3)]);
    }
    all.extend([1, 3].map(|stage| (Mesh { expert: n, ..mesh(1, 1) }, stage)));
    let stages = |pipeline: usize, sequence, tensor| {
        let data = n / pipeline / sequence / tensor;
        Mesh { data, pipeline, sequence, tensor, expert: 1 }
    };
    if n >= 2 {
        all.push((stages(2, 1, 1), 1));
    }
    if n >= 4 {
        all.extend([(stages(2, 1, 1), 3), (stages(2, 2, 1), 2), (stages(2, 1, 2), 0)]);
        all.push((Mesh { expert: 2, ..stages(2, 1, 1) }, 1));
        all.extend([(mesh(2, 2), 3), (mesh(n / 2, 1), 3)]);
        all.extend([(Mesh { expert: 2, ..mesh(1, 1) }, 3), (Mesh { expert: 2, ..mesh(1, 2) }, 1)]);
    }
    all
}

/// The axes of a rollout on the ranks of `world`, for each tensor size that divides their number.
pub fn rollouts(world: &World) -> Vec<Axes> {
    let fitting = [1, 2, 4, 8].into_iter().filter(|t| world.size.is_multiple_of(*t));
    let mesh = |tensor| Mesh { tensor, ..Mesh::data_only(world.size / tensor) };
    fitting.map(|tensor| Axes::split_mesh(&world.group(), &mesh(tensor))).collect()
}
