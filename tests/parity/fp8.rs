//! Models whose matrices are in FP8: values are code times factor, and damage is named.

use super::refused::edit_safetensors;
use crate::models::arch;
use rlhf_hpc::device::Device;
use rlhf_hpc::model::{Head, export, init, load};
use rlhf_hpc::tensor::DType;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// e4m3 in f64, from the definition: +-(8 + fraction) 2^(exponent - 10), without the 8 if the exponent is 0 (then 1).
fn e4m3(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = if exponent == 0 { fraction } else { 8.0 + fraction } * 2f64.powi(exponent.max(1) - 10);
    if code < 128 { magnitude } else { -magnitude }
}

const BLOCK: usize = 128;
const NAME: &str = "model.layers.0.mlp.down_proj.weight";

/// Saves the model in `dir` with codes and factors for `NAME` and all gates, and returns the values of `NAME`. Rows and
/// columns fill no whole blocks.
fn saved(dir: &Path, one_factor: bool) -> Vec<f32> {
    let arch = arch("llama", &json!({"hidden_size": 136, "intermediate_size": 270, "num_hidden_layers": 1}));
    let weights = init::init(&arch, Head::LanguageModel, DType::F32, 3);
    export::export(dir, &arch, &weights, DType::F32, None).unwrap();
    let mut found = Vec::new();
    edit_safetensors(&dir.join("model.safetensors"), |header, data| {
        for name in [NAME, "model.layers.0.mlp.gate_proj.weight"] {
            let shape: Vec<usize> = serde_json::from_value(header[name]["shape"].clone()).unwrap();
            let across = shape[1].div_ceil(BLOCK);
            let codes: Vec<u8> = (0..shape[0] * shape[1]).map(|i| (i * 37 % 127 + i % 2 * 128) as u8).collect();
            let blocks = if one_factor { 1 } else { shape[0].div_ceil(BLOCK) * across };
            let factors: Vec<f32> = (0..blocks).map(|i| 0.003 + 0.001 * i as f32).collect();
            if name == NAME {
                let factor = |i: usize| {
                    let (row, column) = (i / shape[1], i % shape[1]);
                    if one_factor { factors[0] } else { factors[row / BLOCK * across + column / BLOCK] }
                };
                found = codes.iter().enumerate().map(|(i, code)| (e4m3(*code) * f64::from(factor(i))) as f32).collect();
            }
            let dims = if one_factor { json!([]) } else { json!([blocks / across, across]) };
            for (tensor, dtype, shape, bytes) in [
                (name.to_owned(), "F8_E4M3", json!(shape), codes),
                (format!("{name}_scale_inv"), "F32", dims, factors.iter().flat_map(|x| x.to_le_bytes()).collect()),
            ] {
                header[tensor] =
                    json!({"dtype": dtype, "shape": shape, "data_offsets": [data.len(), data.len() + bytes.len()]});
                data.extend(bytes);
            }
        }
        compact(header, data);
    });
    let quantization = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": if one_factor { Value::Null } else { json!([BLOCK, BLOCK]) }});
    configure(dir, quantization);
    found
}

/// Leaves out bytes that no tensor uses, as the format needs.
fn compact(header: &mut Value, data: &mut Vec<u8>) {
    let tensors = header.as_object_mut().unwrap();
    let mut packed = Vec::new();
    for (_, tensor) in tensors.iter_mut().filter(|(name, _)| *name != "__metadata__") {
        let [start, end]: [usize; 2] = serde_json::from_value(tensor["data_offsets"].clone()).unwrap();
        tensor["data_offsets"] = json!([packed.len(), packed.len() + end - start]);
        packed.extend_from_slice(&data[start..end]);
    }
    *data = packed;
}

fn configure(dir: &Path, quantization: Value) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"] = quantization;
    fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn matrices_in_fp8_are_code_times_the_factor_of_their_block_or_of_the_matrix() {
    for one_factor in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let want = saved(dir.path(), one_factor);
        for dtype in [DType::F32, DType::Bf16] {
            let (arch, weights) = load::load(Device::Cpu, dir.path(), Head::LanguageModel, dtype, 0).unwrap();
            let out = dir.path().join("export");
            export::export(&out, &arch, &weights, dtype, None).unwrap();
            let exported = super::exported::tensors(&out);
            let (of, shape, bytes) = &exported[NAME];
            assert_eq!(shape.iter().product::<usize>(), want.len());
            let values: Vec<f32> = match &**of {
                "F32" => bytes.chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect(),
                _ => bytes.chunks(2).map(|x| f32::from_bits(u32::from_le_bytes([0, 0, x[0], x[1]]))).collect(),
            };
            let rounded = |x: f32| match dtype {
                DType::F32 => x,
                DType::Bf16 => f32::from_bits(u32::from(rlhf_hpc::dtype::round_bf16(x)) << 16),
            };
            assert!(values.iter().zip(&want).all(|(got, want)| *got == rounded(*want)), "{dtype:?}");
            let config = fs::read_to_string(out.join("config.json")).unwrap();
            assert!(!config.contains("quantization_config"), "{config}");
            assert!(!exported.keys().any(|name| name.ends_with("_scale_inv")));
        }
    }
}

type Damage = fn(&Path);

fn edit_header(dir: &Path, edit: fn(&mut Value)) {
    edit_safetensors(&dir.join("model.safetensors"), |header, data| {
        edit(header);
        compact(header, data);
    });
}

#[test]
fn damaged_factors_of_fp8_and_other_blocks_are_named() {
    let cases: [(Damage, &str); 4] = [
        (
            |dir| configure(dir, json!({"quant_method": "fp8", "weight_block_size": [64, 64]})),
            "weight_block_size must be [128, 128] or null",
        ),
        (|dir| configure(dir, json!({"quant_method": "gptq"})), "must be \"bitsandbytes\" or \"fp8\""),
        (
            |dir| {
                edit_header(dir, |header| {
                    header.as_object_mut().unwrap().remove(&format!("{NAME}_scale_inv"));
                });
            },
            "weight_scale_inv is missing",
        ),
        (
            |dir| edit_header(dir, |header| header[format!("{NAME}_scale_inv")]["shape"] = json!([3, 2])),
            "must have one F32, or one for each block: [2, 3]",
        ),
    ];
    for (damage, words) in cases {
        let dir = tempfile::tempdir().unwrap();
        saved(dir.path(), false);
        damage(dir.path());
        let error = load::load(Device::Cpu, dir.path(), Head::LanguageModel, DType::F32, 0).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
