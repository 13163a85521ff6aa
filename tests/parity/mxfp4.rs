//! Experts in MXFP4: values, exports, and damaged files. `families.rs` compares the model with transformers.

use crate::models::relative_gap;
use crate::parity::exported::tensors;
use crate::parity::golden::directory;
use crate::parity::refused::{copy, edit_safetensors};
use rlhf_hpc::device::Device;
use rlhf_hpc::error::Kind;
use rlhf_hpc::model::{Arch, Head, Weights, export, load, pack};
use rlhf_hpc::tensor::DType;
use serde_json::{Value, json};
use std::path::Path;

const NAME: &str = "gpt_oss-mxfp4";
const UP: &str = "model.layers.0.mlp.experts.gate_up_proj";
const DOWN: &str = "model.layers.1.mlp.experts.down_proj";

fn load_as(dir: &Path, dtype: DType) -> (Arch, Weights) {
    load::load(Device::Cpu, dir, Head::LanguageModel, dtype, 0).expect("a model")
}

fn floats(weights: &Weights) -> Vec<f32> {
    weights.to_master(0..weights.table.len()).to_vec()
}

#[test]
fn experts_in_mxfp4_are_exact_in_bf16_and_exports_have_them_in_the_form_of_transformers() {
    let scratch = tempfile::tempdir().expect("a directory");
    let (source, out) = (directory(NAME), scratch.path().join("out"));
    let ((arch, weights), (_, wide)) = (load_as(&source, DType::Bf16), load_as(&source, DType::F32));
    assert!(floats(&weights) == floats(&wide), "bf16 has all bits");
    let warnings = Arch::read(&source).expect("a model").1;
    assert!(
        warnings.len() == 1 && warnings[0].contains("exports have them without quantization_config"),
        "{warnings:?}"
    );
    for bytes_max in [usize::MAX, 20_000] {
        let begun = export::Export::begin(&out, &arch, &weights.table, DType::Bf16, Some(&source));
        begun.expect("a place").shard_bytes_max(bytes_max).write(&weights).expect("it is written");
        let config: Value =
            serde_json::from_slice(&std::fs::read(out.join("config.json")).expect("it is there")).expect("JSON");
        assert!(config.get("quantization_config").is_none() && config["swiglu_limit"] == 7.0, "{config}");
        assert!(Arch::read(&out).expect("a model").1.is_empty());
        let (before, after) = (tensors(&source), tensors(&out));
        assert_eq!((&*after[UP].0, &after[UP].1[..]), ("BF16", &[4, 32, 128][..]));
        assert_eq!((&*after[DOWN].0, &after[DOWN].1[..]), ("BF16", &[4, 64, 32][..]));
        let coded = before.keys().filter(|name| name.ends_with("_blocks") || name.ends_with("_scales")).count();
        assert_eq!((coded, after.len()), (8, before.len() - 4));
        assert!(before.iter().all(|(name, tensor)| after.get(name).is_none_or(|after| after == tensor)));
        assert!(floats(&load_as(&out, DType::Bf16).1) == floats(&weights), "{bytes_max}");
    }
}

#[test]
fn a_frozen_base_in_nf4_has_the_experts_up_to_its_precision() {
    let (dir, head) = (directory(NAME), Head::LanguageModel);
    let (arch, weights) = load_as(&dir, DType::F32);
    let source = load::ModelFiles { dir: &dir, adapter: None, arch: &arch, head }.source().expect("the files");
    for part in ["gate", "up", "down"] {
        let name = format!("model.layers.1.mlp.experts.3.{part}_proj.weight");
        let nf4 = source.nf4(&name).expect("finite values").expect("a projection");
        let mut got = vec![0.0; nf4.n * nf4.k];
        nf4.read(0, &mut got);
        let spec = weights.table.spec(weights.table.find(&name).expect("a matrix"));
        let apart = relative_gap(&got, &pack::unpack(spec, &floats(&weights)[spec.range()]));
        assert!((1e-3..0.15).contains(&apart), "{part}: {apart}");
    }
}

#[test]
fn damaged_experts_in_mxfp4_are_rejected_with_their_names() {
    type Damage = fn(&mut Value, &mut Vec<u8>);
    let cases: [(Damage, &str); 7] = [
        (
            |header, _| drop(header.as_object_mut().expect("an object").remove(&format!("{UP}_scales"))),
            "gate_up_proj_blocks needs model.layers.0.mlp.experts.gate_up_proj_scales, which is missing",
        ),
        (
            |header, _| drop(header.as_object_mut().expect("an object").remove(&format!("{UP}_blocks"))),
            "gate_up_proj_scales needs model.layers.0.mlp.experts.gate_up_proj_blocks, which is missing",
        ),
        (
            |header, _| header[format!("{UP}_blocks")]["shape"] = json!([4, 64, 2, 16]),
            "gate_up_proj_blocks must be U8 of shape [4, 128, 1, 16] (got U8 of shape [4, 64, 2, 16])",
        ),
        (
            |header, _| header[format!("{DOWN}_scales")]["shape"] = json!([4, 64]),
            "down_proj_scales must be U8 of shape [4, 32, 2] (got U8 of shape [4, 64])",
        ),
        (
            |header, _| header[format!("{DOWN}_blocks")]["dtype"] = json!("I8"),
            "down_proj_blocks must be U8 of shape [4, 32, 2, 16] (got I8",
        ),
        (
            |header, data| {
                let start = header[format!("{DOWN}_scales")]["data_offsets"][0].as_u64().expect("a start");
                data[start as usize + 5] = 255;
            },
            "tensor model.layers.1.mlp.experts.down_proj contains NaN or infinite values",
        ),
        (
            |header, data| {
                header[UP] = json!({"dtype": "BF16", "shape": [4, 32, 128],
                    "data_offsets": [data.len(), data.len() + 32_768]});
                data.resize(data.len() + 32_768, 0);
            },
            "unknown in the safetensors files: model.layers.0.mlp.experts.gate_up_proj_blocks, ",
        ),
    ];
    for (damage, wanted) in cases {
        let dir = copy(NAME);
        edit_safetensors(&dir.path().join("model.safetensors"), |header, data| {
            damage(header, data);
            // A file must not have bytes without a tensor.
            let all = header.as_object_mut().expect("an object");
            for part in ["_blocks", "_scales"].map(|part| format!("{UP}{part}")) {
                if !all.contains_key(&part) {
                    let (start, end) = offsets(&part);
                    let rest = json!({"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]});
                    all.insert("model.extra".into(), rest);
                }
            }
        });
        let error =
            load::load(Device::Cpu, dir.path(), Head::LanguageModel, DType::F32, 0).map(|_| ()).expect_err(wanted);
        assert_eq!(error.kind, Kind::Data, "{error}");
        assert!(error.message.contains(wanted) && error.message.contains(&dir.path().display().to_string()), "{error}");
    }
}

/// The bytes of a tensor in the golden model's file.
fn offsets(name: &str) -> (usize, usize) {
    let bytes = std::fs::read(directory(NAME).join("model.safetensors")).expect("checked in");
    let (header, _) = bytes[8..].split_at(u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize);
    let header: Value = serde_json::from_slice(header).expect("JSON");
    let at = |i: usize| header[name]["data_offsets"][i].as_u64().expect("an offset") as usize;
    (at(0), at(1))
}
