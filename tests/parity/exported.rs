//! The contents that loading and exporting preserve.

use crate::models::arch;
use crate::names;
use crate::parity::golden::{DENSE_MODELS, LANGUAGE_MODELS, Model, REWARD_MODELS, directory};
use crate::parity::refused::{copy, edit_safetensors};
use rlhf_hpc::device::Device;
use rlhf_hpc::error::Kind;
use rlhf_hpc::model::{Arch, Head, ParamSpec, TensorPart, Weights, export, init, load, pack};
use rlhf_hpc::tensor::DType;
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

/// The elements of a norm, a bias or a value head.
pub fn vector(w: &Weights, name: &str) -> Vec<f32> {
    let id = w.table.find(name).unwrap();
    w.local(w.table.unit_of(id)).vector(id).to_host()
}

/// (dtype, shape, bytes) of every tensor in a directory's safetensors.
pub fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = fs::read(path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let value = (format!("{:?}", view.dtype()), view.shape().to_vec(), view.data().to_vec());
                assert!(all.insert(name, value).is_none());
            }
        }
    }
    all
}

/// All values in f32.
fn floats(weights: &Weights) -> Vec<f32> {
    weights.to_master(0..weights.table.len()).to_vec()
}

fn json_of(path: &Path) -> Map<String, Value> {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn an_export_contains_the_named_chat_templates_but_no_foreign_file_and_can_be_replaced() {
    let (dir, from) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let name = LANGUAGE_MODELS[0];
    let (arch, weights) = load::load(Device::Cpu, &directory(name), Head::LanguageModel, DType::F32, 0).unwrap();
    fs::create_dir(from.path().join("additional_chat_templates")).unwrap();
    fs::write(from.path().join("additional_chat_templates/tool_use.jinja"), "x").unwrap();
    fs::write(dir.path().join("secret"), "secret").unwrap();
    for name in ["chat_template.jinja", "additional_chat_templates/rag.jinja", "generation_config.json"] {
        std::os::unix::fs::symlink(dir.path().join("secret"), from.path().join(name)).unwrap();
    }
    let out = dir.path().join("export");
    for _ in 0..2 {
        export::export(&out, &arch, &weights, DType::F32, Some(from.path())).unwrap();
        assert_eq!(fs::read(out.join("additional_chat_templates/tool_use.jinja")).unwrap(), b"x");
        assert_eq!(names(&out.join("additional_chat_templates")), ["tool_use.jinja"]);
        assert!(!out.join("chat_template.jinja").exists(), "a link to a file outside the model directory");
    }
}

#[test]
fn a_model_loaded_in_f32_and_exported_in_f32_is_bitwise_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let reward_models = REWARD_MODELS.map(|n| (n, Head::Value));
    for (name, head) in LANGUAGE_MODELS.map(|n| (n, Head::LanguageModel)).into_iter().chain(reward_models) {
        let (arch, weights) = load::load(Device::Cpu, &directory(name), head, DType::F32, 0).unwrap();
        let out = dir.path().join(name);
        export::export(&out, &arch, &weights, DType::F32, None).unwrap();
        let (before, after) = (tensors(&directory(name)), tensors(&out));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
        for (tensor, (dtype, shape, bytes)) in &before {
            assert_eq!((&after[tensor].0[..], &after[tensor].1), ("F32", shape), "{name} {tensor}");
            if dtype == "F32" {
                assert!(&after[tensor].2 == bytes, "{name} {tensor}");
            }
        }
        let (_, again) = load::load(Device::Cpu, &out, head, DType::F32, 0).unwrap();
        assert!(floats(&weights)[..] == floats(&again)[..], "{name}");
    }
}

