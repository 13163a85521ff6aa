//! Adapters of PEFT for the tiny models, which tests/golden/lora.py makes.

use super::*;
use crate::config::lora::LoraConfig;
use crate::device::Device;
use crate::model::export::Export;
use crate::model::params::{Init, ParamTable};
use crate::model::part::{Cut, TensorPart};
use crate::model::tuning::Adapter;
use crate::model::{Arch, Head};
use crate::tensor::{DType, Layout};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The cases with their names.
fn cases() -> Vec<(String, Value)> {
    let text = fs::read(golden("lora.json")).expect("the golden is checked in");
    let all: serde_json::Map<String, Value> = serde_json::from_slice(&text).expect("JSON");
    all.into_iter().collect()
}

/// The parameters of the model of a case, with its own head.
fn params_of(case: &Value) -> Vec<Param> {
    let name = case["model"].as_str().expect("a name");
    let arch = Arch::load(&golden("models").join(name)).expect("a model");
    ParamTable::new(&arch, arch.head).shapes()
}

/// A directory with the files of a golden adapter, which a test may change.
struct Changed {
    dir: tempfile::TempDir,
    params: Vec<Param>,
}

impl Changed {
    fn new(name: &str) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        for file in [adapter_config::FILE, TENSORS] {
            fs::copy(golden("lora").join(name).join(file), dir.path().join(file)).expect("a copy");
        }
        let case = cases().into_iter().find(|(case, _)| case == name).expect("a case").1;
        Self { dir, params: params_of(&case) }
    }

    fn set(&self, key: &str, value: Value) {
        let path = self.dir.path().join(adapter_config::FILE);
        let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
        config[key] = value;
        fs::write(path, config.to_string()).expect("it is written");
    }

    /// Renames tensors, or removes those without a new name.
    fn rename(&self, new_name: impl Fn(&str) -> Option<String>) {
        let path = self.dir.path().join(TENSORS);
        let bytes = fs::read(&path).expect("a file");
        let tensors = SafeTensors::deserialize(&bytes).expect("tensors");
        let kept: Vec<(String, TensorView)> =
            tensors.tensors().into_iter().filter_map(|(name, tensor)| Some((new_name(&name)?, tensor))).collect();
        fs::write(path, safetensors::serialize(kept, None).expect("bytes")).expect("it is written");
    }

    fn error(&self) -> String {
        let error = AdapterFiles::open(self.dir.path(), &self.params).err().expect("an error");
        format!("{} / {}", error.message, error.hint.unwrap_or_default())
    }
}

#[test]
fn the_settings_of_peft_select_the_modules_ranks_and_scales_that_peft_selects() {
    let cases = cases();
    assert!(cases.len() > 10);
    for (name, case) in cases {
        let config = AdapterConfig::from_json(case["config"].as_object().expect("settings")).expect(&name);
        let tuning = config.tuning(&params_of(&case)).expect(&name);
        let adapters: BTreeMap<String, Adapter> = case["adapters"]
            .as_object()
            .expect("adapters")
            .iter()
            .map(|(module, of)| {
                let (rank, scale) = (of[0].as_u64().expect("a rank") as usize, of[1].as_f64().expect("a scale") as f32);
                (module.clone(), Adapter { rank, scale })
            })
            .collect();
        assert_eq!(tuning.adapters, adapters, "{name}");
        assert_eq!(json!(tuning.whole), case["whole"], "{name}");
    }
}

/// The settings before PEFT takes the names of experts and routers for parameters.
#[test]
fn a_job_on_all_linear_layers_has_the_adapters_of_peft_in_every_family_of_mixtures() {
    let cases: Vec<_> =
        cases().into_iter().filter(|(name, _)| name.starts_with("all-") && name != "all-qwen3").collect();
    assert_eq!(cases.len(), 8);
    for (name, case) in cases {
        let (of_peft, params) = (&case["config"], params_of(&case));
        let (rank, rslora) = (&of_peft["r"], &of_peft["use_rslora"]);
        let settings: LoraConfig =
            toml::from_str(&format!("rank = {rank}\nalpha = 16\nrslora = {rslora}")).expect(&name);
        let tuning = Tuning::lora(&settings, "lora", &params).expect(&name);
        let converted = AdapterConfig::from_json(of_peft.as_object().expect("settings")).expect(&name);
        assert_eq!(tuning.adapters, converted.tuning(&params).expect(&name).adapters, "{name}");
        let object = json!({"peft_type": "LORA", "r": rank, "lora_alpha": 16, "use_rslora": rslora,
                            "target_modules": "all-linear"});
        let raw = AdapterConfig::from_json(object.as_object().expect("settings")).expect(&name);
        assert_eq!(raw.tuning(&params).expect(&name).adapters, tuning.adapters, "{name}");
        // PEFT reads what is written here as it reads its own file.
        let written = raw.to_json(&tuning, &params, Naming::Plain);
        for key in ["rank_pattern", "alpha_pattern"] {
            assert_eq!(written[key], of_peft[key], "{name}: {key}");
        }
        let again = AdapterConfig::from_json(&written).expect(&name).tuning(&params).expect(&name);
        assert_eq!(again.adapters, tuning.adapters, "{name}");
        let has = |key: &str| written.get(key).is_some_and(|all| all.as_array().is_some_and(|all| !all.is_empty()));
        assert_eq!(has("target_parameters"), !of_peft["target_parameters"].is_null(), "{name}");
    }
}

