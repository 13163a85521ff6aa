//! The safetensors files of a model directory. They are mapped and checked before any value is used.

use super::naming::Naming;
use crate::error::{Error, Result};
use crate::hub::{self, Kind};
use crate::sys::files::{self, read_object};
use crate::sys::map::Map;
use safetensors::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The largest accepted header. 16 MiB describe more than 100,000 tensors.
const HEADER_BYTES_MAX: u64 = 16 << 20;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// One mapped file.
struct Shard {
    path: PathBuf,
    map: Map,
    data_start: usize,
    metadata: Metadata,
}

/// All tensors of a model directory.
pub(super) struct Checkpoint {
    shards: Vec<Shard>,
    /// Maps each tensor name, without the prefix of a language model inside another model, to its shard and its name
    /// there.
    by_name: BTreeMap<String, (usize, String)>,
    naming: Naming,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} tensors in {} files", self.by_name.len(), self.shards.len())
    }
}

/// A tensor on disk.
pub(super) struct Stored<'a> {
    pub path: &'a Path,
    pub shape: &'a [usize],
    pub dtype: Dtype,
    pub bytes: &'a [u8],
    map: &'a Map,
    /// The offset of its first byte in the map.
    at: usize,
}

impl Stored<'_> {
    /// Makes the system read these elements ahead.
    pub(super) fn will_need(&self, elements: Range<usize>) {
        let byte = |element: usize| self.at + (element * self.dtype.bitsize() / 8).min(self.bytes.len());
        self.map.will_need(byte(elements.start)..byte(elements.end));
    }
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let index = read_object(&dir.join(INDEX))?;
        let single = dir.join(SINGLE);
        let weight_map = match &index {
            _ if single.is_file() => BTreeMap::new(),
            Some(index) => weight_map(&dir.join(INDEX), index)?,
            None => return Err(no_safetensors(dir)),
        };
        let names: BTreeSet<&str> = weight_map.values().copied().collect();
        let paths = if names.is_empty() { vec![single] } else { names.iter().map(|n| dir.join(n)).collect() };
        let found = Self::of_shards(paths)?;
        for (name, file) in weight_map {
            let place = found.by_name.get(&Naming::from_files(name).0);
            if place.is_none_or(|(i, _)| !found.shards[*i].path.ends_with(file)) {
                return Err(Error::data(format!(
                    "{}: {INDEX} maps {name} to {file}, but that file does not contain it",
                    dir.display()
                )));
            }
        }
        Ok(found)
    }

    /// Opens a single file.
    pub(super) fn open_file(path: PathBuf) -> Result<Self> {
        Self::of_shards(vec![path])
    }

    fn of_shards(paths: Vec<PathBuf>) -> Result<Self> {
        let shards = paths.into_iter().map(open_shard).collect::<Result<Vec<Shard>>>()?;
        let (mut by_name, mut naming) = (BTreeMap::new(), Naming::Plain);
        for (i, shard) in shards.iter().enumerate() {
            for name in shard.metadata.offset_keys() {
                let (ours, of_name) = Naming::from_files(&name);
                if of_name != Naming::Plain {
                    naming = of_name;
                }
                if let Some((first, _)) = by_name.insert(ours, (i, name.clone())) {
                    let (a, b) = (shards[first].path.display(), shard.path.display());
                    return Err(Error::data(format!("tensor {name} is in two files: {a} and {b}")));
                }
            }
        }
        Ok(Self { shards, by_name, naming })
    }

    /// Whether a tensor has such a name.
    pub(super) fn has(&self, is_such: impl Fn(&str) -> bool) -> bool {
        self.names().any(is_such)
    }

    /// Whether there is a tensor named `head` that differs from the one named `embedding`.
    pub(super) fn has_own_head(&self, head: &str, embedding: &str) -> bool {
        let [head, embedding] = [head, embedding].map(|name| self.get(name).map(|found| (found.dtype, found.bytes)));
        head.is_some() && embedding.is_some() && head != embedding
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// The name in its file of a tensor.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub(super) fn stored_name(&self, name: &str) -> &str {
        &self.by_name[name].1
    }

    /// The names of the language model's tensors.
    pub(super) fn naming(&self) -> Naming {
        self.naming
    }

    /// A text that the header of a file has under `key`.
    pub(super) fn metadata(&self, key: &str) -> Option<&str> {
        self.shards.iter().find_map(|shard| Some(shard.metadata.metadata().as_ref()?.get(key)?.as_str()))
    }

    /// Releases the memory of the bytes read so far.
    pub(super) fn release(&self) {
        self.shards.iter().for_each(|shard| shard.map.release());
    }

    pub(super) fn get(&self, name: &str) -> Option<Stored<'_>> {
        let (shard, stored) = self.by_name.get(name)?;
        let shard = &self.shards[*shard];
        let info = shard.metadata.info(stored)?;
        let (start, end) = info.data_offsets;
        let (at, map) = (shard.data_start + start, &shard.map);
        let bytes = &map[at..shard.data_start + end];
        Some(Stored { path: &shard.path, shape: &info.shape, dtype: info.dtype, bytes, map, at })
    }
}