#[test]
fn a_bf16_model_keeps_its_bits_through_either_working_dtype_and_in_shards() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in [DType::F32, DType::Bf16] {
        let (arch, weights) = load::load(Device::Cpu, &directory("mistral"), Head::LanguageModel, dtype, 0).unwrap();
        let out = dir.path().join(format!("{dtype:?}"));
        let begun = export::Export::begin(&out, &arch, &weights.table, DType::Bf16, None).unwrap();
        begun.shard_bytes_max(10_000).write(&weights).unwrap();
        assert!(tensors(&directory("mistral")) == tensors(&out));
        assert_eq!(json_of(&out.join("config.json"))["dtype"], "bfloat16");
        let index = json_of(&out.join("model.safetensors.index.json"));
        let files = names(&out).into_iter().filter(|n| n.ends_with(".safetensors")).count();
        assert!(files > 3, "{files} shards");
        for file in index["weight_map"].as_object().unwrap().values() {
            assert!(out.join(file.as_str().unwrap()).is_file());
        }
        let bytes: usize = tensors(&out).values().map(|t| t.2.len()).sum();
        assert_eq!(index["metadata"]["total_size"], bytes);
        let (_, again) = load::load(Device::Cpu, &out, Head::LanguageModel, dtype, 0).unwrap();
        let range = 0..weights.table.len();
        assert_eq!(weights.to_master(range.clone())[..], again.to_master(range)[..]);
    }
}

/// The joined and reordered matrices, and the tensors around a language model, are those of the source.
#[test]
fn exports_have_the_tensors_of_their_source_under_its_names() {
    let scratch = tempfile::tempdir().expect("a directory");
    for name in DENSE_MODELS {
        let (source, out) = (directory(name), scratch.path().join(name));
        let (arch, weights) = load::load(Device::Cpu, &source, Head::LanguageModel, DType::F32, 0).expect("a model");
        export::export(&out, &arch, &weights, DType::F32, Some(&source)).expect("it is written");
        let again = load::load(Device::Cpu, &out, Head::LanguageModel, DType::F32, 0).expect("an export").1;
        assert_eq!(floats(&weights), floats(&again), "{name}");
        let (theirs, ours) = (tensors(&source), tensors(&out));
        let shapes = |all: &BTreeMap<String, (String, Vec<usize>, Vec<u8>)>| {
            all.iter().map(|(name, (_, shape, _))| (name.clone(), shape.clone())).collect::<Vec<_>>()
        };
        // Codes of 4 bits are written as numbers (`mxfp4.rs`).
        if !theirs.keys().any(|tensor| tensor.ends_with("_blocks")) {
            assert_eq!(shapes(&ours), shapes(&theirs), "{name}");
        }
        for (tensor, (dtype, _, bytes)) in &theirs {
            let is_other = ["vision_tower", "multi_modal", "visual", "mtp."].iter().any(|part| tensor.contains(part));
            assert!(!is_other || (dtype, bytes) == (&ours[tensor].0, &ours[tensor].2), "{name}: {tensor}");
        }
        let config = json_of(&out.join("config.json"));
        // The old name of LongRoPE, which transformers 5 rejects.
        assert_ne!(config.get("rope_scaling").map(|rope| &rope["type"]), Some(&json!("su")), "{name}");
        assert_eq!(
            config.get("text_config").is_some(),
            json_of(&source.join("config.json")).contains_key("text_config")
        );
    }
}

#[test]
fn export_keeps_the_keys_of_config_json_and_copies_the_tokenizer() {
    let (dir, source) = (tempfile::tempdir().unwrap(), copy("llama2"));
    let mut config = json_of(&source.path().join("config.json"));
    config.insert("a_key_of_tomorrow".into(), json!({"kept": [1, 2]}));
    fs::write(source.path().join("config.json"), Value::Object(config.clone()).to_string()).unwrap();
    fs::write(source.path().join("tokenizer.json"), "{}").unwrap();
    fs::write(source.path().join("generation_config.json"), "{\"eos_token_id\": [2, 7], \"top_k\": 5}").unwrap();
    let (arch, weights) = load::load(Device::Cpu, source.path(), Head::LanguageModel, DType::F32, 0).unwrap();
    assert_eq!(arch.eos_tokens, [2, 7]);
    let out = dir.path().join("out");
    export::export(&out, &arch, &weights, DType::Bf16, Some(source.path())).unwrap();
    config.insert("torch_dtype".into(), json!("bfloat16"));
    assert_eq!(json_of(&out.join("config.json")), config);
    assert_eq!(json_of(&out.join("generation_config.json"))["top_k"], 5);
    assert_eq!(fs::read_to_string(out.join("tokenizer.json")).unwrap(), "{}");
    assert_eq!(names(&out), ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]);
}

