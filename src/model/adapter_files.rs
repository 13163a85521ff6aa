//! The files of an adapter, as PEFT 0.21 reads and writes them: `adapter_config.json`, and the tensors in
//! `adapter_model.safetensors`.

use super::adapter_config::{self, AdapterConfig, Task};
use super::files::{Checkpoint, Stored, listed};
use super::naming::{Naming, TOWER};
use super::old_adapters;
use super::targets::{Fused, Model};
use super::tensor_files::Names;
use super::tuning::{Param, Tuning, adapter_names};
use crate::error::{Error, Result};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::path::Path;

pub(super) const TENSORS: &str = "adapter_model.safetensors";
/// The files of an adapter.
pub const ALL: [&str; 2] = [adapter_config::FILE, TENSORS];
/// The modules of PEFT around the model, before each name.
const PREFIX: &str = "base_model.model.";

/// The names of an export.
pub(super) const NAMES: Names = Names { file: "adapter_model", prefix: PREFIX, naming: Naming::Plain };

/// An adapter directory whose files match each other and a model.
pub struct AdapterFiles {
    pub config: AdapterConfig,
    pub tuning: Tuning,
    checkpoint: Checkpoint,
    /// The name of each parameter's tensor in the file.
    names: BTreeMap<String, String>,
    /// Tensors of all experts whose parts are tensors of each expert in the file.
    joined: BTreeMap<String, Vec<f32>>,
}

impl AdapterFiles {
    /// Opens the adapter in `dir` for a model with these `params`. Checks everything but the values. Each tensor may be
    /// f32, bf16 or f16. A model with a value head may take the adapter of a language model, which has no head.
    ///
    /// # Errors
    /// `Data`, naming the file and the key or the tensor: the errors of `AdapterConfig::read`; a pickle; tensors that
    /// are missing, unknown, of another rank than the settings give, or of another shape than the model needs; `Io`.
    pub fn open(dir: &Path, params: &[Param]) -> Result<Self> {
        let config = AdapterConfig::read(dir)?;
        let tuning = config.tuning(params).map_err(|e| e.within(dir.display()))?;
        let checkpoint = Checkpoint::open_file(tensors_of(dir)?)?;
        let mut names = BTreeMap::new();
        for name in checkpoint.names() {
            if let Some(other) = names.insert(our_name(name), name.to_owned()) {
                return Err(Error::data(format!("{}: {other} and {name} are the same tensor", dir.display())));
            }
        }
        let joined = old_adapters::join(&checkpoint, &mut names, &tuning, &Model::new(params).fused)?;
        let files = Self { config, tuning, checkpoint, names, joined };
        files.check(dir, params)?;
        Ok(files)
    }

    /// The values of a tensor that the file has in parts.
    pub(super) fn joined(&self, param: &str) -> Option<&[f32]> {
        self.joined.get(param).map(Vec::as_slice)
    }