/// The names of the weight files in `dir` that `load` would read and that exist.
pub fn weight_files(dir: &Path) -> Vec<String> {
    if dir.join(SINGLE).is_file() {
        return vec![SINGLE.to_owned()];
    }
    let index = read_object(&dir.join(INDEX)).ok().flatten().unwrap_or_default();
    let named = weight_map(&dir.join(INDEX), &index).unwrap_or_default();
    let names: BTreeSet<&str> = std::iter::once(INDEX).chain(named.into_values()).collect();
    names.into_iter().filter(|name| dir.join(name).is_file()).map(str::to_owned).collect()
}

/// Maps tensor names to file names. A file name must not contain a directory.
fn weight_map<'a>(
    path: &Path,
    index: &'a serde_json::Map<String, serde_json::Value>,
) -> Result<BTreeMap<&'a str, &'a str>> {
    let wrong = |what: String| Error::data(format!("{}: {what}", path.display()));
    let map = index.get("weight_map").and_then(|m| m.as_object()).filter(|m| !m.is_empty());
    let map = map.ok_or_else(|| wrong("weight_map must be an object that maps tensor names to file names".into()))?;
    let entry = |(name, file): (&'a String, &'a serde_json::Value)| {
        let file =
            file.as_str().ok_or_else(|| wrong(format!("weight_map[\"{name}\"] must be a file name, got {file}")))?;
        let plain = !file.is_empty() && file != "." && file != ".." && !file.contains(['/', '\\', '\0']);
        if plain && file.ends_with(".safetensors") {
            Ok((name.as_str(), file))
        } else {
            Err(wrong(format!(
                "weight_map[\"{name}\"] must be the plain name of a .safetensors file (got \"{}\")",
                file.escape_debug()
            )))
        }
    };
    map.iter().map(entry).collect()
}

/// The error for a path that is not a model directory: what it is instead, and a hint.
pub(super) fn no_model(dir: &Path) -> Error {
    other_kind(dir).unwrap_or_else(|| {
        let error = Error::data(format!("{} has no config.json", dir.display()));
        incomplete(dir, error.hint("use a Hugging Face model directory"))
    })
}

/// Adds the command that completes a snapshot to the error for a missing file, if `dir` is one.
fn incomplete(dir: &Path, error: Error) -> Error {
    if hub::snapshot_of(dir).is_some() { hub::explain(dir, Kind::Model, error) } else { error }
}

