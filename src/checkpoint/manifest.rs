//! `manifest.json`: the contents of a checkpoint.
//!
//! The first line holds the xxh3 of all bytes after it, so that damage is detected. The file as a whole is JSON.

use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::sys::files::xxh3;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

pub const NAME: &str = "manifest.json";
const FORMAT: u32 = 3;

/// The elements of a flat f32 vector that a file holds. Several files make up the vector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    pub vector: String,
    /// `[start, end]` of each range, ascending; their values are contiguous in the file.
    pub ranges: Vec<[usize; 2]>,
    pub len: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub name: String,
    pub bytes: u64,
    pub xxh3: String,
    pub shard: Option<Shard>,
}

/// The manifest. The numbers of ranks and the configuration hash are for readers; a resume does not need them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    pub step: u64,
    pub(super) ranks: usize,
    /// data, pipeline, sequence, tensor
    mesh: [usize; 4],
    /// Hash of the resolved configuration.
    pub config_hash: String,
    /// RNG, cursors, controllers: all the state that the run needs to resume.
    pub state: Value,
    pub files: Vec<Entry>,
}

fn first_line(hash: &str) -> String {
    format!("{{\"xxh3\":\"{hash}\",\n")
}

impl Manifest {
    /// A manifest without files, which `save` writes and adds.
    pub fn new(step: u64, mesh: &Mesh, config_hash: &str, state: Value) -> Self {
        let (&Mesh { data, pipeline, sequence, tensor, .. }, config_hash) = (mesh, config_hash.to_string());
        let mesh = [data, pipeline, sequence, tensor];
        Self { format: FORMAT, step, ranks: 0, mesh, config_hash, state, files: Vec::new() }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let body = serde_json::to_string_pretty(self).expect("a manifest serializes");
        let rest = body.strip_prefix("{\n").expect("an object");
        format!("{}{rest}\n", first_line(&xxh3(format!("{rest}\n").as_bytes()))).into_bytes()
    }

    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(NAME);
        let bad = |why: String| Error::data(format!("{}: {why}", path.display()));
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io("read", &path, &e))?;
        let (first, rest) = text.split_once('\n').ok_or_else(|| bad("the file is truncated".to_string()))?;
        if format!("{first}\n") != first_line(&xxh3(rest.as_bytes())) {
            return Err(bad("its hash does not match its contents".to_string()));
        }
        let manifest: Self = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        if manifest.format != FORMAT {
            return Err(bad(format!("must have format {FORMAT} (got {})", manifest.format)));
        }
        for entry in &manifest.files {
            check_name(&entry.name).map_err(|e| e.within(path.display()))?;
        }
        Ok(manifest)
    }
}

/// Checks that a file lies in the checkpoint, or in a folder of it: a plain name or two, not hidden, not the manifest
/// itself.
pub(super) fn check_name(name: &str) -> Result<()> {
    let is_plain = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(char::is_control);
    if name == NAME || name.split('/').count() > 2 || !name.split('/').all(is_plain) {
        return Err(Error::data(format!("{name:?} is not the name of a file in a checkpoint")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_float_of_the_state_survives_bit_for_bit() {
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        let floats: Vec<f64> = (0..20_000)
            .map(|_| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                f64::from_bits(x)
            })
            .filter(|f| f.is_finite())
            .collect();
        let state = json!({ "a": floats, "nested": [{ "b": 0.1, "c": null, "d": "text" }], "n": 7 });
        let files = vec![Entry { name: "a.bin".to_string(), bytes: 4, xxh3: xxh3(b"abcd"), shard: None }];
        let manifest = Manifest { files, ..Manifest::new(3, &Mesh::data_only(2), "h", state) };
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join(NAME), manifest.to_bytes()).expect("writes");
        assert_eq!(Manifest::read(dir.path()).expect("reads"), manifest);
    }
}