#[test]
fn adapters_of_experts_that_do_not_fit_are_rejected_by_their_tensor() {
    for (key, value, message) in [
        ("rank_pattern", json!({}), "experts.lora_A.weight has rank 4, but adapter_config.json gives 2 / check r"),
        (
            "target_parameters",
            json!(["gate_up_proj"]),
            "unknown tensors: base_model.model.model.layers.0.mlp.gate.lora_A",
        ),
        (
            "target_parameters",
            json!(["gate_up_proj", "experts.down_proj", "gate.weight"]),
            "missing tensors: base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight",
        ),
        (
            "target_modules",
            json!(["o_proj", "up_proj"]),
            "target_modules must name both gate_proj and up_proj, or none",
        ),
        (
            "target_parameters",
            json!(["gate_up_proj", "gate.weight", "embed_tokens.weight"]),
            "(got \"embed_tokens.weight\"",
        ),
    ] {
        let changed = Changed::new("experts");
        changed.set(key, value.clone());
        let error = changed.error();
        assert!(error.contains(message), "{key} = {value}: {error}");
    }
}

/// Element `i` of each tensor of the goldens.
fn element(i: usize) -> f32 {
    (i % 61) as f32 / 32.0 - 30.0 / 32.0
}

fn value(tensor: &Stored, i: usize) -> f32 {
    let bits = |at: usize| u16::from_le_bytes([tensor.bytes[at], tensor.bytes[at + 1]]);
    match tensor.dtype {
        Dtype::F32 => f32::from_le_bytes(tensor.bytes[4 * i..4 * i + 4].try_into().expect("4 bytes")),
        Dtype::F16 => half::f16::from_bits(bits(2 * i)).to_f32(),
        _ => half::bf16::from_bits(bits(2 * i)).to_f32(),
    }
}

/// The tensors of an adapter by the names of parameters.
fn all_values(files: &AdapterFiles) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let read = |name: &String| {
        let tensor = files.get(name).expect("it has the name");
        let values = (0..tensor.shape.iter().product()).map(|i| value(&tensor, i)).collect();
        (name.clone(), (tensor.shape.to_vec(), values))
    };
    files.names.keys().map(read).collect()
}

fn directories() -> Vec<(String, Value)> {
    let all: Vec<_> = cases().into_iter().filter(|(name, _)| golden("lora").join(name).is_dir()).collect();
    assert!(all.len() > 5);
    all
}

#[test]
fn tensors_that_peft_wrote_are_read_in_f32_bf16_and_f16() {
    let mut dtypes = Vec::new();
    for (name, case) in directories() {
        let files = AdapterFiles::open(&golden("lora").join(&name), &params_of(&case)).expect(&name);
        assert_eq!(files.config.base.as_deref(), Some(&*format!("models/{}", case["model"].as_str().expect("a name"))));
        for (param, (_, values)) in all_values(&files) {
            assert!(values.iter().enumerate().all(|(i, x)| *x == element(i)), "{name}: {param}");
            dtypes.push(format!("{:?}", files.get(&param).expect("it").dtype));
        }
        assert_eq!(files.names.len(), 2 * files.tuning.adapters.len() + files.tuning.whole.len(), "{name}");
    }
    dtypes.sort();
    dtypes.dedup();
    assert_eq!(dtypes, ["BF16", "F16", "F32"]);
}

