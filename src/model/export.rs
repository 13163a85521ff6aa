//! Exports weights as a Hugging Face directory: config.json with its original keys, generation_config.json, safetensors
//! in one file or in shards with an index, and the tokenizer files.

use super::adapter_config::{self, AdapterConfig};
use super::adapter_files;
use super::arch::{Arch, Head};
use super::bitsandbytes::QUANTIZATION;
use super::config_json::{GENERATION, Reader};
use super::family_keys::FURTHER_LAYERS;
use super::files::Checkpoint;
use super::naming::Naming;
use super::params::ParamTable;
use super::small_files::{self, TEMPLATES_DIR, TOKENIZER_FILES};
use super::tensor_files::{Names, OF_MODEL, TensorFiles, write_json};
use super::tuning::{Param, Tuning};
use super::weights::UnitValues;
use super::weights::Weights;
use crate::error::{Error, Result};
use crate::sys::files::{self, fsync_dir, parent, read_object, write_atomic};
use crate::tensor::DType;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of tensors in one file, the limit that transformers uses.
const SHARD_BYTES_MAX: usize = 5_000_000_000;

/// Writes the model to `out` in `dtype`. The files go to a temporary directory next to `out`, which is renamed at the
/// end, so `out` is either complete or absent. An existing export is replaced. Tokenizer files and
/// generation_config.json come from `tokenizer_dir`.
///
/// # Errors
/// `Usage` if `out` is a file, or contains files that no export writes; `Io` if writing fails (no partial files are
/// left).
pub fn export(out: &Path, arch: &Arch, weights: &Weights, dtype: DType, tokenizer_dir: Option<&Path>) -> Result<()> {
    Export::begin(out, arch, &weights.table, dtype, tokenizer_dir)?.write(weights)
}

/// An export in progress, for models that no process holds as a whole. Units, or rows of parameters, are written one
/// after another and need not stay in memory. An export that is not committed is removed.
#[derive(Debug)]
pub struct Export {
    out: PathBuf,
    fresh: PathBuf,
    files: TensorFiles,
}

impl Export {
    /// Begins an export of a model with the whole `table`.
    ///
    /// # Errors
    /// The errors of `export`.
    pub fn begin(
        out: &Path,
        arch: &Arch,
        table: &Arc<ParamTable>,
        dtype: DType,
        tokenizer_dir: Option<&Path>,
    ) -> Result<Self> {
        let is_whole = keeps_wrapper(arch, table.head());
        let others = arch.others.as_deref().filter(|_| is_whole).map(Checkpoint::open).transpose()?;
        let has_tower = arch.sight.as_ref().is_some_and(|sight| sight.trains);
        if is_whole && arch.wrapper.is_some() && others.is_none() && !has_tower {
            return Err(Error::fault("the model's directory is not known"));
        }
        let is_around = is_whole && arch.wrapper.is_some();
        let around = others.as_ref().filter(|_| is_around);
        let of_new = if is_around { Naming::Inner } else { Naming::Plain };
        let naming = around.map_or(of_new, Checkpoint::naming);
        let mut export = Self::create(out, Names { naming, ..OF_MODEL }, table, dtype, SHARD_BYTES_MAX)?;
        // The table may have all of it.
        export.files.others = others.filter(|others| export.files.others_of(others).next().is_some());
        export.files.corrections = arch.corrections.clone().with_zeros(&arch.corrected_layers());
        write_metadata(&export.fresh, arch, table.head(), dtype, tokenizer_dir)?;
        Ok(export)
    }

    /// Begins an export of an adapter in the format of PEFT, of a language model inside another model if it
    /// `is_wrapped`. `table` lists the parameters that train: those of `tuning`, in a model with `params`.
    ///
    /// # Errors
    /// The errors of `export`.
    pub fn begin_adapter(
        out: &Path,
        config: &AdapterConfig,
        tuning: &Tuning,
        params: &[Param],
        table: &Arc<ParamTable>,
        dtype: DType,
        is_wrapped: bool,
    ) -> Result<Self> {
        let naming = if is_wrapped { Naming::Inner } else { Naming::Plain };
        let export = Self::create(out, Names { naming, ..adapter_files::NAMES }, table, dtype, usize::MAX)?;
        let config = Value::Object(config.to_json(tuning, params, naming));
        write_json(&export.fresh.join(adapter_config::FILE), &config)?;
        Ok(export)
    }

