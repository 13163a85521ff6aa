//! `PREFIX.json` and the lines of `PREFIX.meta.jsonl`: data that Megatron's two files do not hold.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::file_of;
use crate::error::{Error, Result};
use crate::sys::files::{write_atomic, xxh3_of};

/// Size and hash of a file of the shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHash {
    pub bytes: u64,
    /// XXH3 (64 bits) of the contents, in hexadecimal.
    pub xxh3: String,
}

impl FileHash {
    pub(crate) fn from_file(path: &Path) -> Result<Self> {
        let (bytes, xxh3) = xxh3_of(path)?;
        Ok(Self { bytes, xxh3 })
    }
}

/// The documents of one split, which are consecutive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitRange {
    pub name: String,
    pub first: u64,
    pub documents: u64,
}

/// The description of a shard beyond its tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sidecar {
    pub version: u32,
    /// SHA-256 of `tokenizer.json`. Empty for a shard from elsewhere.
    #[serde(default)]
    pub tokenizer_sha256: String,
    /// The hash of the image processor's settings and tokens. Empty without images.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image_recipe: String,
    /// Vocabulary that the tokens were checked against; 0 for a shard from elsewhere.
    #[serde(default)]
    pub vocabulary: u64,
    pub token_max: u32,
    pub documents: u64,
    pub sequences: u64,
    pub tokens: u64,
    /// The files by suffix: `.bin`, `.idx`, `.meta.jsonl`, `.meta.idx`, and with images `.images.bin`,
    /// `.images.idx`.
    pub files: BTreeMap<String, FileHash>,
    #[serde(default)]
    pub splits: Vec<SplitRange>,
    /// The rule that made the splits, in the writer's format.
    #[serde(default)]
    pub split_rule: Value,
    #[serde(default)]
    pub inputs: Vec<String>,
}

pub(super) const VERSION: u32 = 1;

impl Sidecar {
    /// The sidecar of `prefix`, if it exists.
    pub(super) fn read(prefix: &Path) -> Result<Option<Self>> {
        let path = file_of(prefix, ".json");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("read", &path, &e)),
        };
        let sidecar: Self = serde_json::from_str(&text).map_err(|e| {
            Error::data(format!("{} is not a shard's sidecar: {e}", path.display()))
                .hint("remove the file, and the shard is scanned again")
        })?;
        if sidecar.version != VERSION {
            return Err(Error::data(format!(
                "{} must have version {VERSION} (got {})",
                path.display(),
                sidecar.version
            )));
        }
        Ok(Some(sidecar))
    }

    /// Replaces the sidecar of `prefix`. Several ranks may scan the same shard at once.
    pub(super) fn write(&self, prefix: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::fault(format!("sidecar: {e}")))?;
        write_atomic(&file_of(prefix, ".json"), format!("{text}\n").as_bytes())
    }

    /// Compares a file of the shard `prefix` with the sidecar's entry, if there is one.
    pub(super) fn check(&self, prefix: &Path, suffix: &str, found: &FileHash) -> Result<()> {
        let Some(written) = self.files.get(suffix).filter(|written| *written != found) else { return Ok(()) };
        let (path, json) = (file_of(prefix, suffix), file_of(prefix, ".json"));
        let describe = |file: &FileHash| format!("{} bytes with hash {}", file.bytes, file.xxh3);
        Err(Error::data(format!(
            "{}: {}, but the sidecar lists {}",
            path.display(),
            describe(found),
            describe(written)
        ))
        .hint(format!(
            "copy the file again, or write the shard again; if another program rewrote the file, remove {}",
            json.display()
        )))
    }
}

/// One line of `PREFIX.meta.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// The label that the answer is compared with. Empty if the data has none.
    #[serde(default)]
    pub label: String,
    /// File and line that the document came from.
    #[serde(default)]
    pub source: String,
    /// The images of the document: the number of each in `PREFIX.images.idx`, and the index of its first token over all
    /// sequences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<[u64; 2]>,
    /// Further fields to keep, such as a curriculum's.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub fields: serde_json::Map<String, Value>,
}
