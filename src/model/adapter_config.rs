//! `adapter_config.json`: the settings of an adapter, as PEFT 0.21 reads and writes them.

use super::choice::{Origin, without_layer};
use super::config_json::Reader;
use super::naming::Naming;
use super::peft_patterns::patterns_of;
use super::targets::{Model, last_name, module_of};
use super::tuning::{Param, Tuning};
use crate::config::lora::{AdapterInit, Layers, LoraConfig, Modules, Patterns};
use crate::error::{Error, Result};
use crate::hub::{Kind, Repository};
use crate::sys::files::read_object;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub(super) const FILE: &str = "adapter_config.json";

/// Keys that change nothing once an adapter is trained. Dropout acts in training only.
const IRRELEVANT: [&str; 14] = [
    "auto_mapping",
    // Only an embedding that is also the head matters to it, which `Tuning` rejects.
    "ensure_weight_tying",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    // Settings of initial values.
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",
    // Another backward with the same forward.
    "velora_config",
];

/// Keys that `read` uses.
const USED: [&str; 17] = [
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_rslora",
    "base_model_name_or_path",
];

/// Keys that must be absent, null, false or empty, and the unsupported features that they turn on.
const REFUSED: [(&str, &str); 15] = [
    ("alora_invocation_string", "activated LoRA adapters"),
    ("alora_invocation_tokens", "activated LoRA adapters"),
    ("arrow_config", "routers of several adapters"),
    ("kasa_config", "KaSA adapters"),
    ("layer_replication", "models with repeated layers"),
    ("lora_bias", "biases of adapters"),
    ("megatron_config", "layers of Megatron"),
    ("monteclora_config", "random adapters"),
    ("trainable_token_indices", "trained rows of the embedding"),
    ("use_bdlora", "block-diagonal adapters"),
    ("use_dora", "DoRA adapters"),
    ("use_qalora", "QA-LoRA adapters"),
    ("modules_to_tie", "tied modules"),
    ("target_modules_to_tie", "tied adapters"),
    ("enable_lora", "fused projections"),
];

/// Initial values that leave the base model as it is. Loaded values replace them.
const PLAIN_INITS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// The kind of model that an adapter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A language model, or not given.
    LanguageModel,
    /// A model with a head of scores, which is in the adapter's files.
    Value,
}

/// The contents of `adapter_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// The settings as keys of `[lora]`.
    pub settings: LoraConfig,
    /// The name or path of the base model, for messages.
    pub base: Option<String>,
    pub task: Task,
}

/// Whether a value turns a key off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        _ => false,
    }
}

impl AdapterConfig {
    /// Reads `adapter_config.json` of a directory. Every key is used, known to be without effect, or rejected by its
    /// name. A key that this program does not know is accepted if it is null, false or empty, as PEFT writes features
    /// that are off.
    ///
    /// # Errors
    /// `Data` if there is no such file, or if it describes an adapter of another kind; `Io`.
    pub fn read(dir: &Path) -> Result<Self> {
        let object = read_object(&dir.join(FILE))?.ok_or_else(|| {
            Error::data(format!("{} has no {FILE}", dir.display())).hint("use the directory of an adapter of PEFT")
        })?;
        Self::from_json(&object).map_err(|e| e.within(dir.display()))
    }

    /// The directory of the base model, if it is one: as given, from the directory of the adapter, or in the Hugging
    /// Face cache.
    pub fn base_dir(&self, adapter: &Path) -> Option<PathBuf> {
        let name = self.base.as_deref()?;
        let is_model = |dir: &PathBuf| dir.join("config.json").is_file();
        let local = [PathBuf::from(name), adapter.join(name)].into_iter().find(is_model);
        local.or_else(|| Repository::parse(name, Kind::Model)?.cached().filter(is_model))
    }

    pub(super) fn from_json(object: &Map<String, Value>) -> Result<Self> {
        let c = Reader::for_file(FILE, object);
        refuse(object, &c)?;
        let task = match c.text("task_type")?.as_deref() {
            None | Some("CAUSAL_LM") => Task::LanguageModel,
            Some("SEQ_CLS" | "TOKEN_CLS") => Task::Value,
            Some(other) => {
                let what = format!("must be CAUSAL_LM, SEQ_CLS, TOKEN_CLS or null (got {other:?})");
                return Err(c.wrong("task_type", &what));
            }
        };
        let rank = c.count_needed("r")?;
        let alpha = c.needed("lora_alpha")?;
        if alpha <= 0.0 {
            return Err(c.wrong("lora_alpha", &format!("must be above 0 (got {alpha})")));
        }
        let target_parameters = names(&c, "target_parameters")?;
        let targets = match modules(&c, "target_modules")? {
            None if target_parameters.is_empty() => return Err(c.wrong("target_modules", "is missing")),
            targets => targets.unwrap_or_else(Modules::none),
        };
        let settings = LoraConfig {
            rank,
            alpha,
            targets,
            target_parameters,
            exclude: modules(&c, "exclude_modules")?.unwrap_or_else(Modules::none),
            rslora: c.flag("use_rslora")?.unwrap_or(false),
            rank_pattern: pattern(&c, "rank_pattern", "ranks", |v| v.as_u64().filter(|r| *r > 0).map(|r| r as usize))?,
            alpha_pattern: pattern(&c, "alpha_pattern", "numbers above 0", |v| v.as_f64().filter(|a| *a > 0.0))?,
            layers: layers(&c)?,
            init: init(&c)?,
            train_also: names(&c, "modules_to_save")?,
            ..LoraConfig::default()
        };
        Ok(Self { settings, base: c.text("base_model_name_or_path")?, task })
    }