#[test]
fn an_export_replaces_only_an_export_and_leaves_no_temporary_files() {
    let dir = tempfile::tempdir().unwrap();
    let (arch, weights) = load::load(Device::Cpu, &directory("qwen2"), Head::LanguageModel, DType::F32, 0).unwrap();
    let out = dir.path().join("out");
    let begun = export::Export::begin(&out, &arch, &weights.table, DType::F32, None).unwrap();
    begun.shard_bytes_max(10_000).write(&weights).unwrap();
    export::export(&out, &arch, &weights, DType::F32, None).unwrap();
    assert_eq!(names(&out), ["config.json", "generation_config.json", "model.safetensors"]);
    fs::write(out.join("thesis.tex"), "months of work").unwrap();
    let error = export::export(&out, &arch, &weights, DType::F32, None).unwrap_err();
    assert_eq!(error.kind, Kind::Usage);
    assert!(error.message.contains("thesis.tex"), "{error}");
    assert_eq!(names(dir.path()), ["out"]);
    assert!(out.join("thesis.tex").is_file());
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert_eq!(export::export(&file.join("out"), &arch, &weights, DType::F32, None).unwrap_err().kind, Kind::Io);
    let error = export::export(&file, &arch, &weights, DType::F32, None).unwrap_err();
    assert!(error.kind == Kind::Usage && error.message.contains("file is a file"), "{error}");
}

#[test]
fn a_critic_made_from_a_language_model_has_a_new_head_and_exports_as_a_reward_model() {
    let (arch, critic) = load::load(Device::Cpu, &directory("llama2"), Head::Value, DType::F32, 9).unwrap();
    let (_, actor) = load::load(Device::Cpu, &directory("llama2"), Head::LanguageModel, DType::F32, 9).unwrap();
    let head = vector(&critic, "score.weight");
    let std = (head.iter().map(|x| x * x).sum::<f32>() / 48.0).sqrt();
    assert!((0.5..1.5).contains(&(std * 49.0)), "std {std}, wanted about 1/49");
    let other = load::load(Device::Cpu, &directory("llama2"), Head::Value, DType::F32, 10).unwrap().1;
    assert_ne!(head, vector(&other, "score.weight"));
    let norm = |w: &Weights| vector(w, "model.norm.weight");
    assert_eq!(norm(&critic), norm(&actor));

    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("critic");
    let arch = Arch { reward_mean_std: Some((0.5, 2.0)), ..arch };
    export::export(&out, &arch, &critic, DType::F32, None).unwrap();
    let config = json_of(&out.join("config.json"));
    assert_eq!(config["architectures"], json!(["LlamaForSequenceClassification"]));
    assert_eq!(config["id2label"].as_object().unwrap().len(), 1);
    let (again_arch, again) = load::load(Device::Cpu, &out, Head::Value, DType::F32, 0).unwrap();
    assert_eq!(again_arch.head, Head::Value);
    assert_eq!(again_arch.reward_mean_std, Some((0.5, 2.0)));
    assert!(floats(&critic)[..] == floats(&again)[..]);
}

