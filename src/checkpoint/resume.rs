//! Finding the newest complete checkpoint, and reading it on any number of ranks.

use super::manifest::{self, Entry, Manifest, Shard};
use super::save::{BEST, clean, steps};
use crate::comm::{Group, records};
use crate::error::{Error, Result};
use crate::sys::files::xxh3_of;
use crate::sys::map::Map;
use serde_json::Value;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub struct Checkpoint {
    pub dir: PathBuf,
    pub manifest: Manifest,
    /// Newer checkpoints that do not verify, and why.
    pub skipped: Vec<String>,
}

/// The newest checkpoint under `root` whose manifest and files verify. `None` if there are no checkpoints at all.
pub fn newest(root: &Path) -> Result<Option<Checkpoint>> {
    find(root, &Group::one())
}

/// The state of the newest checkpoint under `root` whose manifest can be read; its other files are not checked.
pub fn peek(root: &Path) -> Option<Value> {
    newest_first(root).find_map(|dir| Some(Manifest::read(&dir).ok()?.state))
}

/// The newest checkpoint of a run directory, or of its `checkpoints`, whose manifest can be read. `None` for the
/// directory of a model or of one checkpoint.
pub fn newest_of(dir: &Path) -> Option<PathBuf> {
    if ["config.json", manifest::NAME].iter().any(|file| dir.join(file).exists()) {
        return None;
    }
    let roots = [dir.to_path_buf(), dir.join("checkpoints")];
    roots.iter().flat_map(|root| newest_first(root)).find(|dir| Manifest::read(dir).is_ok())
}

fn newest_first(root: &Path) -> impl Iterator<Item = PathBuf> {
    steps(root).into_iter().rev().map(|step| root.join(format!("step-{step}")))
}

/// The checkpoints of a run whose manifests can be read, newest first. Their other files are not checked.
pub fn all(root: &Path) -> Vec<Checkpoint> {
    newest_first(root).filter_map(|dir| Checkpoint::open(&dir).ok()).collect()
}

/// Finds the checkpoint at the start of a run. Rank 0 removes partial files of a killed run. Then all ranks find the
/// newest checkpoint that verifies, each hashing its share of the files.
pub fn resume(root: &Path, group: &Group) -> Result<Option<Checkpoint>> {
    group.agree(if group.rank() == 0 { clean(root) } else { Ok(()) })?;
    find(root, group)
}

/// Like `resume`, without removing anything: for a dry run.
pub fn find(root: &Path, group: &Group) -> Result<Option<Checkpoint>> {
    // Rank 0's listing counts, because other hosts may still see an older one.
    let listed: Vec<(u64, String)> = records::of_first(group, || listing(root));
    let mut skipped = Vec::new();
    for (step, name) in listed {
        let dir = root.join(&name);
        let checked = Checkpoint::open(&dir).and_then(|c| {
            c.verify(group)?;
            if c.manifest.step == step {
                Ok(c)
            } else {
                Err(Error::data(format!("{} must hold step {step} (got {})", dir.display(), c.manifest.step)))
            }
        });
        match group.agree(checked) {
            Ok(checkpoint) => return Ok(Some(Checkpoint { skipped, ..checkpoint })),
            Err(error) => skipped.push(format!("{name}: {}", error.message)),
        }
    }
    if skipped.is_empty() {
        return Ok(None);
    }
    Err(Error::data(format!("no complete checkpoint in {}:\n  {}", root.display(), skipped.join("\n  ")))
        .hint("restore one from a backup, or move the directory away to start from the beginning"))
}

/// The steps and names of all checkpoints, newest first. One that was set aside as the best follows the one that
/// replaced it, which contains more.
fn listing(root: &Path) -> Vec<(u64, String)> {
    let names = |step: u64| [format!("step-{step}"), format!("step-{step}.{BEST}")].map(|name| (step, name));
    let all = steps(root).into_iter().rev().flat_map(names);
    all.filter(|(_, name)| root.join(name).is_dir()).collect()
}

/// Whether a file of the checkpoint in `dir` does not exist.
pub fn lacks_files(dir: &Path) -> bool {
    let is_missing = |name: &str| std::fs::exists(dir.join(name)).is_ok_and(|exists| !exists);
    match Manifest::read(dir) {
        Ok(manifest) => manifest.files.iter().any(|entry| is_missing(&entry.name)),
        Err(_) => is_missing(manifest::NAME),
    }
}

impl Checkpoint {
    /// Reads the manifest; `verify` checks the files. `dir` may be the `latest` link.
    pub fn open(dir: &Path) -> Result<Self> {
        Ok(Self { dir: dir.to_path_buf(), manifest: Manifest::read(dir)?, skipped: Vec::new() })
    }

    /// Hashes this rank's share of the files.
    pub fn verify(&self, group: &Group) -> Result<()> {
        for entry in self.manifest.files.iter().skip(group.rank()).step_by(group.size()) {
            let path = self.sized(entry)?;
            if xxh3_of(&path)?.1 != entry.xxh3 {
                return Err(Error::data(format!("{}: its hash differs from the manifest's", path.display())));
            }
        }
        Ok(())
    }

    /// The path of a file, whose size must match the manifest.
    pub(super) fn sized(&self, entry: &Entry) -> Result<PathBuf> {
        let path = self.dir.join(&entry.name);
        let bytes = std::fs::metadata(&path).map_err(|e| Error::io("open", &path, &e))?.len();
        if bytes == entry.bytes {
            return Ok(path);
        }
        Err(Error::data(format!("{}: it has {bytes} bytes, but the manifest lists {}", path.display(), entry.bytes)))
    }

    /// The bytes of a memory-mapped file. Page-aligned: `bytemuck::cast_slice` returns its numbers.
    pub fn file(&self, name: &str) -> Result<Map> {
        let entry = self.manifest.files.iter().find(|e| e.name == name);
        let entry = entry.ok_or_else(|| Error::data(format!("{}: it has no file {name}", self.dir.display())))?;
        Map::open(&self.sized(entry)?)
    }

    /// The number of elements of the flat vector saved in shards under this name. `None` if there is no such vector.
    pub fn vector_len(&self, vector: &str) -> Option<usize> {
        self.shards(vector).next().map(|(_, shard)| shard.len)
    }

    pub(super) fn shards<'a>(&'a self, vector: &'a str) -> impl Iterator<Item = (&'a Entry, &'a Shard)> {
        self.manifest.files.iter().filter_map(move |e| e.shard.as_ref().filter(|s| s.vector == vector).map(|s| (e, s)))
    }
}