/// A table of an adapter's parameters in the order of the model.
fn table_of(all: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) -> ParamTable {
    let mut table = ParamTable::empty(Device::Cpu, Head::LanguageModel, TensorPart::whole(), 0.02);
    for (name, (shape, _)) in all {
        let dims: Vec<Cut> = shape.iter().map(|n| Cut::Whole(*n)).collect();
        table.add(name, &dims, Layout::Row, Init::Zeros);
    }
    table.end_unit();
    table
}

/// With ADAPTER_DIR, the directories stay there, and `python tests/golden/lora.py DIR` loads them in PEFT.
#[test]
fn an_adapter_that_is_written_has_the_tensors_and_the_settings_of_peft() {
    let temporary = tempfile::tempdir().expect("a directory");
    let to = std::env::var_os("ADAPTER_DIR").map_or_else(|| temporary.path().to_owned(), PathBuf::from);
    for (name, case) in directories() {
        let (params, from) = (params_of(&case), golden("lora").join(&name));
        let read = AdapterFiles::open(&from, &params).expect(&name);
        let values = all_values(&read);
        for dtype in [DType::Bf16, DType::F32] {
            let (out, table) = (to.join(&name), Arc::new(table_of(&values)));
            let AdapterFiles { config, tuning, .. } = &read;
            let mut export = Export::begin_adapter(&out, config, tuning, &params, &table, dtype, name == "inside")
                .expect("it begins");
            for (i, spec) in table.specs().iter().enumerate() {
                export.rows(i, &values[&spec.name].1).expect("rows");
            }
            export.commit().expect("it ends");
            let written = AdapterFiles::open(&out, &params).expect("it is read");
            assert_eq!(written.tuning, read.tuning, "{name}");
            assert_eq!(all_values(&written), values, "{name}");
            assert_eq!((&written.config.base, written.config.task), (&config.base, config.task), "{name}");
            let tensor_names = |dir: &Path| {
                let bytes = fs::read(dir.join(TENSORS)).expect("a file");
                let (_, header) = SafeTensors::read_metadata(&bytes).expect("tensors");
                let mut names = header.offset_keys();
                names.sort();
                (names, header.metadata().clone())
            };
            assert_eq!(tensor_names(&out), tensor_names(&from), "{name}");
        }
        let text = fs::read_to_string(to.join(&name).join(adapter_config::FILE)).expect("a file");
        let keys: serde_json::Map<String, Value> = serde_json::from_str(&text).expect("JSON");
        assert!(keys.keys().is_sorted() && keys["inference_mode"] == true, "{text}");
        let theirs = case["config"].as_object().expect("settings");
        let unknown: Vec<&String> = keys.keys().filter(|key| !theirs.contains_key(*key)).collect();
        assert!(unknown.is_empty(), "{name}: {unknown:?}");
    }
}

#[test]
fn last_names_are_written_if_they_select_the_same_modules() {
    for (name, names) in [
        ("names", json!(["q_proj", "v_proj"])),
        ("tails", json!(["model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"])),
        ("scores", json!(["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"])),
    ] {
        let (params, dir) = (Changed::new(name).params, golden("lora").join(name));
        let files = AdapterFiles::open(&dir, &params).expect(name);
        assert_eq!(files.config.to_json(&files.tuning, &params, Naming::Plain)["target_modules"], names, "{name}");
    }
}

#[test]
fn names_of_unusual_files_are_read() {
    let changed = Changed::new("scores");
    changed.rename(|name| {
        let name = name.replace("lora_A.weight", "lora_A.default.weight").replace("lora_B.", "lora_B.default.");
        Some(name.replace("score.weight", "score.modules_to_save.default.weight"))
    });
    let files = AdapterFiles::open(changed.dir.path(), &changed.params).expect("an adapter");
    let plain = AdapterFiles::open(&golden("lora/scores"), &changed.params).expect("an adapter");
    assert_eq!(all_values(&files), all_values(&plain));
    let changed = Changed::new("names");
    changed.rename(|name| name.strip_prefix(PREFIX).map(str::to_owned));
    AdapterFiles::open(changed.dir.path(), &changed.params).expect("an adapter without the prefix");
}

#[test]
fn a_value_head_may_be_absent_from_the_adapter_of_a_language_model_only() {
    let changed = Changed::new("scores");
    changed.rename(|name| (!name.contains("score")).then(|| name.to_owned()));
    assert!(changed.error().contains("missing tensors: base_model.model.score.weight"), "{}", changed.error());
    changed.set("task_type", json!("CAUSAL_LM"));
    changed.set("modules_to_save", Value::Null);
    let files = AdapterFiles::open(changed.dir.path(), &changed.params).expect("an adapter");
    assert!(files.tuning.whole.contains("score.weight") && files.get("score.weight").is_none());
}

