//! The checks of `verify` that need several ranks and a fault in one of them.

use crate::Test;
use crate::models::arch;
use crate::weights::weights;
use rlhf_hpc::cli::verify::replicas::unlike_others;
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::device::Device;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Head, TensorPart};
use rlhf_hpc::tensor::DType;
use serde_json::json;

pub const TESTS: &[Test] =
    &[Test { name: "a rank with a flipped bit in its weights is named", ranks: &[2, 4], check: flipped }];

fn flipped(world: &World) {
    let axes = Axes::split_mesh(&world.group(), &Mesh::data_only(world.size));
    let arch = arch("llama", &json!({}));
    let mut all = weights(Device::Cpu, &arch, Head::LanguageModel, DType::F32, 3, TensorPart::whole());
    assert_eq!(unlike_others(&all, &axes).expect("hashes"), Vec::<String>::new());
    let name = "model.layers.1.mlp.up_proj.weight";
    if world.rank == 1 {
        let range = all.table.spec(all.table.find(name).expect("it has the matrix")).range();
        let mut values = all.to_master(range.clone());
        values[5] = f32::from_bits(values[5].to_bits() ^ 1 << 22);
        all.store_master(range, &values);
    }
    let found = unlike_others(&all, &axes).expect("hashes");
    let start = format!("rank 1 ({}): an element of {name} is ", world.hosts[1]);
    assert!(found.len() == 1 && found[0].starts_with(&start) && found[0].ends_with("bit 22 is flipped"), "{found:?}");
}