    fn create(out: &Path, names: Names, table: &Arc<ParamTable>, dtype: DType, shard_bytes_max: usize) -> Result<Self> {
        if out.file_name().is_none() {
            return Err(Error::usage(format!("cannot export to {}: the path must end with a name", out.display()))
                .hint("export to a new directory"));
        }
        check_target(out)?;
        files::create_dir_all(parent(out))?;
        remove_leftovers(out)?;
        let fresh = aside(out, "new");
        fs::create_dir(&fresh).map_err(|e| Error::io("create", &fresh, &e))?;
        let files = TensorFiles::new(&fresh, names, table, dtype, shard_bytes_max);
        Ok(Self { out: out.to_owned(), fresh, files })
    }

    /// Sets the limit on the bytes of tensors in one file. A larger tensor gets a file of its own.
    #[must_use]
    pub fn shard_bytes_max(mut self, bytes: usize) -> Self {
        self.files = self.files.cut_at(bytes);
        self
    }

    /// Writes all units of `weights`, then makes the export visible.
    ///
    /// # Errors
    /// `Io`.
    pub fn write(mut self, weights: &Weights) -> Result<()> {
        (0..weights.table.units().len()).try_for_each(|unit| self.unit(weights.local(unit)))?;
        self.commit()
    }

    /// Writes the next unit of the table.
    ///
    /// # Errors
    /// `Io`.
    ///
    /// # Panics
    /// If the values are not the whole next unit.
    pub fn unit(&mut self, values: &UnitValues) -> Result<()> {
        self.files.unit(values)
    }

    /// Writes the next rows of parameter `index` of the table.
    ///
    /// # Errors
    /// `Io`.
    ///
    /// # Panics
    /// If `index` is not the next parameter.
    pub fn rows(&mut self, index: usize, rows: &[f32]) -> Result<()> {
        self.files.rows(index, rows)
    }

    /// Makes the export visible after all parameters are written.
    ///
    /// # Errors
    /// `Io`.
    pub fn commit(mut self) -> Result<()> {
        self.files.finish()?;
        fsync_dir(&self.fresh)?;
        swap(&self.fresh, &self.out)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // When it is committed there is nothing of this name.
        let _ = fs::remove_dir_all(&self.fresh);
    }
}

/// Whether an export has the model around the language model. A value model that reads text only goes without.
fn keeps_wrapper(arch: &Arch, head: Head) -> bool {
    head == Head::LanguageModel || arch.family.is_inside() || arch.uses_tower()
}

/// A temporary directory next to `out`, for the new or the old export.
fn aside(out: &Path, what: &str) -> PathBuf {
    let name = out.file_name().unwrap_or_default().display();
    parent(out).join(format!(".{name}.{what}-{}", std::process::id()))
}

/// Removes the leftovers of a killed export to `out`. If it was killed between its two renames, the previous export is
/// restored.
///
/// # Errors
/// `Io`.
pub fn remove_leftovers(out: &Path) -> Result<()> {
    let name = out.file_name().unwrap_or_default().display();
    let Ok(entries) = fs::read_dir(parent(out)) else { return Ok(()) };
    for path in entries.flatten().map(|entry| entry.path()) {
        let found = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let of = |what: &str| found.starts_with(&format!(".{name}.{what}-"));
        let removed = match () {
            () if of("old") && !out.exists() => fs::rename(&path, out),
            () if of("old") || of("new") => fs::remove_dir_all(&path),
            () => Ok(()),
        };
        removed.map_err(|e| Error::io("clean up", &path, &e))?;
    }
    Ok(())
}

/// Rejects an `out` that an export must not replace: a file, or a directory with files that no export writes.
///
/// # Errors
/// `Usage`, naming the file in the way; `Io` if the directory cannot be read.
pub fn check_target(out: &Path) -> Result<()> {
    let entries = match fs::read_dir(out) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(_) if out.is_file() => {
            return Err(
                Error::usage(format!("{} is a file, but an export is a directory", out.display())).hint("move it away")
            );
        }
        Err(e) => return Err(Error::io("export to", out, &e)),
    };
    for entry in entries {
        let name = entry.map_err(|e| Error::io("read", out, &e))?.file_name();
        let name = name.to_string_lossy();
        let of_adapter = [adapter_config::FILE, adapter_files::TENSORS];
        let others = ["config.json", GENERATION, "model.safetensors.index.json", TEMPLATES_DIR];
        let ours = TOKENIZER_FILES.iter().chain(&others).chain(&of_adapter).any(|file| *file == name)
            || (name.starts_with("model") && name.ends_with(".safetensors"));
        if !ours {
            return Err(Error::usage(format!(
                "{} exists and contains {name}, which is not part of an export",
                out.display()
            ))
            .hint("export to a new directory"));
        }
    }
    Ok(())
}