/// An adapter whose tensors have rank 2, with another value of a key.
fn with(key: &str, value: &Value) -> Changed {
    let changed = Changed::new("names");
    changed.set(key, value.clone());
    changed
}

#[test]
fn settings_that_are_not_computed_are_rejected_by_their_key() {
    for (key, value, message) in [
        ("use_dora", json!(true), "use_dora must be off, as DoRA adapters are not supported (got true)"),
        ("use_qalora", json!(true), "use_qalora must be off, as QA-LoRA"),
        ("alora_invocation_tokens", json!([1, 2]), "alora_invocation_tokens must be off, as activated LoRA"),
        ("lora_bias", json!(true), "lora_bias must be off, as biases of adapters"),
        ("bias", json!("lora_only"), "bias must be \"none\""),
        ("fan_in_fan_out", json!(true), "fan_in_fan_out must be false"),
        ("target_parameters", json!("experts.down_proj"), "target_parameters must be a list of strings"),
        (
            "target_parameters",
            json!(["q_proj.weight"]),
            "must not name what target_modules selects (got model.layers.0.self",
        ),
        (
            "target_parameters",
            json!(["norm.weight"]),
            "target_parameters must name matrices of layers only (got \"norm.w",
        ),
        ("layer_replication", json!([[0, 1], [0, 1]]), "layer_replication must be off"),
        ("megatron_config", json!({"a": 1}), "megatron_config must be off"),
        ("trainable_token_indices", json!([3]), "trainable_token_indices must be off"),
        ("kasa_config", json!({"beta": 0.1}), "kasa_config must be off, as KaSA"),
        ("init_lora_weights", json!("pissa_niter_4"), "init_lora_weights must leave the base model as it is"),
        ("init_lora_weights", json!("olora"), "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", json!("loftq"), "init_lora_weights must"),
        ("init_lora_weights", json!("corda"), "init_lora_weights must"),
        ("peft_type", json!("IA3"), "peft_type must be \"LORA\" (got \"IA3\")"),
        ("peft_type", Value::Null, "peft_type must be \"LORA\" (got none)"),
        ("task_type", json!("SEQ_2_SEQ_LM"), "task_type must be CAUSAL_LM"),
        ("sparsity", json!(0.5), "sparsity is unknown (got 0.5)"),
        ("r", json!(0), "r must be a positive integer"),
        ("r", Value::Null, "r is missing"),
        ("lora_alpha", json!(0), "lora_alpha must be above 0 (got 0)"),
        ("target_modules", Value::Null, "target_modules is missing"),
        ("target_modules", json!([1]), "target_modules must be a list of strings"),
        ("target_modules", json!(["c_attn"]), "target_modules must match linear layers"),
        ("target_modules", json!(["q_proj", "embed_tokens"]), "modules_to_save trains it whole"),
        ("target_modules", json!("(?!q)"), "must be a supported regular expression"),
        ("layers_to_transform", json!([2]), "layers_to_transform must be at most 1, the last layer"),
        ("layers_to_transform", json!("0"), "layers_to_transform must be an index"),
        ("rank_pattern", json!({"q_proj": 0}), "rank_pattern must map patterns to ranks"),
        ("alpha_pattern", json!({"q_proj": "8"}), "alpha_pattern must map patterns to numbers above 0"),
    ] {
        let error = with(key, &value).error();
        assert!(error.contains(message), "{key} = {value}: {error}");
    }
}

#[test]
fn settings_that_do_not_fit_the_tensors_are_rejected_and_those_without_effect_are_ignored() {
    for (key, value, message) in [
        ("r", json!(4), "lora_A.weight has rank 2, but adapter_config.json gives 4 / check r and rank_pattern"),
        ("rank_pattern", json!({"v_proj": 3}), "v_proj.lora_A.weight has rank 2, but adapter_config.json gives 3"),
        (
            "target_modules",
            json!(["q_proj"]),
            "unknown tensors: base_model.model.model.layers.0.self_attn.v_proj.lora_A",
        ),
        (
            "target_modules",
            json!("all-linear"),
            "missing tensors: base_model.model.model.layers.0.mlp.down_proj.lora_A",
        ),
        ("modules_to_save", json!(["norm"]), "missing tensors: base_model.model.model.layers.0.input_layernorm.weight"),
    ] {
        let error = with(key, &value).error();
        assert!(error.contains(message), "{key} = {value}: {error}");
    }
    // PEFT writes features that are off; entries without effect are ignored, as PEFT does.
    for (key, value) in [
        ("sparsity", Value::Null),
        ("sparsity", json!({})),
        ("lora_dropout", json!(0.1)),
        ("init_lora_weights", json!("eva")),
        ("target_modules", json!(["q_proj", "v_proj", "c_attn"])),
        ("exclude_modules", json!(["up_proj"])),
        ("rank_pattern", json!({"none": 7})),
        ("modules_to_save", json!(["classifier"])),
    ] {
        let changed = with(key, &value);
        let opened = AdapterFiles::open(changed.dir.path(), &changed.params);
        assert!(opened.is_ok(), "{key} = {value}: {:?}", opened.err());
    }
}