/// The error for a path that is something else than a model directory, such as a run or an adapter.
pub fn other_kind(dir: &Path) -> Option<Error> {
    let (shown, has) = (dir.display(), |name: &str| dir.join(name).exists());
    if has("manifest.json") {
        return Some(
            Error::data(format!("{shown} is a checkpoint, not a model"))
                .hint(format!("run `rlhf-hpc export {shown} --out MODEL` to write its model")),
        );
    }
    if has("checkpoints") || has("config.resolved.toml") {
        return Some(Error::data(format!("{shown} is a run directory, not a model")).hint(if has("export") {
            format!("use its model, {shown}/export")
        } else {
            format!("run `rlhf-hpc export {shown} --out MODEL` to write the model of its last checkpoint")
        }));
    }
    if has("adapter_config.json") {
        let config = read_object(&dir.join("adapter_config.json")).ok().flatten().unwrap_or_default();
        let base = config.get("base_model_name_or_path").and_then(|base| base.as_str()).unwrap_or("BASE");
        return Some(Error::data(format!("{shown} is an adapter (LoRA) for {base}, not a model")).hint(format!(
            "name its base model and the adapter: --model {base} --adapter {shown}, in a job model.actor and \
             model.adapter; or merge both with `rlhf-hpc export {base} --adapter {shown} --out MODEL`"
        )));
    }
    let within = files::entries(dir).unwrap_or_default();
    let gguf = std::iter::once(dir.to_owned())
        .chain(within)
        .find(|path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && path.is_file());
    if let Some(gguf) = gguf {
        let (from, name) = (files::parent(&gguf).display(), gguf.file_name().unwrap_or_default().display());
        return Some(Error::data(format!("{} is a GGUF file, which is not supported", gguf.display())).hint(format!(
            "convert it with python -c \"import transformers as t; \
             [c.from_pretrained('{from}', gguf_file='{name}').save_pretrained('MODEL') \
             for c in (t.AutoModelForCausalLM, t.AutoTokenizer)]\", or use the original model"
        )));
    }
    if dir.is_dir() {
        return None;
    }
    let what = if dir.exists() { "is not a directory" } else { "does not exist" };
    let error = Error::data(format!("{shown} {what}"))
        .hint("use a Hugging Face model directory, or ORG/NAME of a model in the Hugging Face cache");
    Some(if dir.exists() { error } else { hub::explain(dir, Kind::Model, error) })
}

fn no_safetensors(dir: &Path) -> Error {
    let pickled = files::entries(dir)
        .unwrap_or_default()
        .into_iter()
        .find(|path| path.extension().is_some_and(|e| ["bin", "pt", "pth"].iter().any(|p| e.eq_ignore_ascii_case(p))));
    match (other_kind(dir), pickled) {
        (Some(error), _) => error,
        (None, Some(file)) => {
            let (dir, name) = (dir.display(), file.file_name().unwrap_or_default().display());
            Error::data(format!("{dir} has no {SINGLE}, only {name}, a pickle file that could run code")).hint(format!(
                "convert it with python -c \"from transformers import AutoModelForCausalLM as M; \
                 M.from_pretrained('{dir}').save_pretrained('{dir}')\""
            ))
        }
        (None, None) => {
            let error = Error::data(format!("{} has no {SINGLE} and no {INDEX}", dir.display()));
            let hint = "use a Hugging Face model directory with safetensors files";
            incomplete(dir, error.hint(hint))
        }
    }
}

/// The first names of a list, and the number of the others.
pub(super) fn listed(names: &[&str]) -> String {
    let shown = names[..names.len().min(4)].join(", ");
    match names.len() {
        0..=4 => shown,
        n => format!("{shown} and {} more", n - 4),
    }
}

fn open_shard(path: PathBuf) -> Result<Shard> {
    let wrong = |what: String| Error::data(format!("{}: {what}", path.display()));
    if !path.is_file() {
        return Err(wrong("no such file, but the index names it".into()).hint("download the missing shard"));
    }
    let map = Map::open(&path)?;
    let cut = |needed: u64| {
        let what = format!("the file is truncated: needs {needed} bytes, has {}", map.len());
        wrong(what).hint("copy or download it again")
    };
    let Some(first) = map.first_chunk::<8>() else { return Err(cut(8)) };
    let header = u64::from_le_bytes(*first);
    if header > HEADER_BYTES_MAX {
        return Err(wrong(format!("the header must be at most {HEADER_BYTES_MAX} bytes (got {header})"))
            .hint("check that this is an intact safetensors file"));
    }
    let data_start = 8 + header as usize;
    if map.len() < data_start {
        return Err(cut(data_start as u64));
    }
    let metadata = match SafeTensors::read_metadata(&map) {
        Ok((_, metadata)) => metadata,
        Err(SafeTensorError::MetadataIncompleteBuffer) => {
            let parsed: Option<Metadata> = serde_json::from_slice(&map[8..data_start]).ok();
            let needed = parsed.map_or(0, |m| m.data_len()) + data_start;
            return Err(if needed > map.len() {
                cut(needed as u64)
            } else {
                wrong(format!("the file has {} bytes that belong to no tensor", map.len() - needed))
            });
        }
        Err(e) => return Err(wrong(format!("not a valid safetensors file: {e}"))),
    };
    Ok(Shard { path, map, data_start, metadata })
}