    /// The tensor of a parameter. `None` for a parameter that the adapter does not train, and for a value head that is
    /// not in the file.
    pub(super) fn get(&self, param: &str) -> Option<Stored<'_>> {
        self.checkpoint.get(self.names.get(param)?)
    }

    fn check(&self, dir: &Path, params: &[Param]) -> Result<()> {
        let path = dir.join(TENSORS);
        let base = self.config.base.as_deref().unwrap_or("another model");
        let of_base = format!("use the adapter's base model, which is {base}");
        let shapes = self.shapes(params);
        let shapes_of_experts = self.experts(&Model::new(params).fused);
        let unknown: Vec<&str> =
            self.names.iter().filter(|(ours, _)| !shapes.contains_key(*ours)).map(|(_, name)| name.as_str()).collect();
        if let Some(first) = unknown.first() {
            let hint = match first {
                name if name.contains("lora_embedding") => "adapters of embeddings are not supported".into(),
                name if name.contains("lora_magnitude_vector") => "DoRA is not supported; merge the adapter".into(),
                name if name.contains("lora_") => format!("{of_base}; or check target_modules of its config"),
                _ => "parameters that train whole must be in modules_to_save, and in the model".to_string(),
            };
            let unknown = listed(&unknown);
            return Err(Error::data(format!("{}: unknown tensors: {unknown}", path.display())).hint(hint));
        }
        let has_no_head = |name: &str| self.config.task == Task::LanguageModel && !name.starts_with("model.");
        let is_there = |ours: &String| self.names.contains_key(ours) || self.joined.contains_key(ours);
        let missing = shapes.keys().filter(|ours| !is_there(ours) && !has_no_head(ours));
        let missing: Vec<String> = missing.map(|ours| format!("{PREFIX}{ours}")).collect();
        if !missing.is_empty() {
            let missing = listed(&missing.iter().map(String::as_str).collect::<Vec<_>>());
            return Err(Error::data(format!("{}: missing tensors: {missing}", path.display())).hint(of_base));
        }
        for (ours, name) in &self.names {
            let stored = self.get(ours).expect("it has the name");
            let (shape, needed, path) = (stored.shape, &shapes[ours], path.display());
            if !matches!(stored.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
                let dtype = stored.dtype;
                return Err(Error::data(format!("{path}: tensor {name} must be F32, BF16 or F16 (got {dtype:?})")));
            }
            // The dim that the base model decides; whole parameters have no rank. A rank of each expert.
            let (rank_dim, base_dim) = if ours.ends_with(".lora_A.weight") { (0, 1) } else { (1, 0) };
            let experts = shapes_of_experts.get(ours).copied().unwrap_or(1);
            let is_adapter = ours.ends_with(".lora_A.weight") || ours.ends_with(".lora_B.weight");
            if is_adapter && shape.len() == 2 && shape[base_dim] == needed[base_dim] && shape != needed {
                return Err(Error::data(format!(
                    "{path}: tensor {name} has rank {}, but {} gives {}",
                    shape[rank_dim] as f64 / experts as f64,
                    adapter_config::FILE,
                    needed[rank_dim] / experts
                ))
                .hint("check r and rank_pattern"));
            }
            if shape != needed {
                return Err(Error::data(format!(
                    "{path}: tensor {name} has shape {shape:?}, but the model needs {needed:?}: the adapter is for \
                     another base model"
                ))
                .hint(of_base));
            }
        }
        Ok(())
    }

    /// The number of experts of each tensor of all experts.
    fn experts(&self, fused: &[&Fused]) -> BTreeMap<String, usize> {
        let of = |fused: &&Fused| Some((fused.experts?, adapter_names(&self.tuning.tensor_module(fused))));
        let all = fused.iter().filter_map(of);
        all.flat_map(|(experts, names)| names.map(|name| (name, experts))).collect()
    }

    /// The shape of each parameter that trains.
    fn shapes(&self, params: &[Param]) -> BTreeMap<String, Vec<usize>> {
        let Tuning { adapters, whole, .. } = &self.tuning;
        let mut shapes = BTreeMap::new();
        for Param { name, shape, .. } in params {
            if whole.contains(name) {
                shapes.insert(name.clone(), shape.clone());
            }
            let module = name.strip_suffix(".weight").and_then(|module| adapters.get_key_value(module));
            if let (Some((module, adapter)), [outputs, inputs]) = (module, &shape[..]) {
                let [a, b] = adapter_names(module);
                shapes.insert(a, vec![adapter.rank, *inputs]);
                shapes.insert(b, vec![*outputs, adapter.rank]);
            }
        }
        for fused in Model::new(params).fused {
            if let Some(adapter) = adapters.get(&fused.module) {
                let ([a, b], [outputs, inputs]) = (adapter_names(&self.tuning.tensor_module(fused)), fused.dims);
                let ranks = adapter.rank * fused.experts.unwrap_or(1);
                shapes.insert(a, vec![ranks, inputs]);
                shapes.insert(b, vec![outputs, ranks]);
            }
        }
        shapes
    }
}

/// Whether a directory has an adapter, but no model.
pub fn is_alone(dir: &Path) -> bool {
    dir.join(adapter_config::FILE).is_file() && !dir.join("config.json").exists()
}

/// Whether an adapter has matrices of a vision tower.
///
/// # Errors
/// `Data` or `Io` if its file cannot be read.
pub(super) fn has_tower(dir: &Path) -> Result<bool> {
    Ok(Checkpoint::open_file(tensors_of(dir)?)?.names().any(|name| our_name(name).starts_with(TOWER)))
}

/// The file with the tensors of an adapter.
fn tensors_of(dir: &Path) -> Result<std::path::PathBuf> {
    let path = dir.join(TENSORS);
    let (shown, bin) = (dir.display(), "adapter_model.bin");
    if path.is_file() {
        return Ok(path);
    }
    Err(if dir.join(bin).is_file() {
        Error::data(format!("{shown} has no {TENSORS}, only {bin}, a pickle file that could run code")).hint(format!(
            "convert it with python -c \"import torch, safetensors.torch as s; \
             s.save_file(torch.load('{shown}/{bin}', weights_only=True), '{shown}/{TENSORS}')\""
        ))
    } else {
        Error::data(format!("{shown} has no {TENSORS}")).hint("use the directory of an adapter of PEFT")
    })
}

/// The parameter of a tensor in a file. State dictionaries that were saved as they are contain the adapter's name,
/// "default".
fn our_name(name: &str) -> String {
    let name = Naming::from_files(name.strip_prefix(PREFIX).unwrap_or(name)).0;
    // Mixtral's of transformers 4.
    let name = &if name.contains(".lora_") { name.replace(".block_sparse_moe.", ".mlp.") } else { name };
    let [a, b, whole] = [".lora_A.", ".lora_B.", ".modules_to_save."].map(|part| name.split_once(part));
    match (a, b, whole) {
        (Some((module, rest)), ..) => format!("{module}.lora_A.{}", without_name(rest)),
        (_, Some((module, rest)), _) => format!("{module}.lora_B.{}", without_name(rest)),
        (.., Some((module, rest))) => format!("{module}.{}", without_name(rest)),
        _ => name.to_owned(),
    }
}

fn without_name(rest: &str) -> &str {
    rest.strip_prefix("default.").unwrap_or(rest)
}

#[cfg(test)]
mod tests;