#[test]
fn files_that_do_not_fit_are_rejected_with_the_tensor_and_the_reason() {
    let (changed, other) = (Changed::new("names"), Changed::new("tails"));
    let error = AdapterFiles::open(changed.dir.path(), &other.params).err().expect("another base");
    assert_eq!(error.hint.as_deref(), Some("use the adapter's base model, which is models/llama3"));
    let words = "q_proj.lora_A.weight has shape [2, 40], but the model needs [2, 32]: the adapter is for another base";
    assert!(error.message.contains(words), "{}", error.message);
    changed.rename(|name| Some(name.replace("layers.1", "layers.7")));
    assert!(changed.error().contains("unknown tensors: base_model.model.model.layers.7"), "{}", changed.error());
    let changed = Changed::new("names");
    changed.rename(|name| Some(name.replace("layers.1.self_attn.q_proj.lora_A.weight", "x.lora_magnitude_vector")));
    assert!(changed.error().contains("DoRA is not supported"), "{}", changed.error());
    let changed = Changed::new("names");
    changed.rename(|name| (!name.contains("layers.1.self_attn.q_proj.lora_B")).then(|| name.to_owned()));
    let missing = "missing tensors: base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight / use the adapter's";
    assert!(changed.error().contains(missing), "{}", changed.error());
    let path = changed.dir.path().join(TENSORS);
    fs::write(&path, &fs::read(&path).expect("a file")[..2000]).expect("it is cut");
    assert!(changed.error().contains("the file is truncated"), "{}", changed.error());
    fs::rename(&path, changed.dir.path().join("adapter_model.bin")).expect("it moves");
    assert!(changed.error().contains("only adapter_model.bin, a pickle file"), "{}", changed.error());
    fs::remove_file(changed.dir.path().join("adapter_model.bin")).expect("it goes");
    assert!(changed.error().contains("has no adapter_model.safetensors"), "{}", changed.error());
    fs::remove_file(changed.dir.path().join(adapter_config::FILE)).expect("it goes");
    assert!(changed.error().contains("has no adapter_config.json"), "{}", changed.error());
}

#[test]
fn an_embedding_that_is_also_the_head_cannot_train_in_an_adapter() {
    let case = cases().into_iter().find(|(name, _)| name == "regex").expect("a tied model").1;
    let mut config = case["config"].as_object().expect("settings").clone();
    config.insert("modules_to_save".into(), json!(["embed_tokens"]));
    let error = AdapterConfig::from_json(&config).expect("settings").tuning(&params_of(&case)).expect_err("tied");
    assert!(error.message.contains("modules_to_save must not name the embedding"), "{}", error.message);
}

/// The results of tests/golden/adapters.py.
#[test]
fn adapters_with_results_of_peft_exist_for_each_model_with_a_gradient_for_each_parameter() {
    let of_models = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "reward", "reward-qwen2"];
    let dense = ["phi3-short", "glm4", "gemma3_text", "gemma3", "olmo2", "granite"];
    for name in of_models.into_iter().chain(dense) {
        let params = params_of(&json!({"model": name}));
        let files = AdapterFiles::open(&golden("adapters").join(name), &params).expect(name);
        let bytes = fs::read(golden("adapters").join(format!("{name}.safetensors"))).expect("results");
        let results = SafeTensors::deserialize(&bytes).expect("tensors");
        for (param, shape) in files.shapes(&params) {
            let param = if name == "gemma3" { Naming::Inner.in_files(&param) } else { param };
            assert_eq!(results.tensor(&format!("grad.{param}")).expect(name).shape(), shape, "{name}: {param}");
        }
    }
}