    /// The trained part of a model with these `params`.
    ///
    /// # Errors
    /// `Data`, naming the key.
    pub fn tuning(&self, params: &[Param]) -> Result<Tuning> {
        Tuning::derive(&self.settings, Origin::File, params).map_err(|e| e.within(FILE))
    }

    /// The file for adapters with this `tuning` in a model with these `params`, whose names `naming` gives. Names are
    /// written in full, unless the last names select the same modules. PEFT 0.6 knows all keys but use_rslora, which is
    /// only written if it is true.
    pub(super) fn to_json(&self, tuning: &Tuning, params: &[Param], naming: Naming) -> Map<String, Value> {
        let Self { settings, base, task } = self;
        let (modules, parameters) = target_names(tuning, params, naming);
        let (ranks, alphas) = patterns_of(settings, tuning, params, naming);
        let also: BTreeSet<String> = tuning.whole.iter().map(|name| naming.in_files(module_of(name))).collect();
        let object = json!({
            "peft_type": "LORA",
            "task_type": if *task == Task::Value { "SEQ_CLS" } else { "CAUSAL_LM" },
            "base_model_name_or_path": base,
            "revision": null,
            "auto_mapping": null,
            "inference_mode": true,
            "r": settings.rank,
            "lora_alpha": number(settings.alpha),
            "lora_dropout": 0.0,
            "target_modules": modules,
            "rank_pattern": object(&ranks, |rank| json!(rank)),
            "alpha_pattern": object(&alphas, |alpha| number(*alpha)),
            "modules_to_save": if also.is_empty() { Value::Null } else { json!(also) },
            "init_lora_weights": if settings.init == AdapterInit::Gaussian { json!("gaussian") } else { json!(true) },
            "bias": "none",
            "fan_in_fan_out": false,
            "layers_to_transform": null,
            "layers_pattern": null,
        });
        let Value::Object(mut object) = object else { unreachable!("it is one") };
        if settings.rslora {
            object.insert("use_rslora".into(), true.into());
        }
        if !parameters.is_empty() {
            object.insert("target_parameters".into(), json!(parameters));
        }
        object.sort_keys();
        object
    }
}

/// Whole numbers are written as integers, which some readers expect.
fn number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}

fn object<T>(all: &[(String, T)], value: impl Fn(&T) -> Value) -> Value {
    Value::Object(all.iter().map(|(pattern, one)| (pattern.clone(), value(one))).collect())
}

/// The names of the adapters' modules, and of their parameters: last names, or names within a layer, if they select these
/// and no other.
fn target_names(tuning: &Tuning, params: &[Param], naming: Naming) -> (BTreeSet<String>, BTreeSet<String>) {
    let model = Model::new(params);
    let (mut of_modules, mut of_parameters) = (BTreeSet::new(), BTreeSet::new());
    for module in tuning.adapters.keys() {
        match model.parameter(module) {
            Some(parameter) => of_parameters.insert(parameter),
            None => of_modules.insert(module.as_str()),
        };
    }
    let short: BTreeSet<String> = of_modules.iter().map(|module| last_name(module).to_owned()).collect();
    let selected = model.modules.iter().filter(|module| module.is_module() && short.contains(last_name(module.name)));
    // The model around it may have other modules with these last names.
    let is_same = naming == Naming::Plain && selected.count() == of_modules.len();
    let modules = if is_same { short } else { of_modules.iter().map(|module| naming.in_files(module)).collect() };
    let of_model: Vec<String> = model.fused.iter().map(|fused| fused.parameter()).collect();
    let parameters = of_parameters.iter().map(|parameter| {
        let within = without_layer(parameter);
        let mut alike = of_model.iter().filter(|other| without_layer(other) == within).peekable();
        let is_short = alike.peek().is_some() && alike.all(|other| of_parameters.contains(other));
        if naming == Naming::Plain && is_short { within } else { naming.in_files(parameter) }
    });
    (modules, parameters.collect())
}

