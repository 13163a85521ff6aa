//! Model directories: `config.json`, `generation_config.json`, and the safetensors files with their index.

use crate::place;
use rlhf_hpc::device::Device;
use rlhf_hpc::model::{Arch, Head, TensorPart, load, other_kind, unapplied_sampling, weight_files};
use std::fs;

/// Reads the small files of a model, and lists its parameters if they are few.
pub fn config(data: &[u8]) {
    place::write_all(["c/config.json", "c/generation_config.json"], place::cut(data));
    let dir = place::path("c");
    drop((other_kind(&dir), weight_files(&dir), unapplied_sampling(&dir, &[("temperature", 1.0)])));
    let Ok(arch) = Arch::load(&dir) else { return };
    if arch.blocks.len() < 100 {
        let head = arch.head;
        drop(load::open(Device::Cpu, &dir, &arch, head, 0, TensorPart::whole()));
    }
}

const CONFIG: &[u8] = include_bytes!("../../golden/models/reward-qwen2/config.json");
const TENSORS: &[u8] = include_bytes!("../../golden/models/reward-qwen2/model.safetensors");

/// Loads weights. The input is the header of a file (with its length), and an index if there is one. The values of the
/// header's tensors follow it.
pub fn tensors(data: &[u8]) {
    let [header, index] = place::cut(data);
    place::write("w/config.json", CONFIG);
    let whole = [header.unwrap_or_default(), &TENSORS[header_bytes()..]].concat();
    place::write_all(["w/model.safetensors", "w/model.safetensors.index.json"], [Some(&whole), index]);
    let arch = Arch::load(&place::path("w")).expect("a good config.json");
    for head in [Head::Value, Head::LanguageModel] {
        let Ok(source) = load::open(Device::Cpu, &place::path("w"), &arch, head, 0, TensorPart::whole()) else {
            continue;
        };
        let units = source.table.units().to_vec();
        for unit in units {
            let mut values = vec![0.0; unit.len()];
            drop(source.fill_f32(unit, &mut values));
        }
    }
}

fn header_bytes() -> usize {
    8 + u64::from_le_bytes(TENSORS[..8].try_into().expect("eight bytes")) as usize
}

pub fn config_seeds() -> Vec<Vec<u8>> {
    let models = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "reward", "reward-qwen2"];
    let read = |model: &str, name: &str| {
        fs::read(format!("{}/../golden/models/{model}/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap_or_default()
    };
    models.map(|model| place::join(&[&read(model, "config.json"), &read(model, "generation_config.json")])).into()
}

pub fn tensors_seeds() -> Vec<Vec<u8>> {
    let header = &TENSORS[..header_bytes()];
    let index = br#"{"metadata": {"total_size": 1}, "weight_map": {"score.weight": "model.safetensors"}}"#;
    vec![header.to_vec(), place::join(&[header, index])]
}
