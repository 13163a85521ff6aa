//! A Hugging Face directory from weights: config.json with the keys it came with, generation_config.json, safetensors
//! in one file or in shards with an index, and the tokenizer's files.

use super::arch::{Arch, Head, read_object};
use super::pack::unpack;
use super::params::{ParamId, ParamSpec};
use super::weights::{Weights, round};
use crate::error::{Error, Result};
use crate::tensor::DType;
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Bytes of tensors in one file, the limit that transformers uses.
const SHARD_BYTES_MAX: usize = 5_000_000_000;

/// Files of a tokenizer that are copied where they exist.
const TOKENIZER_FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
];

/// Writes the model to `out` in `dtype`: first all of it into a directory beside `out`, which is then renamed, so that
/// `out` is complete or not there. An export that stands there already is replaced. Tokenizer files and
/// generation_config.json come from `tokenizer_dir`.
///
/// # Errors
/// `Usage` if `out` holds files that no export writes; `Io` where writing fails (nothing is left behind).
pub fn export(out: &Path, arch: &Arch, weights: &Weights, dtype: DType, tokenizer_dir: Option<&Path>) -> Result<()> {
    export_in_shards(out, arch, weights, dtype, tokenizer_dir, SHARD_BYTES_MAX)
}

/// As `export`, with a limit on the bytes of tensors in one file (a larger tensor has a file of its own).
///
/// # Errors
/// As `export`.
pub fn export_in_shards(
    out: &Path,
    arch: &Arch,
    weights: &Weights,
    dtype: DType,
    tokenizer_dir: Option<&Path>,
    shard_bytes_max: usize,
) -> Result<()> {
    let (parent, name) = parent_and_name(out)?;
    refuse_foreign(out)?;
    fs::create_dir_all(&parent).map_err(|e| Error::io("create", &parent, &e))?;
    let aside = |what: &str| parent.join(format!(".{name}.{what}-{}", std::process::id()));
    let (fresh, old) = (aside("new"), aside("old"));
    let _ = fs::remove_dir_all(&fresh);
    let written = fs::create_dir(&fresh)
        .map_err(|e| Error::io("create", &fresh, &e))
        .and_then(|()| write_all(&fresh, arch, weights, dtype, tokenizer_dir, shard_bytes_max))
        .and_then(|()| swap(&fresh, out, &old))
        .and_then(|()| sync(&parent));
    if written.is_err() {
        let _ = fs::remove_dir_all(&fresh);
    }
    written
}

fn parent_and_name(out: &Path) -> Result<(PathBuf, String)> {
    let name = out.file_name().ok_or_else(|| {
        Error::usage(format!("{} names no directory to export to", out.display())).hint("give a new directory's path")
    })?;
    let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((parent.to_owned(), name.to_string_lossy().into_owned()))
}

/// Refuses to replace a directory with anything in it that no export writes.
fn refuse_foreign(out: &Path) -> Result<()> {
    let entries = match fs::read_dir(out) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io("export to", out, &e)),
    };
    for entry in entries {
        let name = entry.map_err(|e| Error::io("read", out, &e))?.file_name();
        let name = name.to_string_lossy();
        let ours = TOKENIZER_FILES.contains(&name.as_ref())
            || ["config.json", "generation_config.json", "model.safetensors.index.json"].contains(&name.as_ref())
            || (name.starts_with("model") && name.ends_with(".safetensors"));
        if !ours {
            return Err(Error::usage(format!(
                "{} exists and holds {name}, which is no part of an export",
                out.display()
            ))
            .hint("export to a new directory"));
        }
    }
    Ok(())
}

/// Renames `fresh` to `out`; what stood there before goes aside first and is removed last.
fn swap(fresh: &Path, out: &Path, old: &Path) -> Result<()> {
    let replaced = out.exists();
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
    if replaced {
        fs::remove_dir_all(old).map_err(|e| Error::io("remove", old, &e))?;
    }
    Ok(())
}

fn write_all(
    dir: &Path,
    arch: &Arch,
    weights: &Weights,
    dtype: DType,
    tokenizer_dir: Option<&Path>,
    shard_bytes_max: usize,
) -> Result<()> {
    write_json(&dir.join("config.json"), &Value::Object(config(arch, weights.table.head(), dtype)))?;
    if let Some(from) = tokenizer_dir {
        for name in TOKENIZER_FILES {
            copy(&from.join(name), &dir.join(name))?;
        }
    }
    if weights.table.head() == Head::LanguageModel {
        let kept = tokenizer_dir.map(|from| read_object(&from.join("generation_config.json"))).transpose()?.flatten();
        let generation = kept.unwrap_or_else(|| generation_config(arch));
        write_json(&dir.join("generation_config.json"), &Value::Object(generation))?;
    }
    write_weights(dir, weights, dtype, shard_bytes_max)?;
    sync(dir)
}