/// Rejects keys that this program does not compute.
fn refuse(object: &Map<String, Value>, c: &Reader) -> Result<()> {
    let kind = c.text("peft_type")?;
    if kind.as_deref() != Some("LORA") {
        let what = format!("must be \"LORA\" (got {})", kind.map_or("none".into(), |kind| format!("{kind:?}")));
        return Err(c.wrong("peft_type", &what).hint("merge another kind of adapter with merge_and_unload of peft"));
    }
    for (key, what) in REFUSED {
        if let Some(value) = object.get(key).filter(|value| !is_off(value)) {
            return Err(c
                .wrong(key, &format!("must be off, as {what} are not supported (got {value})"))
                .hint("merge the adapter with merge_and_unload of peft, and use the merged model"));
        }
    }
    if let Some(bias) = c.text("bias")?.filter(|bias| bias != "none") {
        let what = format!("must be \"none\", as biases of the base do not train (got {bias:?})");
        return Err(c.wrong("bias", &what).hint("merge the adapter with merge_and_unload of peft"));
    }
    if c.flag("fan_in_fan_out")? == Some(true) {
        return Err(c.wrong("fan_in_fan_out", "must be false: no supported model has transposed matrices"));
    }
    let is_known = |key: &str| {
        USED.contains(&key) || IRRELEVANT.contains(&key) || REFUSED.iter().any(|(refused, _)| *refused == key)
    };
    match object.iter().find(|(key, value)| !is_known(key) && !is_off(value)) {
        None => Ok(()),
        Some((key, value)) => Err(c
            .wrong(key, &format!("is unknown (got {value})"))
            .hint("remove the key if it does not change the adapter's results; PEFT 0.21.2 does not have it")),
    }
}

/// A string, or a list of strings.
fn modules(c: &Reader, key: &str) -> Result<Option<Modules>> {
    Ok(match c.get(key) {
        None => None,
        Some(Value::String(pattern)) => Some(Modules::Pattern(pattern.clone())),
        Some(_) => Some(Modules::Names(names(c, key)?)).filter(|all| *all != Modules::Names(Vec::new())),
    })
}

fn names(c: &Reader, key: &str) -> Result<Vec<String>> {
    let Some(value) = c.get(key) else { return Ok(Vec::new()) };
    let all = value.as_array().map(|all| all.iter().map(|one| one.as_str().map(str::to_owned)).collect());
    all.flatten().ok_or_else(|| c.wrong(key, &format!("must be a list of strings (got {value})")))
}

fn pattern<T: Clone>(c: &Reader, key: &str, what: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Patterns<T>> {
    let Some(value) = c.get(key) else { return Ok(Patterns(Vec::new())) };
    let entry = |(pattern, value): (&String, &Value)| Some((pattern.clone(), read(value)?));
    let all = value.as_object().and_then(|all| all.iter().map(entry).collect());
    all.map(Patterns).ok_or_else(|| c.wrong(key, &format!("must map patterns to {what} (got {value})")))
}

/// The layers of `layers_to_transform`: an index or a list of indices.
fn layers(c: &Reader) -> Result<Vec<Layers>> {
    let key = "layers_to_transform";
    let Some(value) = c.get(key) else { return Ok(Vec::new()) };
    let index = |v: &Value| v.as_u64().map(|index| Layers::One(index as usize));
    let all: Option<Vec<Layers>> = match value {
        Value::Array(all) => all.iter().map(index).collect(),
        one => index(one).map(|one| vec![one]),
    };
    let all = all.ok_or_else(|| c.wrong(key, &format!("must be an index or a list of indices (got {value})")))?;
    let is_list =
        |v: &Value| *v == "layers" || v.as_array().is_some_and(|all| all.is_empty() || all.contains(&"layers".into()));
    match c.get("layers_pattern") {
        Some(pattern) if !is_list(pattern) => Err(c.wrong(
            "layers_pattern",
            &format!("must be \"layers\", the list of layers of every supported model (got {pattern})"),
        )),
        _ => Ok(all),
    }
}

/// The initial values, which matter only for settings that are used again.
fn init(c: &Reader) -> Result<AdapterInit> {
    let key = "init_lora_weights";
    match c.get(key) {
        None | Some(Value::Bool(_)) => Ok(AdapterInit::Uniform),
        Some(Value::String(word)) if word == "gaussian" => Ok(AdapterInit::Gaussian),
        Some(Value::String(word)) if PLAIN_INITS.contains(&word.as_str()) => Ok(AdapterInit::Uniform),
        Some(value) => Err(c.wrong(key, &format!("must leave the base model as it is (got {value})")).hint(
            "save it with path_initial_model_for_weight_conversion of save_pretrained, which makes a plain adapter",
        )),
    }
}