/// Renames `fresh` to `out`. An existing `out` is renamed first and removed at the end.
fn swap(fresh: &Path, out: &Path) -> Result<()> {
    let (replaced, old) = (out.exists(), &aside(out, "old"));
    if replaced {
        let _ = fs::remove_dir_all(old);
        fs::rename(out, old).map_err(|e| Error::io("rename", out, &e))?;
    }
    if let Err(e) = fs::rename(fresh, out) {
        if replaced {
            let _ = fs::rename(old, out);
        }
        return Err(Error::io("rename", fresh, &e));
    }
    // The new names reach the disk before anything old is removed.
    fsync_dir(parent(out))?;
    if replaced {
        fs::remove_dir_all(old).map_err(|e| Error::io("remove", old, &e))?;
    }
    Ok(())
}

/// Writes all files but the tensors.
fn write_metadata(dir: &Path, arch: &Arch, head: Head, dtype: DType, tokenizer_dir: Option<&Path>) -> Result<()> {
    write_json(&dir.join("config.json"), &Value::Object(config(arch, head, dtype)))?;
    if let Some(from) = tokenizer_dir {
        for name in small_files::of_tokenizer(from)? {
            if let Some(file) = small_files::own(from, &name)? {
                copy(&file, &dir.join(name))?;
            }
        }
    }
    if head == Head::LanguageModel {
        let own = tokenizer_dir.map(|from| small_files::own(from, GENERATION)).transpose()?.flatten();
        let kept = own.map(|file| read_object(&file)).transpose()?.flatten();
        let mut generation = kept.unwrap_or_else(|| generation_config(arch));
        let named = Reader::for_file(GENERATION, &generation).tokens("eos_token_id")?;
        if arch.eos_tokens.iter().any(|id| !named.contains(id)) {
            generation.insert("eos_token_id".into(), end_tokens(arch));
        }
        write_json(&dir.join(GENERATION), &Value::Object(generation))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    files::create_dir_all(parent(to))?;
    write_atomic(to, &files::read(from).map_err(|e| Error::io("read", from, &e))?)
}

/// The keys of the source config.json and the keys that the export itself sets.
fn config(arch: &Arch, head: Head, dtype: DType) -> Map<String, Value> {
    let wrapper = arch.wrapper.as_ref().filter(|_| keeps_wrapper(arch, head));
    let mut config = arch.source.clone();
    // Exports hold the values of quantized weights.
    config.remove(QUANTIZATION);
    let class = match head {
        Head::LanguageModel => arch.family.causal,
        Head::Value => arch.family.classifier,
    };
    config.insert("architectures".into(), json!([class]));
    config.insert("model_type".into(), json!(arch.family.name));
    if arch.family.has_sigmoids() {
        config.insert(FURTHER_LAYERS.into(), 0.into());
    }
    // transformers 5 does not know the old name of LongRoPE.
    if let Some(kind) =
        config.get_mut("rope_scaling").and_then(|rope| rope.get_mut("type")).filter(|kind| **kind == "su")
    {
        *kind = json!("longrope");
    }
    let dtype = match dtype {
        DType::F32 => "float32",
        DType::Bf16 => "bfloat16",
    };
    // transformers 5 writes `dtype` and reads both; 4 knows `torch_dtype`.
    let key = if config.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    config.remove("torch_dtype");
    config.insert(key.into(), json!(dtype));
    if head == Head::Value {
        config.insert("id2label".into(), json!({"0": "LABEL_0"}));
        config.insert("label2id".into(), json!({"LABEL_0": 0}));
        config.remove("num_labels");
        config.insert("value_head_prefix".into(), json!(arch.value_head));
        if let Some((mean, std)) = arch.reward_mean_std {
            config.insert("mean".into(), json!(mean));
            config.insert("std".into(), json!(std));
        }
    }
    let Some(wrapper) = wrapper else { return config };
    let mut whole = wrapper.wrap(config);
    if head == Head::Value {
        whole.insert("architectures".into(), json!([class]));
    }
    whole
}

fn end_tokens(arch: &Arch) -> Value {
    match arch.eos_tokens[..] {
        [] => Value::Null,
        [one] => json!(one),
        ref several => json!(several),
    }
}

fn generation_config(arch: &Arch) -> Map<String, Value> {
    let mut config = Map::new();
    config.insert("bos_token_id".into(), json!(arch.bos_token));
    config.insert("eos_token_id".into(), end_tokens(arch));
    config.insert("pad_token_id".into(), json!(arch.pad_token));
    config.retain(|_, v| !v.is_null());
    config
}