/// The keys of the source, with what the export itself decides.
fn config(arch: &Arch, head: Head, dtype: DType) -> Map<String, Value> {
    let mut config = arch.source.clone();
    let class = match head {
        Head::LanguageModel => arch.family.causal,
        Head::Value => arch.family.classifier,
    };
    config.insert("architectures".into(), json!([class]));
    config.insert("model_type".into(), json!(arch.family.name));
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
    config
}

fn generation_config(arch: &Arch) -> Map<String, Value> {
    let mut config = Map::new();
    config.insert("bos_token_id".into(), json!(arch.bos_token));
    let eos = match arch.eos_tokens[..] {
        [] => Value::Null,
        [one] => json!(one),
        ref several => json!(several),
    };
    config.insert("eos_token_id".into(), eos);
    config.insert("pad_token_id".into(), json!(arch.pad_token));
    config.retain(|_, v| !v.is_null());
    config
}

fn write_weights(dir: &Path, weights: &Weights, dtype: DType, shard_bytes_max: usize) -> Result<()> {
    let specs = weights.table.specs();
    let mut shards: Vec<Vec<usize>> = vec![Vec::new()];
    let mut bytes = 0;
    for (i, spec) in specs.iter().enumerate() {
        let size = spec.elements() * dtype.bytes();
        if bytes > 0 && bytes + size > shard_bytes_max {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += size;
        shards.last_mut().expect("starts with one").push(i);
    }
    if let [all] = &shards[..] {
        return write_shard(&dir.join("model.safetensors"), weights, all, dtype);
    }
    let mut weight_map = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        write_shard(&dir.join(&name), weights, shard, dtype)?;
        weight_map.extend(shard.iter().map(|&s| (specs[s].name.clone(), json!(name))));
    }
    let total: usize = specs.iter().map(|s| s.elements() * dtype.bytes()).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    write_json(&dir.join("model.safetensors.index.json"), &index)
}

fn write_shard(path: &Path, weights: &Weights, params: &[usize], dtype: DType) -> Result<()> {
    let specs = weights.table.specs();
    let header = header(params.iter().map(|&i| &specs[i]), dtype);
    let file = File::create(path).map_err(|e| Error::io("create", path, &e))?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(|e| Error::io("write", path, &e));
    write(&(header.len() as u64).to_le_bytes())?;
    write(&header)?;
    for &i in params {
        let spec = weights.table.spec(ParamId(i));
        let values = unpack(spec, &weights.to_master(spec.range()));
        match dtype {
            DType::F32 => values
                .chunks(1 << 16)
                .try_for_each(|chunk| write(&chunk.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()))?,
            DType::Bf16 => values.chunks(1 << 16).try_for_each(|chunk| {
                write(&chunk.iter().flat_map(|&x| round(x).to_le_bytes()).collect::<Vec<u8>>())
            })?,
        }
    }
    let file = file.into_inner().map_err(|e| Error::io("write", path, e.error()))?;
    file.sync_all().map_err(|e| Error::io("write", path, &e))
}

/// The JSON header of a safetensors file, padded so that the data starts at a multiple of 8.
fn header<'a>(specs: impl Iterator<Item = &'a ParamSpec>, dtype: DType) -> Vec<u8> {
    let name = match dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
    };
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut start = 0;
    for spec in specs {
        let end = start + spec.elements() * dtype.bytes();
        let entry = json!({"dtype": name, "shape": spec.shape, "data_offsets": [start, end]});
        entries.insert(spec.name.clone(), entry);
        start = end;
    }
    let mut header = Value::Object(entries).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    write_synced(path, format!("{value:#}\n").as_bytes())
}

/// Copies a file where there is one.
fn copy(from: &Path, to: &Path) -> Result<()> {
    match fs::read(from) {
        Ok(bytes) => write_synced(to, &bytes),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io("read", from, &e)),
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|e| Error::io("write", path, &e))
}

fn sync(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io("write", dir, &e))
}