#[test]
fn new_weights_depend_only_on_name_and_position_and_have_the_requested_std() {
    let arch = arch("llama", &json!({"num_attention_heads": 4, "head_dim": 12, "initializer_range": 0.02}));
    let untied = init::init(&arch, Head::LanguageModel, DType::F32, 7);
    let tied = init::init(&Arch { tied: true, ..arch.clone() }, Head::LanguageModel, DType::F32, 7);
    let of = |w: &Weights, name: &str| {
        let spec: &ParamSpec = w.table.spec(w.table.find(name).unwrap());
        pack::unpack(spec, &w.to_master(spec.range()))
    };
    // Row layout in one, panels in the other.
    assert_eq!(of(&untied, "model.embed_tokens.weight"), of(&tied, "model.embed_tokens.weight"));
    let q = of(&untied, "model.layers.0.self_attn.q_proj.weight");
    assert_ne!(q, of(&untied, "model.layers.1.self_attn.q_proj.weight"));
    let std = (q.iter().map(|x| x * x).sum::<f32>() / q.len() as f32).sqrt();
    assert!((0.019..0.021).contains(&std), "std {std}");
    assert!(of(&untied, "model.norm.weight").iter().all(|&x| x == 1.0));
    assert_ne!(floats(&init::init(&arch, Head::LanguageModel, DType::F32, 8))[..], floats(&untied)[..]);
}

#[test]
fn padding_of_panels_stays_zero_in_weights_and_gradients() {
    let m = Model::load("llama3", Head::LanguageModel, DType::F32);
    let (grads, ..) = m.language_model_backward();
    let flat = grads.to_vec();
    for spec in m.weights.table.specs() {
        let (n, k) = spec.dims();
        let mut is_padding = vec![true; spec.len];
        (0..n).for_each(|r| (0..k).for_each(|c| is_padding[spec.layout.index(k, r, c)] = false));
        assert_eq!(is_padding.iter().filter(|p| !**p).count(), spec.elements(), "{}", spec.name);
        for values in [&m.weights.to_master(spec.range())[..], &flat[spec.range()]] {
            let values = values.iter().zip(&is_padding);
            assert!(values.filter(|(_, p)| **p).all(|(&x, _)| x == 0.0), "{}", spec.name);
        }
    }
}

/// A rank of stage 3 reads only its range. Damage elsewhere is detected by other ranks.
#[test]
fn only_the_requested_range_of_a_unit_is_read() {
    // A damaged value in the last row of the embedding.
    let dir = tempfile::tempdir().unwrap();
    let (arch, weights) = load::load(Device::Cpu, &directory("llama2"), Head::LanguageModel, DType::F32, 0).unwrap();
    export::export(dir.path().join("m").as_path(), &arch, &weights, DType::F32, None).unwrap();
    edit_safetensors(&dir.path().join("m/model.safetensors"), |header, data| {
        let end = header["model.embed_tokens.weight"]["data_offsets"][1].as_u64().unwrap() as usize;
        data[end - 4..end].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let (made, head) = (dir.path().join("m"), Head::LanguageModel);
    let source = load::open(Device::Cpu, &made, &arch, head, 0, TensorPart::whole()).unwrap();
    let unit = source.table.units()[0].clone();
    let half = unit.len() / 2 / 64 * 64;
    let read = |range: Range<usize>| source.fill_f32(range.clone(), &mut vec![0.0; range.len()]);
    assert!(read(unit.start..half).is_ok());
    for error in [read(half..unit.end).unwrap_err(), read(unit).unwrap_err()] {
        assert!(error.message.contains("model.embed_tokens.weight contains NaN"), "{error}");
    }
}

#[test]
fn an_export_that_is_not_committed_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (arch, weights) = load::load(Device::Cpu, &directory("qwen2"), Head::LanguageModel, DType::F32, 0).unwrap();
    let out = dir.path().join("out");
    let mut export = export::Export::begin(&out, &arch, &weights.table, DType::F32, None).unwrap();
    export.unit(weights.local(0)).unwrap();
    assert_eq!(names(dir.path()).len(), 1, "the partial export is next to it");
    drop(export);
    assert!(names(dir.path()).is_empty());
}
